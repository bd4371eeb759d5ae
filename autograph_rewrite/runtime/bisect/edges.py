"""The wrong edge: which operand of a node has a value in the rewritten graph that the original's does not explain.

    original    dw ───────────────────────► update
    rewritten   dw ─► all_reduce ─► Mul ──► update

What the update reads is compared with dw: alike on each replica, joined along some dimension, or added up. Where none
of these gives dw, the edge is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograph_rewrite.ir.claims import OWN, Claims
from autograph_rewrite.ir.format.printer import line
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.variable_ops import is_update
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.bisect.side_steps import SideBySide, WrongStep
from autograph_rewrite.runtime.bisect.values import has_value, tap, tensor_name
from autograph_rewrite.runtime.verify.error_norm import Array, deviation
from autograph_rewrite.runtime.verify.report import NOISE_FACTOR
from autograph_rewrite.runtime.verify.side_by_side import Tolerance
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Edge:
    """An operand whose value is not the original's.

    Attributes:
        operand: its position.
        expected: the original tensor that stands there.
        reads: the tensors of the rewritten graph, of each instance.
        producer: the printed line of what makes the first of them.
        made_by: the pass that made that, empty for a node of the original.
        plan: the plan's conversions of the original value.
    """

    operand: int
    expected: str
    reads: tuple[str, ...]
    producer: str
    made_by: str
    plan: tuple[str, ...]


@dataclass(frozen=True)
class Divergence:
    """A place at which differences begin.

    Attributes:
        node: of the original.
        op: its type.
        step: the training step, from 1.
        error: of its value, relative; None of an update, whose variable differs.
        where: the element that differs most.
        instances: its nodes in the rewritten graph; none where passes have replaced it.
        line: the first of them, printed.
        made_by: the pass that made that; empty for a node of the original.
        edges: its operands that are wrong; none: all agree, or none could be looked at.
        agree: original tensors that it reads and that agree.
    """

    node: str
    op: str
    step: int
    error: float | None
    where: str
    instances: tuple[str, ...]
    line: str
    made_by: str
    edges: tuple[Edge, ...]
    agree: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        edges = [{**vars(edge), "reads": list(edge.reads), "plan": list(edge.plan)} for edge in self.edges]
        error = str(self.error) if self.error == float("inf") else self.error
        changed = {"error": error, "edges": edges, "instances": list(self.instances), "agree": list(self.agree)}
        return {**vars(self), **changed}


class Edges:
    """Says of original nodes what is wrong with them in the rewritten graph.

    Args:
        pair: both graphs.
        step: in which they differ.
        plan: of the rewrite, with its edges.
        claims: what is claimed of the values that are read; None where nothing is.
    """

    def __init__(self, pair: SideBySide, step: WrongStep, plan: Plan, claims: Claims | None) -> None:
        self._pair, self._step, self._plan, self._claims = pair, step, plan, claims
        self._graph: Graph = pair.other.graph

    def of(self, node: Node) -> Divergence:
        """Return what is wrong with a node."""
        names = _instances(self._pair.other, node, self._graph)
        here = [self._graph.nodes[name] for name in names]
        found = [(name, one) for v in node.outputs if (one := self._step.errors.get(name := tensor_name(v)))]
        found = [(name, one) for name, one in found if self._step.differs(name, self._pair.allowed.rtol)]
        error, where = (found[0][1].error, found[0][1].where) if found else (None, "")
        operands = list(self._operands(node, here))
        wrong = self._wrong(node, operands) if operands else []
        taken = {index for index, _, _ in wrong}
        return Divergence(
            node.name,
            node.op,
            self._step.number + 1,
            error,
            where,
            names,
            line(here[0]) if here else "",
            self._made_by(here[0]) if here else "",
            tuple(self._edge(*one) for one in wrong),
            tuple(dict.fromkeys(tensor_name(value) for index, value, _ in operands if index not in taken)),
        )

    def _operands(self, node: Node, here: Sequence[Node]) -> Iterator[tuple[int, Value, tuple[str, ...]]]:
        """Yield the operands that can be compared: position, original value, tensors that instances read."""
        if not here or any(one.op != node.op or len(one.inputs) != len(node.inputs) for one in here):
            return
        for index, value in enumerate(node.inputs):
            if has_value(value) and tensor_name(value) in self._step.expected:
                yield index, value, tuple(dict.fromkeys(tensor_name(one.inputs[index]) for one in here))

    def _wrong(
        self, node: Node, operands: Sequence[tuple[int, Value, tuple[str, ...]]]
    ) -> list[tuple[int, Value, tuple[str, ...]]]:
        """Return the operands that nothing explains."""
        tensors = list(dict.fromkeys(name for _, _, names in operands for name in names))
        if self._step.failed:
            return []
        got, _ = self._pair.replay(self._pair.other, self._step.starts, tensors)
        known = dict(zip(tensors, got, strict=True))
        wrong = []
        for index, value, names in operands:
            name = tensor_name(value)
            rtol = max(self._pair.allowed.rtol, NOISE_FACTOR * self._step.noise.get(name, 0.0))
            expected, arrays = self._step.expected[name], [known[one] for one in names]
            alike = is_update(node) or self._is_read_whole(node, index, value)
            if not is_explained(arrays, expected, Tolerance(rtol, self._pair.allowed.atol), alike=alike):
                wrong.append((index, value, names))
        return wrong

    def _is_read_whole(self, node: Node, index: int, value: Value) -> bool:
        """Return whether a node is claimed to read the same, complete value on every replica."""
        if self._claims is None:
            return False
        read = self._claims.reads.get((node.name, index), OWN)
        claim = self._claims.values.get(value.name)
        kind = claim.kind if read is OWN and claim is not None else read.kind
        return kind == "replicated"

    def _edge(self, index: int, value: Value, names: tuple[str, ...]) -> Edge:
        producer = self._graph.nodes[names[0].rpartition(":")[0]]
        plain = tensor_name(value).removesuffix(":0")
        plan = tuple(
            f"{edge.value} {edge.from_} -> {edge.to} by {edge.lowering}, for {edge.owner}: {edge.reason}"
            for edge in self._plan.edges
            if edge.value == plain
        )
        return Edge(index, tensor_name(value), names, line(producer), self._made_by(producer), plan)

    def _made_by(self, node: Node) -> str:
        """Return the pass that made a node; of a replica's copy, the one that made what it is a copy of."""
        made_by: str = node.attr(PASS_ATTR, b"").decode()
        layout = self._pair.other.layout
        if made_by != "expand" or layout is None:
            return made_by
        nodes, origin = layout.graph.nodes, node.attr(ORIGIN_ATTR, b"").decode()
        folded = nodes.get(origin) or nodes.get(_bare(node.name))
        return folded.attr(PASS_ATTR, b"").decode() if folded is not None else made_by


