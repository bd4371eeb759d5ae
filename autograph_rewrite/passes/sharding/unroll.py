"""Unroll an axis of the mesh: each node with instances along it becomes one node for each coordinate.

    folded     %r = ReadVariableOp(%w) {model}      %whole = ar.reshard(%r)      %y = MatMul(%x, %whole)
    unrolled   r/part_0, r/part_1                   r = ConcatV2(r/part_0, r/part_1)    y = MatMul(x, r)

A conversion becomes ops, once for all its readers. The replacement of an erased node takes its name, so that a fetch by
this name gets the whole value; an erased update leaves a NoOp, which waits for all its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import tie_constants
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, PerInstance, Select, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ops.facts.placement import PARTIAL, Placement
from autograph_rewrite.ops.facts.windows import Rows
from autograph_rewrite.ops.traits import COMBINED_BY

_UNCOPIED = ("_class",)
ALL = Fraction(1)


class Conversion(NamedTuple):
    """A conversion of a value between two placements along the axis.

    Attributes:
        before: the placement of the operand.
        after: the placement that its readers need.
        sizes: of the blocks, if the value is cut.
        halo: the rows that each coordinate reads, if these are more than its block, and the rows that it has.
    """

    before: Placement
    after: Placement
    sizes: tuple[int, ...] = ()
    halo: tuple[tuple[Rows, ...], tuple[Rows, ...]] | None = None

    @property
    def lowering(self) -> str:
        """The name of its lowering in a plan."""
        if self.halo is not None and self.before.is_split:
            return "halo"
        if self.after.differs:
            return "slice"
        return "add_n" if self.before == PARTIAL else "concat" if self.before.is_split else "fold"

    def share(self) -> Fraction:
        """Return the part of the elements that one coordinate sends to others."""
        if self.halo is None:
            return ALL
        spans, owned = self.halo
        owners = list(enumerate(owned)) if self.before.is_split else [(0, (0, owned[-1][1]))]
        taken = sum(
            max(0, min(end, span[1]) - max(first, span[0]))
            for owner, (first, end) in owners
            for k, span in enumerate(spans)
            if owner != k
        )
        return Fraction(taken, owned[0][1] if self.before.is_split else owned[-1][1])


@dataclass
class Unroll:
    """Unrolls an axis.

    Attributes:
        graph: is edited.
        axis: its name.
        count: of its coordinates.
        conversions: by the `ar.reshard` of each.
        named: by name of a node that is erased, the node that takes the name.
        targets: names of the nodes that a step runs, even if nothing reads their values.
        put: puts a node at a coordinate; None: nodes have no coordinate.
        clones: of each node, one for each coordinate.
        sources: the operand of each conversion, by its `ar.reshard`.
        lowered: the nodes that compute a conversion, by its `ar.reshard`.
        parts: the replacements of a value, one for each coordinate.
        wholes: the replacement of a value that all coordinates have.
    """

    graph: Graph
    axis: str
    count: int
    conversions: Mapping[Node, Conversion]
    named: Mapping[str, Node] = field(default_factory=dict)
    targets: Collection[str] = ()
    put: Callable[[Node, int], None] | None = None
    clones: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    sources: dict[Node, Value] = field(default_factory=dict)
    lowered: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    parts: dict[Value, tuple[Value, ...]] = field(default_factory=dict)
    wholes: dict[Value, Value] = field(default_factory=dict)

    def run(self) -> None:
        """Unroll the axis."""
        order = topological_order(self.graph)
        for node in order:
            if node in self.conversions:
                self.lowered[node] = self._lower(node, self.conversions[node])
            elif self.axis in node.span:
                self._clone(node)
        gone = [node for node in order if node in self.clones or node in self.conversions]
        for node in order:
            if node not in self.clones and node not in self.conversions:
                self._read_anew(node)
        for value in set(self.graph.anchors.values()):
            if value in self.wholes or value in self.parts:
                self.graph.move_anchors(value, self.one(value, 0))
        self._hand_on_names(gone)
        tie_constants(self.graph)

    def add(self, op: str, inputs: Sequence[Value], near: Node, what: str, **attrs: Any) -> Value:
        """Add a node, named after `near` and on its device; return its first output."""
        return Builder.at(near, device=near.device).op(op, *inputs, what=what, **attrs)

    def const(self, content: Any, dtype: Any, near: Node, what: str) -> Value:
        """Add a constant of a numpy type."""
        return Builder.at(near, device=near.device).const(np.asarray(content, dtype), what=what)

    def place(self, node: Node, at: int) -> None:
        """Put a node at a coordinate."""
        if self.put is not None:
            self.put(node, at)

    def one(self, value: Value, at: int) -> Value:
        """Return the value that one coordinate reads instead of a value."""
        return self.parts[value][at] if value in self.parts else self.wholes.get(value, value)

    def _clone(self, node: Node) -> None:
        copies = []
        for k in range(self.count):
            inputs = [self.one(value, k) for value in node.inputs]
            copy = copy_node(self.graph, node, inputs, name=f"{node.name}/part_{k}", without=_UNCOPIED)
            copy.set_span(node.span - {self.axis})
            for key, raw in node.attrs.items():
                if isinstance(raw, PerInstance):
                    copy.set_raw_attr(key, raw.raws[k])
            self.place(copy, k)
            copies.append(copy)
        self.clones[node] = tuple(copies)
        for value in node.outputs:
            self.parts[value] = tuple(copy.output(value.index) for copy in copies)
        for before in node.controls:
            others = self.clones.get(before)
            for k, copy in enumerate(copies):
                for other in (before,) if others is None else (others[k],):
                    copy.add_control(other)

    def _lower(self, node: Node, made: Conversion) -> tuple[Node, ...]:
        value = self.sources[node] = node.inputs[0]
        if made.halo is not None:
            self.parts[node.output()] = HaloExchange(self, value, made).run()
        elif made.after.is_split:
            self.parts[node.output()] = self._split(self.one(value, 0), made)
        elif made.after.differs:
            whole = self.one(value, 0)
            zeros = self.add("ZerosLike", [whole], whole.node, "zeros")
            self.parts[node.output()] = (whole, *[zeros] * (self.count - 1))
        else:
            joined = self._join(self.parts[value], made.before, value.node)
            self.wholes[node.output()] = joined
            return (joined.node,)
        owned, parts = self.parts.get(value, ()), self.parts[node.output()]
        added = dict.fromkeys(part.node for part in parts if part not in owned)  # another's block may be read as it is
        return tuple(added) or (parts[0].node,)

    def _split(self, value: Value, made: Conversion) -> tuple[Value, ...]:
        near = value.node
        name = "shards" if value.index == 0 else f"shards_{value.index}"
        sizes = self.const(made.sizes, np.int64, near, f"{name}/sizes")
        at = self.const(made.after.dim, np.int32, near, f"{name}/axis")
        first = self.add("SplitV", [value, sizes, at], near, name, num_split=self.count)
        return first.node.outputs

    def _join(self, parts: Sequence[Value], placement: Placement, near: Node) -> Value:
        if placement.is_split:
            at = self.const(placement.dim, np.int32, near, "whole/axis")
            return self.add("ConcatV2", [*parts, at], near, "whole")
        if placement.op == "sum":
            return self.add("AddN", parts, near, "whole")
        total, *others = parts
        for part in others:
            total = self.add(COMBINED_BY[placement.op], [total, part], near, "whole")
        return total

    def _read_anew(self, node: Node) -> None:
        """Let a node that runs once read the replacements of its operands, and wait for all copies of its controls."""
        inputs: list[Value] = []
        for index, value in enumerate(node.inputs):
            if node.selects.get(index) is Select.ALL and value in self.parts:
                inputs += self.parts[value]
            else:
                inputs.append(self.one(value, 0))
        if tuple(inputs) != node.inputs:
            if len(inputs) != len(node.inputs):
                node.set_attr("N", self.count)
            node.set_inputs(inputs)
        for before in node.controls:
            for copy in self.clones.get(before, ()):
                node.add_control(copy)

    def _hand_on_names(self, gone: Sequence[Node]) -> None:
        """Erase the nodes that have been unrolled, and give their names to their replacements."""
        named: dict[str, Node] = {}
        for node, value in self.sources.items():
            whole = self.wholes.get(node.output())
            if whole is not None and value.index == 0 and value.node in self.clones:
                named[value.node.name] = whole.node
        for name, node in self.named.items():
            if (new := named.pop(node.name, node)) not in self.clones and new not in self.conversions:
                named[name] = new
        kept = [
            (node, copies)
            for node, copies in self.clones.items()
            if not node.output_dtypes or node.name in self.targets
        ]
        for node in gone:
            node.disconnect()
            for user in node.control_users:
                user.remove_control(node)
        for node in gone:
            self.graph.erase(node)
        for name, node in named.items():
            take_name(self.graph, node, name)
        for node, copies in kept:
            if node.name not in self.graph.nodes:
                Builder(self.graph, node.name, node.name, device=copies[0].device).node("NoOp", controls=copies)


# Halo exchange: an op with a window runs on a block of rows, and on rows of its neighbours.
#
#     before   x ──► Conv2D, 3 rows, SAME ──► y                   8 rows, split along them over 2 devices
#     after    x/part_0, first row of x/part_1 ──► ConcatV2 ──► Conv2D, EXPLICIT (1, 0) ──► y/part_0      4 rows
#              last row of x/part_0, x/part_1 ──► ConcatV2 ──► Conv2D, EXPLICIT (0, 1) ──► y/part_1       4 rows


@dataclass
class HaloExchange:
    """Reads rows of neighbouring blocks.

    Attributes:
        unroll: adds nodes.
        value: images.
        made: their conversion.
    """

    unroll: Unroll
    value: Value
    made: Conversion

    def run(self) -> tuple[Value, ...]:
        """Return the rows that each coordinate reads."""
        assert self.made.halo is not None
        blocks = self.blocks()
        return tuple(self._joined(blocks, span, k) for k, span in enumerate(self.made.halo[0]))

    def blocks(self) -> list[tuple[Rows, Value, int]]:
        """Return the parts of the value: the rows of each, the part, and its coordinate."""
        assert self.made.halo is not None
        owned, value = self.made.halo[1], self.value
        if not self.made.before.is_split:
            return [((0, owned[-1][1]), self.unroll.one(value, 0), 0)]
        return [(rows, part, k) for k, (rows, part) in enumerate(zip(owned, self.unroll.parts[value], strict=True))]

    def _joined(self, blocks: Sequence[tuple[Rows, Value, int]], span: Rows, at: int) -> Value:
        taken, unroll, dim = [], self.unroll, self.made.after.dim
        for (first, end), part, owner in blocks:
            begin, stop = max(first, span[0]), min(end, span[1])
            if begin < stop:
                whole = (begin, stop) == (first, end)
                taken.append(part if whole else self._slice(part, (begin - first, stop - first), owner, f"halo_{at}"))
        if len(taken) == 1:
            return taken[0]
        axis = unroll.const(dim, np.int32, taken[0].node, f"halo_{at}/axis")
        joined = unroll.add("ConcatV2", [*taken, axis], taken[0].node, f"with_halo_{at}")
        unroll.place(axis.node, at)
        unroll.place(joined.node, at)
        return joined

    def _slice(self, value: Value, rows: Rows, at: int, what: str) -> Value:
        """Return some rows of images, sliced at the coordinate that has them."""
        unroll, dim, near = self.unroll, self.made.after.dim, value.node
        begin = [rows[0] if i == dim else 0 for i in range(4)]
        size = [rows[1] - rows[0] if i == dim else -1 for i in range(4)]
        limits = [
            unroll.const(content, np.int32, near, f"{what}/{name}")
            for name, content in (("begin", begin), ("size", size))
        ]
        taken = unroll.add("Slice", [value, *limits], near, what)
        for one in (*limits, taken):
            unroll.place(one.node, at)
        return taken
