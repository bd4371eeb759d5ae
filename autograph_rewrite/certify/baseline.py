"""The graph that placements are claimed of, and which node of the rewritten graph is which of its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autograph_rewrite.certify import kernels
from autograph_rewrite.ir.claims import Claim, Claims
from autograph_rewrite.ir.graph import Graph, Node, Span
from autograph_rewrite.ir.opdefs import get_op
from autograph_rewrite.ir.walk import topological_order

FORWARDS = frozenset(("Identity", "StopGradient", "Snapshot", "PreventGradient", "NextIteration", "Enter", "Exit"))
RENAMED = re.compile(r"(.*)/(?:instance|served)(?:_\d+)?")
WHOLE = re.compile(r"(.*)/whole(?:_\d+)?")


class Leaf(NamedTuple):
    """What an original node gives: `whole`, or `own`: on each instance, or on the one that is named."""

    name: str
    form: str
    instance: int | None = None


class Unknown(NamedTuple):
    """What nothing here can compute, and why."""

    why: str


@dataclass(frozen=True)
class Baseline:
    """The graph that placements are claimed of, by name, with its claims."""

    nodes: Mapping[str, Node]
    claims: Claims
    types: Mapping[str, int]
    same: Mapping[str, str]

    @staticmethod
    def of(graph: Graph, claims: Claims) -> Baseline:
        """Index a graph; nobody may change it."""
        types: dict[str, int] = {}
        same: dict[str, str] = {}
        for node in topological_order(graph):
            for value in node.read_outputs:
                types[value.name] = value.dtype
            if node.op in FORWARDS and node.inputs and node.op != "NextIteration":
                source = node.inputs[0].name
                same[node.output().name] = same.get(source, source)
        for name in claims.values:
            types.setdefault(name, graph.value(name).dtype)
        nodes = {node.name: node for node in graph}
        return Baseline(nodes, replace(claims, values=_as_long_as_the_batch(nodes, claims)), types, same)

    def match(self, node: Node) -> Node | None:
        """Return the claimed node that a node of the rewritten graph is, by name, op and attributes."""
        found = self.nodes.get(node.name)
        claim = self.claims.values.get(node.name)
        if node.op in FORWARDS & kernels.KERNELS.keys() and node.span is Span.ONCE and claim and claim.differs:
            return None  # it hands on what it reads, whole by now
        if found is not None and found.op == node.op and not self._stands_for_merged(node, found):
            return found
        renamed = RENAMED.fullmatch(node.name)
        found = self.nodes.get(renamed[1]) if renamed else None
        return found if found is not None and found.op == node.op else None

    def match_whole(self, node: Node) -> Node | None:
        """Return the claimed node of which a node looks like a copy that runs once, for the whole batch."""
        named = WHOLE.fullmatch(node.name)
        found = self.nodes.get(named[1]) if named and node.span is Span.ONCE else None
        if found is None or found.op != node.op or get_op(node.op).is_stateful or not node.inputs:
            return None
        return found

    def _stands_for_merged(self, node: Node, found: Node) -> bool:
        """Return whether a node took the name of one that is called otherwise now."""
        renamed = (node.graph.nodes.get(f"{node.name}/{suffix}") for suffix in ("instance", "served"))
        return any(one is not None and one.op == found.op for one in renamed)


def _as_long_as_the_batch(nodes: Mapping[str, Node], claims: Claims) -> Mapping[str, Claim]:
    """Return the claims, with a size for each open dimension of which replicas read their blocks."""
    values = dict(claims.values)
    for (name, index), read in claims.reads.items():
        if read.kind != "split":
            continue
        value = nodes[name].inputs[index].name
        shape = values[value].shape if values[value].shape is not None else (None,) * (read.dim + 1)
        if shape is not None and shape[read.dim] is None:
            rows = (read.unit, ("B",))
            values[value] = values[value]._replace(shape=(*shape[: read.dim], rows, *shape[read.dim + 1 :]))
    return values
