"""Emit the shards of variables: handles, per-shard nodes, and concat or split between shards and full value.

    before   w ──► read ──► MatMul         dw ──► ResourceApplyAdam(w, m, v)
    after    w/part_k ──► read/part_k ──► ConcatV2 (named as the read) ──► MatMul
             dw ──► SplitV ──► ResourceApplyAdam(w/part_k, m/part_k, v/part_k)

A value is cut once and joined once, whoever reads it. Nodes whose place a conversion takes hand it their name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from autograph_rewrite.ir.copying import Variant, copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.variable_ops import is_handle
from autograph_rewrite.ops.facts.placement import REPLICATED, split
from autograph_rewrite.ops.facts.symbolic_dims import unit
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.traits import COMBINED_BY
from autograph_rewrite.passes.variable_sharding.shard_propagation import ShardPlacements, elements_per_mean

_DROPPED = ("_class", "_output_shapes")  # shapes are stated anew


class Emitter:
    """Clones nodes for shards, and converts values.

    Args:
        graph: the graph that is edited.
        shares: what is cut.
        sizes: of the shards.
        targets: names of the nodes that a step runs, also where nobody reads what they give.

    Attributes:
        parts: what stands for a value that is cut, or added up over the shards, in each shard.
        clones: what stands for a node that runs for each shard.
        instead: the value that takes the place of another one.
        same: values that have the parts of another one.
    """

    def __init__(
        self, graph: Graph, shares: ShardPlacements, sizes: Sequence[int], targets: Collection[str] = ()
    ) -> None:
        self.graph, self.shares, self.sizes, self._targets = graph, shares, tuple(sizes), frozenset(targets)
        self.parts: dict[Value, tuple[Value, ...]] = {}
        self.clones: dict[Node, tuple[Node, ...]] = {}
        self.instead: dict[Value, Value] = {}
        self.same: dict[Value, Value] = {}
        self._pieces: dict[tuple[Value, int, int], tuple[Value, ...]] = {}

    @property
    def shards(self) -> range:
        """The numbers of the shards."""
        return range(len(self.sizes))

    def add(self, op: str, inputs: Sequence[Value], near: Node, what: str, **attrs: Any) -> Value:
        """Add a node beside the one that it serves; return its first output.

        Args:
            op: op type.
            inputs: its operands.
            near: the node that it serves; names and places it.
            what: told after the node's name.
            **attrs: by name, decoded.
        """
        name = f"{near.name}/{what}"
        return self.graph.add(op, inputs, name=name, attrs=attrs, device=near.device, origin=near).output()

    def const(self, content: Any, dtype: Any, near: Node, what: str) -> Value:
        """Add a constant.

        Args:
            content: a number, nested lists or an array.
            dtype: a numpy type.
            near: the node that it serves; names and places it.
            what: told after the node's name.
        """
        array = np.asarray(content, dtype)
        return self.add("Const", (), near, what, value=array, dtype=dtypes.from_numpy(array.dtype))

    def copy(self, node: Node, shard: int, inputs: Sequence[Value], op: str = "") -> Node:
        """Add a copy of a node for one shard.

        Args:
            node: of the unsharded graph.
            shard: its number.
            inputs: operands of the copy.
            op: another op type; "": the same.
        """
        return copy_node(self.graph, node, inputs, name=f"{node.name}/part_{shard}", variant=Variant(op, _DROPPED))

    def clone(self, node: Node) -> None:
        """Let a node run for each shard, as its answer says."""
        transferred = self.shares.transfers[node]
        taken = [self._taken(value, transferred.operand_reshards.get(i)) for i, value in enumerate(node.inputs)]
        op = "Sum" if transferred.decompose else ""
        copies = [self.copy(node, k, [values[k] for values in taken], op) for k in self.shards]
        self.keep(node, copies)
        if transferred.decompose:
            self._divide(node)

    def keep(self, node: Node, copies: Sequence[Node]) -> None:
        """Remember what stands for a node in each shard, and state the shapes of the parts."""
        self.clones[node] = tuple(copies)
        count = len(node.output_dtypes)
        for index in range(count):
            value = node.output(index)
            if value in self.shares.facts or is_handle(value):
                self.parts[value] = tuple(copy.output(index) for copy in copies)
            else:  # the same in all shards
                self.instead[value] = copies[0].output(index)
        for k, copy in enumerate(copies):
            shapes = [self._shape_of_part(node.output(index), k) for index in range(count)]
            if count and None not in shapes:
                copy.set_raw_attr("_output_shapes", encode("list(shape)", shapes))

    def _shape_of_part(self, value: Value, shard: int) -> tuple[int | None, ...] | None:
        fact = self.shares.facts.get(value)
        if fact is None or fact.shape is None:
            return None
        sizes = [self.sizes[shard] * unit(dim) if unit(dim) is not None else dim for dim in fact.shape]  # type: ignore[operator]
        return tuple(dim if isinstance(dim, int) else None for dim in sizes)

    def _divide(self, node: Node) -> None:
        """Make the sums of a mean's parts its terms."""
        count = self.const(elements_per_mean(self.shares.state, node), _numpy(node.output()), node, "count")
        value = node.output()
        terms = [self.add("RealDiv", [part, count], node, f"part_{k}/term") for k, part in enumerate(self.parts[value])]
        self.parts[value] = tuple(terms)

    def _taken(self, value: Value, reshard: Reshard | None) -> Sequence[Value]:
        """Return what each shard reads of a value."""
        if isinstance(reshard, LocalEntry):
            return self._local_entries(value, reshard)
        if isinstance(reshard, Slice):
            return self.pieces(self.whole(value), reshard.dim, reshard.unit)
        if reshard is None and self.shares.fact(value).placement.differs and value not in self.shares.summed:
            return self.cut(value)
        whole = self.whole(value)
        if reshard is None or reshard == REPLICATED:
            return (whole,) * len(self.sizes)
        zeros = self.add("ZerosLike", [whole], whole.node, "zeros")
        return (whole, *(zeros for _ in self.shards[1:]))

    def _local_entries(self, value: Value, reshard: LocalEntry) -> Sequence[Value]:
        rows = unit(reshard.size) or 1
        contents = [list(self.shares.fact(value).value or ()) for _ in self.shards]
        for k, content in enumerate(contents):
            content[reshard.position] = rows * self.sizes[k]
        make = partial(self.const, dtype=_numpy(value), near=value.node)
        return [make(content, what=f"part_{k}") for k, content in enumerate(contents)]

    def cut(self, value: Value) -> tuple[Value, ...]:
        """Return the parts of a value that differs between shards."""
        if value not in self.parts:
            rows = unit(self.shares.facts[value].split_size)
            return self.pieces(value, self.shares.gradients[value], rows or 1)
        return self.parts[value]

    def along(self, value: Value, axis: int, rows: int = 1) -> tuple[Value, ...]:
        """Return the parts of a value of a variable's shape.

        Args:
            axis: along which the variable is cut.
            rows: of it there are for each unit.
        """
        fact = self.shares.fact(value)
        if fact.placement == split(axis) and unit(fact.split_size) == rows and value not in self.shares.summed:
            return self.cut(value)
        return self.pieces(self.whole(value), axis, rows)

    def pieces(self, value: Value, axis: int, rows: int = 1) -> tuple[Value, ...]:
        """Cut a whole value; `rows` entries belong to each of the variable's.

        Args:
            value: of the variable's size along `axis`, or of `rows` times it.
            axis: which dimension is cut.
        """
        key = value, axis, rows
        if key not in self._pieces:
            near = value.node
            name = "shards" if value.index == 0 else f"shards_{value.index}"
            sizes = self.const([size * rows for size in self.sizes], np.int64, near, f"{name}/sizes")
            at = self.const(axis, np.int32, near, f"{name}/axis")
            first = self.add("SplitV", [value, sizes, at], near, name, num_split=len(self.sizes))
            self._pieces[key] = tuple(first.node.output(k) for k in self.shards)
        return self._pieces[key]

    def whole(self, value: Value) -> Value:
        """Return the whole of a value."""
        if value not in self.parts:
            return self.instead.get(value, value)
        if value not in self.instead:
            self.instead[value] = self._join(value)
        return self.instead[value]

    def _join(self, value: Value) -> Value:
        placement, parts, near = self.shares.facts[value].placement, self.parts[value], value.node
        if value in self.same:
            return self.add("Identity", [self.whole(self.same[value])], near, "whole")
        if placement.is_split:
            return self.concat(parts, placement.dim, near)
        if placement.op == "sum":
            return self.add("AddN", parts, near, "whole")
        total = parts[0]
        for part in parts[1:]:
            total = self.add(COMBINED_BY[placement.op], [total, part], near, "whole")
        return total

    def concat(self, parts: Sequence[Value], axis: int, near: Node) -> Value:
        """Join parts.

        Args:
            parts: one per shard, in order.
            axis: along which they are joined.
            near: the node that it serves; names and places it.
        """
        at = self.const(axis, np.int32, near, "whole/axis")
        return self.add("ConcatV2", [*parts, at], near, "whole")

    def finish(self) -> None:
        """Let conversions take the place of what runs for each shard now, and drop the original nodes."""
        gone = list(self.clones)
        for node in gone:
            self._wait(node)
        erased, clones = set(gone), {clone for made in self.clones.values() for clone in made}
        named: dict[str, Node] = {}
        for node in gone:
            for value in node.outputs:
                if not is_handle(value) and self._is_read(value, erased):
                    value.replace_all_uses_with(self.whole(value), keep=erased)
            first = self.instead.get(node.output()) if node.output_dtypes else None
            if first is not None and first.node not in clones and first.node not in named.values():
                named[node.name] = first.node
        kept = [(node.name, self.clones[node]) for node in gone if node.name in self._targets]
        self._erase(gone, erased)
        for name, node in named.items():
            take_name(self.graph, node, name)
        for name, made in kept:
            if name not in self.graph.nodes:
                self._wait_for(name, made)

    def _is_read(self, value: Value, erased: set[Node]) -> bool:
        anchored = any(anchor is value for anchor in self.graph.anchors.values())
        return anchored or value in self.instead or any(node not in erased for node, _ in value.uses)

    def _wait(self, node: Node) -> None:
        """Hand control edges on: between clones shard by shard, else from and to all of them."""
        clones = self.clones[node]
        for before in node.controls:
            others = self.clones.get(before, (before,))
            for k, clone in enumerate(clones):
                if len(clones) == len(others):
                    clone.add_control(others[k])
                else:
                    for other in others:
                        clone.add_control(other)
        for user in node.control_users:
            if user not in self.clones:
                for clone in clones:
                    user.add_control(clone)

    def _erase(self, gone: Sequence[Node], erased: set[Node]) -> None:
        names = []
        for node in gone:
            node.disconnect()
            for user in node.control_users:
                user.remove_control(node)
        for node in gone:
            if not node.output_dtypes:
                names.append((node.name, self.clones[node]))
            self.graph.erase(node)
        for name, clones in names:  # an update: whoever names it waits for those of all shards
            self._wait_for(name, clones)

    def _wait_for(self, name: str, clones: Sequence[Node]) -> None:
        self.graph.add("NoOp", name=name, controls=clones, device=clones[0].device, origin=name)


def _numpy(value: Value) -> Any:
    return dtypes.numpy_dtype(value.dtype)
