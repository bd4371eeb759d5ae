"""Where the values of the original graph are in the rewritten one, for fetches by original name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from autograph_rewrite.analysis.dims import segments
from autograph_rewrite.analysis.fact import REPLICATED, Fact, Placement
from autograph_rewrite.ir.graph import Graph, Node, Span, Value
from autograph_rewrite.passes.expand import instance_name


class View(NamedTuple):
    """How to put an original tensor together.

    Attributes:
        tensors: its instances in the rewritten graph, one per replica, or a single one.
        placement: how they combine; replicated ones are all the same.
        segments: rows of each example in each segment of a block, where it has more than one.
    """

    tensors: tuple[str, ...]
    placement: Placement
    segments: tuple[int, ...] = ()


class Layout:
    """Maps tensors of the original graph to their instances.

    Args:
        graph: the folded graph as it was expanded.
        common: nodes whose instances hold the same value.
        facts: of the original values, where instances differ.
        aliases: what took the place of original values.
        replicas: how many instances there are.
        feeds: placeholders of the original graph, also those that no step needs.
        partial: whether there are replicas in other processes, so that values that differ are not all here.
        micro: how many of them belong to one replica.
        interleaved: whether blocks hold examples that do not follow each other.
        moved: new names of nodes whose own name only waits for them now.
        hidden: whether instances are iterations of a loop, out of which nothing can be fetched.
    """

    def __init__(
        self,
        graph: Graph,
        common: set[Node],
        facts: Mapping[Value, Fact],
        aliases: dict[Value, Value],
        replicas: int,
        feeds: frozenset[str] = frozenset(),
        *,
        moved: Mapping[str, str] | None = None,
        partial: bool = False,
        micro: int = 1,
        interleaved: bool = False,
        hidden: bool = False,
    ) -> None:
        self._graph = graph
        self._common = common
        self._held = {value.name: (fact.placement, segments(fact.split_size)) for value, fact in facts.items()}
        self._aliases = {value.name: new.name for value, new in aliases.items()}
        self._moved = moved or {}
        self.replicas = replicas
        self._micro = micro
        self._interleaved = interleaved
        self._hidden = hidden
        self.feeds = feeds
        self._partial = partial

    def find(self, tensor: str) -> View | None:
        """Return how to get a tensor (`x` or `x:0`), None if it is not in the graph any more, or not all of it."""
        original = tensor.removesuffix(":0")
        node_name, colon, output = original.partition(":")
        original = self._moved.get(node_name, node_name) + colon + output
        name, _, index = self._aliases.get(original, original).partition(":")
        node = self._graph.nodes.get(name)
        if node is None:
            return None
        suffix = f":{index or 0}"
        if node.span is Span.ONCE:
            return View((name + suffix,), REPLICATED)
        if self._hidden:
            return None
        names = tuple(instance_name(node, r, self._common, self._micro) + suffix for r in range(self.replicas))
        placement, parts = self._held.get(original, (REPLICATED, ()))
        scattered = (self._partial and placement.differs) or (self._interleaved and placement.is_split)
        return None if scattered else View(names, placement, parts)

    def instances(self, node_name: str) -> tuple[str, ...]:
        """Return the instances of a node."""
        node = self._graph.nodes.get(node_name)
        if node is None:
            return ()
        if node.span is Span.ONCE:
            return (node_name,)
        return tuple(instance_name(node, r, self._common, self._micro) for r in range(self.replicas))
