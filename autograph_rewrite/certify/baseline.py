"""The baseline: the graph whose placements are claimed, and its correspondence to the rewritten graph's nodes."""

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
    """What an original node gives: `whole`, or `own`: on each instance, or on the one that is named."""

    name: str
    form: str
    instance: int | None = None


@dataclass(frozen=True)
class Baseline:
    """The graph that placements are claimed of, by name, with its claims.

    Attributes:
        types: of elements, by value name.
        same: by value name, the value that it is only another name of.
        lengths: by symbol of a size that has to be that of the batch, how many rows each example has.
        of_replicas: values that are made of shards of variables, so that all micro-batches of a replica have one.
    """

    nodes: Mapping[str, Node]
    claims: Claims
    types: Mapping[str, int]
    same: Mapping[str, str]
    lengths: Mapping[str, int]
    of_replicas: frozenset[str] = frozenset()

    @staticmethod
    def of(graph: Graph, claims: Claims) -> Baseline:
        """Index a graph; nobody may change it."""
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
        """Return the claimed node that a node of the rewritten graph is, by name, op and attributes."""
        found = self.nodes.get(node.name)
        claim = self.claims.values.get(node.name)
        if node.op in FORWARDS & kernels.KERNELS.keys() and node.span == ONCE and claim and claim.differs:
            return None  # it hands on what it reads, whole by now
        if found is not None and _is_lowered(node, found) and not self._stands_for_merged(node, found):
            return found
        renamed = RENAMED.fullmatch(node.name)
        found = self.nodes.get(renamed[1]) if renamed else None
        return found if found is not None and _is_lowered(node, found) else None

    def match_whole(self, node: Node) -> Node | None:
        """Return the claimed node of which a node looks like a copy that runs once, for the whole batch."""
        named = WHOLE.fullmatch(node.name)
        found = self.nodes.get(named[1]) if named and node.span == ONCE else None
        if found is None or found.op != node.op or get_op(node.op).is_stateful or not node.inputs:
            return None
        return found

    def _stands_for_merged(self, node: Node, found: Node) -> bool:
        """Return whether a node took the name of one that is called otherwise now."""
        renamed = (node.graph.nodes.get(f"{node.name}/{suffix}") for suffix in ("instance", "on_server"))
        return any(one is not None and _is_lowered(one, found) for one in renamed)


def _is_lowered(node: Node, found: Node) -> bool:
    """Return whether a node is a claimed one, or what a claimed exchange among devices has been lowered to."""
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
    """Return whether a value is split as a variable is over the replicas."""
    sizes = (claim.shape or ())[claim.dim : claim.dim + 1] if claim.kind == "split" else ()
    return any(isinstance(size, tuple) and any(map(sizes_of_shards, size[1])) for size in sizes)


def _as_long_as_the_batch(nodes: Mapping[str, Node], claims: Claims) -> tuple[Mapping[str, Claim], Mapping[str, int]]:
    """Return what is known of sizes because replicas read their blocks of them: nothing else would run.

    Returns:
        The claims, with a size for each open dimension; and the rows of each example by symbol that stands for a size.
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
    """Return the symbol of which a size is so many times, if it has one that does not count examples."""
    symbols: tuple[str, ...] = size[1] if isinstance(size, tuple) else ()
    return symbols[0] if len(symbols) == 1 and not symbols[0].startswith(("b", "B")) else ""
