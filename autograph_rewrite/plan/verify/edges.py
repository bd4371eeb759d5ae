"""Invariants of a plan's edges: they name existing values, and their collectives cannot deadlock or be confused."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.diagnostics.located_yaml import KeyPath
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.ir.types.device_names import DeviceNameError
from autograph_rewrite.ir.types.dtypes import NUMBERS, dtype_name
from autograph_rewrite.plan.parts import collective_keys
from autograph_rewrite.plan.parts.graph_digest import ItemLike, NodeLike, graph_digest
from autograph_rewrite.plan.parts.lowerings import LOWERINGS
from autograph_rewrite.plan.parts.messages import SIZES, STEP, EdgePlan
from autograph_rewrite.plan.parts.residence import shard_name
from autograph_rewrite.plan.plan import Plan

_PLACEMENT = re.compile(r"[a-z_]+(\([^()]+\))?")
_OF_SHARDS = re.compile(r"/(part_\d+|shards(_\d+)?)(/|$)")  # nodes that partitioning makes
_INT32 = 2**31


class Finding(NamedTuple):
    """What is wrong, at which path of the plan, and the way out."""

    path: KeyPath
    message: str
    hint: str | None = None


def edges_are_of_this_graph(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """Edges were resolved on the graph that they shall be applied to."""
    if plan.edges and plan.graph_digest and plan.graph_digest != graph_digest(item.graph):
        message = "the edges of this plan were resolved on another graph"
        yield Finding(("graph_digest",), message, "delete edges and graph_digest to have them resolved anew")


def edges_name_what_is_there(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """The value and the owner of an edge exist; where variables are cut into shards, a pass will make some of them."""
    shards = {shard_name(request.name, k) for request in plan.variables for k in range(len(request.sizes))}
    for i, edge in enumerate(plan.edges):
        node = item.graph.nodes.get(edge.node)
        if node is None and shards and _OF_SHARDS.search(edge.node):
            continue
        if node is None:
            hint = did_you_mean(edge.node, list(item.graph.nodes)) if len(item.graph.nodes) < 1000 else None
            close = hint if hint and hint.startswith("did you mean") else None
            yield Finding(("edges", i, "value"), f"the graph has no value '{edge.value}'", close)
        else:
            yield from _fits_node(i, edge, node)
        if edge.owner != STEP and edge.owner not in item.variables and edge.owner not in shards:
            hint = did_you_mean(edge.owner, [STEP, *item.variables], noun="known owners")
            yield Finding(("edges", i, "owner"), f"no variable '{edge.owner}' can own '{edge.value}'", hint)


def edges_are_well_formed(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """Placements, lowering, type and numbers mean something."""
    for i, edge in enumerate(plan.edges):
        for key, placement in (("from", edge.from_), ("to", edge.to)):
            if _PLACEMENT.fullmatch(placement) is None:
                message = f"'{placement}' is no placement ({key} of '{edge.value}')"
                yield Finding(("edges", i, key), message, "write one like replicated, split(0) or partial(sum)")
        if edge.lowering not in LOWERINGS:
            hint = did_you_mean(edge.lowering, list(LOWERINGS), noun="known lowerings")
            yield Finding(("edges", i, "lowering"), f"there is no lowering '{edge.lowering}'", hint)
        if edge.dtype and edge.dtype not in NUMBERS:
            hint = did_you_mean(edge.dtype, list(NUMBERS), noun="known types")
            yield Finding(("edges", i, "dtype"), f"there is no type '{edge.dtype}'", hint)
        for key in ("bytes", "bucket", "group_key", "instance_key", "order"):
            number = getattr(edge, key)
            if number is not None and not 0 <= number < (_INT32 if key != "bytes" else 2**63):
                yield Finding(("edges", i, key), f"{key} of '{edge.value}' is {number}")
        if edge.bucket and edge.lowering in LOWERINGS and not edge.lowered.is_bucketed:
            message = f"'{edge.value}' cannot be in a bucket: {edge.lowering} has none"
            yield Finding(("edges", i, "bucket"), message, "leave bucket out")


def edges_stand_once(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """One value is converted to one placement once."""
    first: dict[tuple[str, str, str], int] = {}
    for i, edge in enumerate(plan.edges):
        seen = first.setdefault((edge.value, edge.to, edge.role), i)
        if seen != i:
            message = f"edges[{i}] converts '{edge.value}' to {edge.to} again, as edges[{seen}] does"
            yield Finding(("edges", i), message, "delete one of them")


def collectives_have_keys(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """Collectives need a group and its key, a key of their own and a place in the order."""
    groups = functools.cache(lambda crosses, logical: _group_key(plan.members(crosses, logical)))
    for i, edge in enumerate(plan.edges):
        if not edge.is_collective:
            continue
        group = groups(edge.lowered.crosses, edge.logical)
        if plan.mode == "shared" and not edge.lowered.crosses:
            message = f"'{edge.value}' is a {edge.lowering}, which has no members where variables are shared"
            yield Finding(("edges", i, "lowering"), message, "set mode to mirrored, or use add_n or concat")
        if group is not None and edge.group_key != group:
            message = f"group_key of '{edge.value}' is {edge.group_key}, but that of these devices is {group}"
            yield Finding(("edges", i, "group_key"), message, "delete edges to have them resolved anew")
        if edge.instance_key == 0:
            yield Finding(("edges", i), f"the collective '{edge.value}' has no instance_key")
        if edge.order is None:
            message = f"the collective '{edge.value}' has no order: replicas could start theirs in different orders"
            yield Finding(("edges", i), message, "give each collective its own number")


def collectives_do_not_meet(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """No two collectives of a group share a key, and no two at all share a place in the order."""
    keyed: dict[tuple[int, int], int] = {}
    ordered: dict[int, int] = {}
    for i, edge in enumerate(plan.edges):
        if not edge.is_collective:
            continue
        if edge.instance_key:
            other = keyed.setdefault((edge.group_key, edge.instance_key), i)
            if not _together(plan, i, other):
                message = f"'{edge.value}' has the instance_key {edge.instance_key} of '{plan.edges[other].value}'"
                hint = "TensorFlow would pair whichever tensors arrive together; give each its own"
                yield Finding(("edges", i, "instance_key"), message, hint)
        if edge.order is not None:
            other = ordered.setdefault(edge.order, i)
            if not _together(plan, i, other):
                message = f"'{edge.value}' has the order {edge.order} of '{plan.edges[other].value}'"
                yield Finding(("edges", i, "order"), message, "a deadlock is ruled out by a total order only")


def buckets_are_uniform(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """The values of a bucket are reduced as one, so they agree in all that matters for it."""
    buckets: dict[int, list[int]] = defaultdict(list)
    for i, edge in enumerate(plan.edges):
        if edge.bucket:
            buckets[edge.bucket].append(i)
    for bucket, (first, *others) in buckets.items():
        for i in others:
            for key, of_first, of_this in _traits(plan, first, i):
                if of_first != of_this:
                    message = (
                        f"bucket {bucket} mixes {key} {of_first} ('{plan.edges[first].value}') "
                        f"and {of_this} ('{plan.edges[i].value}')"
                    )
                    yield Finding(("edges", i), message, "put them in two buckets")


EDGE_CHECKS: tuple[Callable[[Plan, ItemLike], Iterator[Finding]], ...] = (
    edges_are_of_this_graph,
    edges_name_what_is_there,
    edges_are_well_formed,
    edges_stand_once,
    collectives_have_keys,
    collectives_do_not_meet,
    buckets_are_uniform,
)


def _fits_node(i: int, edge: EdgePlan, node: NodeLike) -> Iterator[Finding]:
    """The node has that output, of that type."""
    index = edge.value.partition(":")[2] or "0"
    try:
        dtypes = node.output_dtypes
    except RewriteError:
        return  # an op that is not known: the loader has said so
    if not index.isdecimal() or int(index) >= len(dtypes):
        message = f"%{node.name} ({node.op}) has {len(dtypes)} outputs, so no '{edge.value}'"
        yield Finding(("edges", i, "value"), message)
    elif edge.to == SIZES:
        return  # it exchanges how long the parts of the value are, not what they hold
    elif edge.dtype in NUMBERS and NUMBERS[edge.dtype] != dtypes[int(index)]:
        message = f"'{edge.value}' is {dtype_name(dtypes[int(index)])}, not {edge.dtype}"
        yield Finding(("edges", i, "dtype"), message)


def _group_key(devices: Sequence[str]) -> int | None:
    try:
        return collective_keys.group_key(devices)
    except DeviceNameError:
        return None  # told by the check of the devices


def _together(plan: Plan, i: int, j: int) -> bool:
    """Whether two edges are one collective."""
    return i == j or (plan.edges[i].bucket != 0 and plan.edges[i].bucket == plan.edges[j].bucket)


def _traits(plan: Plan, first: int, other: int) -> Iterator[tuple[str, object, object]]:
    """What two edges of a bucket must have in common."""
    a, b = plan.edges[first], plan.edges[other]
    placements = () if SIZES in (a.to, b.to) else ("from_", "to")  # what processes tell each other rides along
    for key in ("dtype", "lowering", "compressor", *placements, "group_key", "instance_key", "order"):
        yield key.rstrip("_"), getattr(a, key), getattr(b, key)
    ours, theirs = plan.options_of(a.owner), plan.options_of(b.owner)
    yield "hint", ours.hint, theirs.hint
