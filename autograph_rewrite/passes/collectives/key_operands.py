"""Add the keys by which the members of a collective find each other; constants are shared where possible.

TensorFlow remembers the shape of each instance key, and refuses any other. A collective whose shape may differ between
steps therefore uses a different key for each size: the upper half of all keys is divided into `2^bits` interleaved
rows, one for each of these collectives, so that no two use the same key.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.mesh import EACH, MODEL, STAGE
from autograph_rewrite.ir.verify.collective_groups import GROUP_KEY, is_collective
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.parts.collective_keys import KEYS, group_key
from autograph_rewrite.plan.parts.messages import EdgePlan

KEY_BITS = 30
"""How many bits of an instance key hold a size and its row; the bit above them marks these keys."""


def collective_attrs(rewrite: Rewrite, edge: EdgePlan | None = None) -> dict[str, Any]:
    """Return the attributes that all collectives share.

    `timeout_seconds` stays 0: TensorFlow starts one sleeping thread per execution for any other value, and thousands
    of them pile up within seconds. The runtime watches the step instead.
    """
    hint = (rewrite.plan.default if edge is None else rewrite.plan.options_of(edge.owner)).hint
    return {"communication_hint": hint, "timeout_seconds": 0.0}


def salted(group_key: int, salt: str) -> int:
    """Return a group key that no other plan uses.

    All graphs that a server runs share one table of collectives, in which TensorFlow remembers type and shape of each
    instance of a group. The salt follows from the plan, so it is equal in all processes.
    """
    if not salt:
        return group_key
    digest = hashlib.sha256(f"{salt}\n{group_key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % KEYS or 1


def _salt(rewrite: Rewrite) -> str:
    """Return a text that differs between plans, and between models of different shapes that have the same plan.

    The digest of the plan is not enough: two models that differ in their widths only have the same plan.
    """
    said = [f"{name} {one.dtype} {one.shape}" for name, one in sorted(rewrite.request.item.variables.items())]
    for edge in rewrite.plan.edges:
        shape = rewrite.state.source(rewrite.graph.value(edge.value)).shape if edge.is_collective else None
        if shape is not None and all(isinstance(dim, int) for dim in shape):  # others may differ between processes
            said.append(f"{edge.value} {shape}")
    return hashlib.sha256("\n".join([rewrite.plan.digest(), *said]).encode()).hexdigest()


def in_stage(key: Value, stage: int | None) -> Value:
    """Put the key of a group in a stage, so that the group's collectives are put there, too (`stay_in_stages`).

    Keys that run for each micro-batch are left out: they also belong to a part of the schedule, and are in the stage of
    their inputs.
    """
    if stage is not None and key.node.span != EACH:
        key.node.put(STAGE, stage)
    return key


def stay_in_stages(graph: Graph) -> None:
    """Put collectives in the stage whose devices meet."""
    for node in graph:
        if is_collective(node.op) and STAGE in node.inputs[GROUP_KEY].node.place:
            node.put(STAGE, node.inputs[GROUP_KEY].node.at(STAGE))


class Keys:
    """Makes the key operands of the collectives of one rewrite.

    Attributes:
        salt: makes its groups differ from those of other plans; empty if one process has all devices.
    """

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite = rewrite
        self.salt = _salt(rewrite) if rewrite.processes > 1 or rewrite.plan.is_driven else ""
        edges = [edge for edge in rewrite.plan.edges if edge.is_collective]
        ordered = sorted({edge.instance_key for edge in edges})
        self._row = {key: row for row, key in enumerate(ordered)}
        self._bits = max(1, (len(ordered) - 1).bit_length())
        self._cache: dict[tuple[str, int, Value | None], Value] = {}

    def __call__(self, rewrite: Rewrite, edge: EdgePlan, near: Value, *, changing: bool) -> list[Value]:
        """Return group size, group key and instance key for a collective of `near`.

        Args:
            edge: the plan's edge.
            near: the tensor that is sent.
            changing: whether its shape may differ between steps.
        """
        members = rewrite.processes if edge.lowered.crosses else rewrite.plan.replicas
        size = self._number("size", members, near)
        group = self._group(edge, near)
        if not changing:
            return [size, group, self._number("instance", edge.instance_key, near)]
        return [size, group, self._key_of_size(self._row[edge.instance_key], near)]

    def _group(self, edge: EdgePlan, near: Value) -> Value:
        """Return the group key; each device of a replica has a group with its peers in the other replicas."""
        rewrite, plan = self._rewrite, self._rewrite.plan
        if rewrite.along == 1:
            key = self._number("group", salted(edge.group_key, self.salt), near)
        else:
            groups = [group_key(plan.members(edge.lowered.crosses, edge.logical + i)) for i in range(rewrite.along)]
            keys, name = [salted(group, self.salt) for group in groups], f"{near.node.name}/group"
            key = rewrite.const_at(lambda at: keys[at.get(MODEL, 0)], np.int32, name=name, near=near)
        size = plan.model.size if plan.model is not None else 1
        return in_stage(key, edge.logical // size if plan.pipeline is not None else None)

    def _number(self, what: str, number: int, near: Value) -> Value:
        # In a loop a constant waits for the value near it, so a branch without that value needs another constant.
        key = (what, number, near if self._rewrite.frames.get(near.node) else None)
        if key not in self._cache:
            name = f"autograph_keys/{what}_{number}"
            self._cache[key] = self._rewrite.const(number, np.int32, name=name, near=near)
        return self._cache[key]

    def _key_of_size(self, row: int, near: Value) -> Value:
        build = FoldedBuilder.of(self._rewrite, near, f"{near.node.name}/key")
        size = build.op("Size", near, what="size")
        mask = self._number("mask", 2 ** (KEY_BITS - self._bits) - 1, near)
        bounded = build.op("BitwiseAnd", size, mask, what="bounded")
        spread = build.op("Mul", bounded, self._number("rows", 2**self._bits, near), what="spread")
        return build.op("AddV2", spread, self._number("row", 2**KEY_BITS + row, near), what="instance")