def is_explained(got: Sequence[Array], expected: Array, allowed: Tolerance, *, alike: bool = False) -> bool:
    """Return whether arrays of instances are a value: each of them, or blocks of it, or contributions to it.

    Args:
        got: of the instances, in order.
        allowed: which error is none.
    """

    def agrees(array: Array) -> bool:
        return deviation(np.asarray(array), expected, allowed.rtol, allowed.atol).error <= allowed.rtol

    if all(agrees(one) for one in got):
        return True
    if alike or len(got) == 1 or any(one.ndim != expected.ndim for one in got):
        return False
    for axis in range(expected.ndim):
        others = {(*one.shape[:axis], *one.shape[axis + 1 :]) for one in got}
        if len(others) == 1 and agrees(np.concatenate(got, axis)):
            return True
    is_number = expected.dtype.kind in "iufc" or "float" in expected.dtype.name
    return is_number and len({one.shape for one in got}) == 1 and agrees(sum(got[1:], got[0]))


def _instances(item: TrainingGraph, node: Node, graph: Graph) -> tuple[str, ...]:
    """Return the nodes of a graph that an original node has become."""
    found = None
    if any(has_value(value) for value in node.outputs):
        value = next(value for value in node.outputs if has_value(value))
        found = tap(item, value)
    names = tuple(one.rpartition(":")[0] for one in found.tensors) if found is not None else ()
    if not names:
        names = (item.layout.instances(node.name) if item.layout is not None else ()) or (node.name,)
    return tuple(name for name in dict.fromkeys(names) if name in graph.nodes)


def _bare(name: str) -> str:
    prefix, slash, rest = name.partition("/")
    return rest if slash and prefix.startswith("replica_") else name
