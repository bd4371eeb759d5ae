"""Holds the baseline, the graph whose placements are claimed, and matches nodes of the rewritten graph with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autograph_rewrite.certify import kernels
from autograph_rewrite.certify.along_model import is_along_model
from autograph_rewrite.ir.claims import OWN, Claim, Claims, Dim, sizes_of_shards
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types.opdefs import RESHARD, SHARD_ALIKE, get_op

FORWARDS = frozenset(
    ("Identity", "StopGradient", "Snapshot", "PreventGradient", "NextIteration", "Enter", "Exit", RESHARD, SHARD_ALIKE)
)
RENAMED = re.compile(r"(.*)/(?:instance|on_server)(?:_\d+)?")
WHOLE = re.compile(r"(.*)/whole(?:_\d+)?")


class Leaf(NamedTuple):
    """The data of an original value: `whole`, or `own`: that of each instance, or of the one that is named."""

    name: str
    form: str
    instance: int | None = None


@dataclass(frozen=True)
class Baseline:
    """The graph whose placements are claimed, by name, with its claims.

    Attributes:
        types: element types by value name.
        same: by value name, the value that it is a copy of.
        lengths: by symbol of a size that must count the batch, the rows of each example.
        of_replicas: values that are computed from shards of variables, and that all micro-batches of a replica share.
    """

    nodes: Mapping[str, Node]
    claims: Claims
    types: Mapping[str, int]
    same: Mapping[str, str]
    lengths: Mapping[str, int]
    of_replicas: frozenset[str] = frozenset()

    @staticmethod
    def of(graph: Graph, claims: Claims) -> Baseline:
        """Index a graph, which must not be changed afterwards."""
        types: dict[str, int] = {}
        same: dict[str, str] = {}
        for node in topological_order(graph):
            for value in node.read_outputs:
                types[value.name] = value.dtype
            if node.op in FORWARDS and node.inputs and node.op != "NextIteration" and not is_along_model(node):
                source = node.inputs[0].name
                same[node.output().name] = same.get(source, source)
        for name in claims.values:
            types.setdefault(name, graph.value(name).dtype)
        nodes = {node.name: node for node in graph}
        values, lengths = _as_long_as_the_batch(nodes, claims)
        of_replicas = _made_of_shards(topological_order(graph), claims)
        return Baseline(nodes, replace(claims, values=values), types, same, lengths, of_replicas)

    def match(self, node: Node) -> Node | None:
        """Return the claimed node of a node of the rewritten graph, by name and op."""
        found = self.nodes.get(node.name)
        claim = self.claims.values.get(node.name)
        if node.op in FORWARDS & kernels.KERNELS.keys() and node.span == ONCE and claim and claim.differs:
            return None  # it now forwards the whole value
        if found is not None and _is_lowered(node, found) and not self._stands_for_merged(node, found):
            return found
        renamed = RENAMED.fullmatch(node.name)
        found = self.nodes.get(renamed[1]) if renamed else None
        return found if found is not None and _is_lowered(node, found) else None

    def match_whole(self, node: Node) -> Node | None:
        """Return the claimed node of a copy that runs once, for the whole batch, by name and op."""
        named = WHOLE.fullmatch(node.name)
        found = self.nodes.get(named[1]) if named and node.span == ONCE else None
        if found is None or found.op != node.op or get_op(node.op).is_stateful or not node.inputs:
            return None
        return found

    def _stands_for_merged(self, node: Node, found: Node) -> bool:
        """Return whether a node took the name of a claimed node that was renamed."""
        renamed = (node.graph.nodes.get(f"{node.name}/{suffix}") for suffix in ("instance", "on_server"))
        return any(one is not None and _is_lowered(one, found) for one in renamed)


def _is_lowered(node: Node, found: Node) -> bool:
    """Return whether a node has the op of a claimed node, or that node is an exchange among devices, now lowered."""
    return node.op == found.op or is_along_model(found)


def _made_of_shards(nodes: Iterable[Node], claims: Claims) -> frozenset[str]:
    found: set[str] = set()
    for node in nodes:
        made = any(
            claims.reads.get((node.name, i), OWN) == OWN and value.name in found for i, value in enumerate(node.inputs)
        )
        for value in node.read_outputs:
            claim = claims.values.get(value.name)
            if claim is not None and claim.differs and (made or has_shards(claim)):
                found.add(value.name)
    return frozenset(found)


def has_shards(claim: Claim) -> bool:
    """Return whether a value is split into shards of a variable."""
    sizes = (claim.shape or ())[claim.dim : claim.dim + 1] if claim.kind == "split" else ()
    return any(isinstance(size, tuple) and any(map(sizes_of_shards, size[1])) for size in sizes)


def _as_long_as_the_batch(nodes: Mapping[str, Node], claims: Claims) -> tuple[Mapping[str, Claim], Mapping[str, int]]:
    """Infer open sizes from the blocks that replicas read: with another size the graph would not run.

    Returns:
        The claims, with sizes of unknown dimensions filled in; and by symbol of an open size, the rows of each example.
    """
    values, lengths = dict(claims.values), dict[str, int]()
    for (name, index), read in claims.reads.items():
        if read.kind != "split":
            continue
        value, rows = nodes[name].inputs[index].name, sum(read.segments) or read.unit
        known = values[value].shape
        shape = (None,) * (read.dim + 1) if known is None else known
        size = shape[read.dim]
        if size is None:
            whole = (*shape[: read.dim], (rows, ("B",)), *shape[read.dim + 1 :])
            values[value] = values[value]._replace(shape=whole)
        elif (symbol := _stand_in(size)) and rows % size[0] == 0:
            lengths[symbol] = rows // size[0]
    return values, lengths


def _stand_in(size: Dim) -> str:
    """Return the only symbol of a size, if it does not count examples; otherwise ""."""
    symbols: tuple[str, ...] = size[1] if isinstance(size, tuple) else ()
    return symbols[0] if len(symbols) == 1 and not symbols[0].startswith(("b", "B")) else ""
