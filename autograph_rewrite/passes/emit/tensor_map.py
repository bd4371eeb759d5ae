"""Map each value of the original graph to its instances in the rewritten one, for fetches by original name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.format.annotations import Annotation, Others, annotation
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MICRO, MODEL, ONCE, REPLICA, Mesh
from autograph_rewrite.ir.run_writes import RunWrites
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact, Placement
from autograph_rewrite.ops.facts.symbolic_dims import segments
from autograph_rewrite.passes.emit.replica_layout import instance_name

Join = tuple[Placement, tuple[tuple[int, ...], ...]]
"""One step of combining values: their placement, and the groups of values, by number, that become one value each."""


class View(NamedTuple):
    """How to combine the instances of an original tensor.

    Attributes:
        tensors: its instances in the rewritten graph, one per replica, or a single one.
        placement: how they combine; replicated ones are all the same.
        segments: rows of each example in each segment of a block; empty if a block has one segment.
        joins: how the values of each replica's devices combine, one axis after another, before those of replicas.
    """

    tensors: tuple[str, ...]
    placement: Placement
    segments: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Maps tensors of the original graph to their instances.

    Attributes:
        graph: the folded graph as it was expanded.
        common: nodes whose instances hold the same value.
        facts: of the original values whose instances differ.
        aliases: by original value, its replacement.
        feeds: placeholders of the original graph, also those that no step needs.
        moved: new names of nodes, by original names that NoOps now have.
        partial: whether other processes have replicas, so that instances that differ are not all in this one.
        interleaved: whether the examples of a block are not contiguous.
        hidden: whether instances are iterations of a loop, from which nothing can be fetched.
        state: facts of all values as their readers see them; and, of converted values, as they are produced.
        converted: by result of a conversion, its placement.
        writes: the variables that runs write, compared with the original.
        blocked: by name, the placements along model axes of values that are split or partial there.
    """

    graph: Graph
    common: set[Node]
    facts: Mapping[Value, Fact]
    aliases: Mapping[Value, Value]
    mesh: Mesh
    feeds: frozenset[str] = frozenset()
    moved: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    interleaved: bool = False
    hidden: bool = False
    state: tuple[Mapping[Value, Fact], Mapping[Value, Fact]] = field(default_factory=lambda: ({}, {}))
    converted: Mapping[Value, Placement] = field(default_factory=dict)
    writes: RunWrites = field(default_factory=RunWrites)
    blocked: Mapping[str, Others] = field(default_factory=dict)

    @cached_property
    def _held(self) -> Mapping[str, tuple[Placement, tuple[int, ...]]]:
        return {value.name: (fact.placement, segments(fact.split_size)) for value, fact in self.facts.items()}

    @cached_property
    def _of_replicas(self) -> set[Node]:
        """The nodes that each replica runs once, outside of the loop of its micro-batches."""
        return {node for node in self.graph if node in self.common} - set(frames_of(topological_order(self.graph)))

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return {value.name: new.name for value, new in self.aliases.items()}

    @cached_property
    def placements(self) -> Mapping[str, Annotation]:
        """The placements, by name, of the values of the rewritten graph that propagation knows."""
        facts, raw = self.state
        known = [(value, raw.get(value, fact).placement, fact.placement) for value, fact in facts.items()]
        known += [(value, placement, placement) for value, placement in self.converted.items()]
        found: dict[str, Annotation] = {}
        for value, source, seen in known:
            node = value.node
            if self.graph.nodes.get(node.name) is not node:
                continue  # erased since
            one = annotation(source, seen, node.span)
            suffix = f":{value.index}" if value.index else ""
            found |= dict.fromkeys([f"{name}{suffix}" for name in self.instances(node.name)], one)
        return found

    def find(self, tensor: str) -> View | None:
        """Return how to get a tensor (`x` or `x:0`); None if the graph has it no longer, or not all of it."""
        original, node, suffix = self._now(tensor)
        if node is None:
            return None
        others = dict(self.blocked.get(original, ()))
        if node.span == ONCE:
            return None if others else View((node.name + suffix,), REPLICATED)
        if (self.hidden and node not in self._of_replicas) or any(one.kind == "local" for one in others.values()):
            return None
        names = tuple(one + suffix for one in self._names(node))
        placement, parts = self._held.get(original, (REPLICATED, ()))
        scattered = (self.partial and placement.differs) or (self.interleaved and placement.is_split)
        return None if scattered else View(names, placement, parts, tuple(self._joins(node, others)))

    def on_device(self, tensor: str, device: int) -> tuple[str, ...]:
        """Return the instances of a tensor, which may be blocks of it, on one of the devices of each replica."""
        _, node, suffix = self._now(tensor)
        if node is None:
            return ()
        at = [self.mesh.coordinates(node.span, i).get(MODEL, device) for i in range(self.mesh.count(node.span))]
        return tuple(name + suffix for name, one in zip(self._names(node), at, strict=True) if one == device)

    def _now(self, tensor: str) -> tuple[str, Node | None, str]:
        """Return the original name of a tensor, the node that makes it now, if there is one, and which output it is."""
        node_name, colon, output = tensor.removesuffix(":0").partition(":")
        original = self.moved.get(node_name, node_name) + colon + output
        name, _, index = self._aliases.get(original, original).partition(":")
        return original, self.graph.nodes.get(name), f":{index or 0}"

    def _joins(self, node: Node, others: Mapping[str, Placement]) -> Iterator[Join]:
        """Yield how the values of each replica's devices combine, minor axis first; nothing if it has one device.

        Args:
            others: placements by axis; along other axes the value is replicated, and the first device's is taken.
        """
        mesh = self.mesh
        if not mesh.along:
            return
        found = [mesh.coordinates(node.span, i) for i in range(mesh.count(node.span))]
        at = [(one.get(REPLICA, 0), one.get(MICRO, 0), one.get(MODEL, 0)) for one in found]
        for axis in reversed([one.name for one in mesh.divided] or [MODEL]):
            line_of = {device: line[0] for line in mesh.lines([axis]) for device in line}
            groups: dict[tuple[int, int, int], list[int]] = {}
            for i, (replica, micro, device) in enumerate(at):
                groups.setdefault((replica, micro, line_of[device]), []).append(i)
            yield others.get(axis, REPLICATED), tuple(map(tuple, groups.values()))
            at = list(groups)

    def instances(self, node_name: str) -> tuple[str, ...]:
        """Return the names of the instances of a node."""
        node = self.graph.nodes.get(node_name)
        return () if node is None else self._names(node)

    def _names(self, node: Node) -> tuple[str, ...]:
        count = self.mesh.count(node.span)
        return tuple(instance_name(node, i, self.common, self.mesh.size(MICRO)) for i in range(count))
