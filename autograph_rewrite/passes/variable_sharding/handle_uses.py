"""Rewrite each use of a variable's handle when the variable is sharded.

    ReadVariableOp       a read per shard; whoever needs the whole reads one ConcatV2 of them
    ResourceGather       rows from the shard that holds them, or columns from all
    an update            one per shard, of its part of the gradient
    VarIsInitializedOp   whether all shards are

A use that none of these is, is refused by name before anything is edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.copying import Variant, copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ir.variable_ops import ANONYMOUS, dense_inputs, is_handle, updates_rows
from autograph_rewrite.ops.facts.symbolic_dims import unit
from autograph_rewrite.ops.rules.base import WHOLE
from autograph_rewrite.ops.rules.marked import BLOCKWISE, mark
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.variable_sharding.emitter import Emitter
from autograph_rewrite.passes.variable_sharding.shard_propagation import ShardedVariable
from autograph_rewrite.plan.parts.residence import Sharded, shard_name


class Uses:
    """Rewrites the uses of the handles of variables that are cut into shards of the same sizes.

    Args:
        emitter: what clones nodes, and converts values.
        names: of the variables, by the node that gives the handle.

    Attributes:
        emit: the same.
        handles: of the shards of each variable.
    """

    def __init__(self, emitter: Emitter, names: Mapping[Node, str]) -> None:
        self.emit, self._graph = emitter, emitter.graph
        self._shares, self._sizes = emitter.shares, emitter.sizes
        self._rows: dict[int, Rows] = {}
        self._reads: dict[tuple[Value, frozenset[Node]], Node] = {}
        self.handles = {handle: self._cut_handle(handle, name) for handle, name in names.items()}

    def run(self) -> None:
        """Rewrite the graph."""
        emit, shares = self.emit, self._shares
        for node in shares.state.order:
            if (member := shares.member(node)) is not None:
                self._use(node, member)
            elif node in shares.transfers:
                emit.clone(node)
            elif node.op == "GatherV2":
                self._gather(node)
        emit.finish()

    def _cut_handle(self, handle: Node, name: str) -> tuple[Node, ...]:
        """Add the handles of the shards."""
        member = self._shares.members[handle]
        cut = Sharded(member.axis, self._sizes_of(member.rows))
        made = []
        for k in self.emit.shards:
            without = ("_class", "_output_shapes")
            new = copy_node(self._graph, handle, (), name=shard_name(handle.name, k), variant=Variant(without=without))
            if handle.op == "VarHandleOp":
                new.set_attr("shape", cut.shape(member.shape, k))
                if handle.attr("shared_name") != ANONYMOUS:
                    new.set_attr("shared_name", shard_name(name, k).encode())
            made.append(new)
        self.emit.keep(handle, made)
        return tuple(made)

    def _sizes_of(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of shards, where each unit has some rows."""
        return tuple(size * rows for size in self._sizes)

    def _rows_of(self, rows: int) -> Rows:
        if rows not in self._rows:
            self._rows[rows] = Rows(self._graph, self._sizes_of(rows))
        return self._rows[rows]

    def _use(self, node: Node, member: ShardedVariable) -> None:
        emit = self.emit
        handles = emit.parts[node.inputs[0]]
        if has(node.op, "writes"):
            (self._update_rows if updates_rows(node) else self._update)(node, member)
        elif node.op == "ReadVariableOp":
            self._read(node, handles)
        elif node.op == "ResourceGather":
            self._lookup(node, member, handles)
        elif node.op == "ResourceGatherNd":
            whole = self._whole(node, member, handles)
            emit.instead[node.output()] = emit.add("GatherNd", [whole, node.inputs[1]], node, "elements")
        elif node.op == "VariableShape":
            shape = emit.const(member.shape, dtypes.numpy_dtype(node.output_dtypes[0]), node, "shape")
            emit.instead[node.output()], emit.clones[node] = shape, (shape.node,)
        else:  # a carrier, or an op that is asked of each shard
            emit.keep(node, [self._copy(node, k) for k in emit.shards])
            if node.op == "VarIsInitializedOp":
                emit.instead[node.output()] = self._all(node)

    def _copy(self, node: Node, shard: int) -> Node:
        handle, *others = node.inputs
        return self.emit.copy(node, shard, [self.emit.parts[handle][shard], *others])

    def _all(self, node: Node) -> Value:
        """Return whether something holds of all shards."""
        holds, *others = [clone.output() for clone in self.emit.clones[node]]
        for other in others:
            holds = self.emit.add("LogicalAnd", [holds, other], node, "all")
        return holds

    def _read(self, node: Node, handles: tuple[Value, ...]) -> None:
        """Read the shards; reads that happen at the same time are one."""
        emit = self.emit
        key = handles[0], frozenset(node.controls)
        first = self._reads.setdefault(key, node)
        if first is node:
            emit.keep(node, [self._copy(node, k) for k in emit.shards])
            return
        emit.clones[node] = emit.clones[first]
        emit.parts[node.output()] = emit.parts[first.output()]
        emit.same[node.output()] = first.output()

    def _whole(self, node: Node, member: ShardedVariable, handles: tuple[Value, ...]) -> Value:
        """Return the whole variable, as it is when `node` reads it."""
        emit = self.emit
        dtype = node.output_dtypes[0]
        reads = [emit.add("ReadVariableOp", [h], node, f"part_{k}/read", dtype=dtype) for k, h in enumerate(handles)]
        emit.clones[node] = tuple(read.node for read in reads)
        return emit.concat(reads, member.axis, node)

    def _lookup(self, node: Node, member: ShardedVariable, handles: tuple[Value, ...]) -> None:
        emit, ids = self.emit, node.inputs[1]
        if node.attr("batch_dims", 0):
            whole, first = self._whole(node, member, handles), emit.const(0, np.int32, node, "first")
            made = emit.add("GatherV2", [whole, ids, first], node, "rows", batch_dims=node.attr("batch_dims"))
        elif member.axis == 0:
            rows = self._rows_of(member.rows)
            made, emit.clones[node] = rows.lookup(node, handles, emit.whole(ids), member.shape[1:])
        else:
            columns = [self.emit.copy(node, k, [handle, emit.whole(ids)]) for k, handle in enumerate(handles)]
            if node.output() in self._shares.facts:
                emit.keep(node, columns)
                return
            emit.clones[node] = tuple(columns)
            made = emit.concat([each.output() for each in columns], member.axis - len(member.shape), node)
        emit.instead[node.output()] = made

    def _gather(self, node: Node) -> None:
        """Look rows of a value up in the shards of it."""
        emit, shares = self.emit, self._shares
        table, ids, axis = node.inputs
        fact, at = shares.facts.get(table), shares.state.facts[axis].value
        if fact is None or table not in emit.parts or fact.placement.dim or not fact.placement.is_split:
            return
        shape, rows = shares.state.facts[table].shape, unit(fact.split_size)
        if at != (0,) or node.attr("batch_dims", 0) or shape is None or rows is None:
            return
        row = tuple(dim for dim in shape[1:] if isinstance(dim, int))
        if len(row) == len(shape) - 1:
            found, emit.clones[node] = self._rows_of(rows).lookup(node, emit.parts[table], emit.whole(ids), row)
            emit.instead[node.output()] = found

    def _update(self, node: Node, member: ShardedVariable) -> None:
        """Update each shard with its part of what has the variable's shape."""
        emit, dense = self.emit, dense_inputs(node)
        taken = []
        for i, value in enumerate(node.inputs):
            if is_handle(value):
                taken.append(emit.parts[value])
            elif i in dense:
                taken.append(emit.along(value, member.axis, member.rows))
            else:
                taken.append((emit.whole(value),) * len(self._sizes))
        emit.keep(node, [emit.copy(node, k, [values[k] for values in taken]) for k in emit.shards])

    def _update_rows(self, node: Node, member: ShardedVariable) -> None:
        """Update in each shard the rows that it holds; of columns, each shard holds some of all rows."""
        emit = self.emit
        names = [arg.name for arg in get_op(node.op).inputs]
        ids = emit.whole(node.inputs[names.index("indices")])
        copies = []
        for k in emit.shards:
            places, local = self._rows_of(member.rows).of(ids)[k] if member.axis == 0 else (None, ids)
            inputs = []
            for name, value in zip(names, node.inputs, strict=True):
                if is_handle(value):
                    inputs.append(emit.parts[value][k])
                elif name == "indices":
                    inputs.append(local)
                elif name not in ("grad", "updates") or self._shares.state.facts[value].shape == ():
                    inputs.append(emit.whole(value))
                elif places is None:
                    inputs.append(emit.pieces(emit.whole(value), member.axis - len(member.shape), member.rows)[k])
                else:
                    rows = self._rows_of(member.rows)
                    inputs.append(rows.select(emit.whole(value), member.shape[1:], places, k))
            copies.append(emit.copy(node, k, inputs))
        emit.keep(node, copies)


# Embedding lookups in a row-sharded variable: gathered from, and scattered to, the shard that holds the row.
#
#     ids [b, 4]  ──► flat ──► which of them lie in shard k ──► their place in it ──► rows of shard k ─┐
#                                                                     in the order of the ids again ◄──┘
#
# Duplicates and order are kept, and a shard may get nothing. The ends are open: an id out of range falls to the first
# or the last shard, whose kernel refuses it as that of the whole variable would.


class Rows:
    """Finds which ids lie in which shard, once for all that ask.

    Args:
        graph: the graph.
        sizes: of the shards.
    """

    def __init__(self, graph: Graph, sizes: Sequence[int]) -> None:
        self._graph = graph
        self._cut = Sharded(0, tuple(sizes))
        self._flat: dict[tuple[Value, tuple[int, ...] | None], Value] = {}
        self._found: dict[tuple[Value, bool], list[tuple[Value, Value]]] = {}

    def flat(self, value: Value, row: tuple[int, ...] | None = None) -> Value:
        """Return ids as a vector, or the rows that belong to them (of shape `row`) as a list of rows."""
        if (value, row) not in self._flat:
            shape = self._const([-1, *(row or ())], np.int32, value.node, "list")
            self._flat[value, row] = self._add("Reshape", [value, shape], value.node, "flat")
        return self._flat[value, row]

    def of(self, ids: Value, *, blockwise: bool = False) -> list[tuple[Value, Value]]:
        """Return for each shard which ids lie in it, as places in the flat ids, and their rows there.

        Args:
            ids: of rows, of any shape.
            blockwise: they are looked up, so that each replica may do so for its own; updates need all of them.
        """
        if (ids, blockwise) not in self._found:
            shards = range(len(self._cut.sizes))
            self._found[ids, blockwise] = [self._in_shard(ids, shard, blockwise) for shard in shards]
        return self._found[ids, blockwise]

    def _in_shard(self, ids: Value, shard: int, blockwise: bool) -> tuple[Value, Value]:
        flat, offsets = self.flat(ids), self._cut.offsets
        near, name = ids.node, f"part_{shard}"
        limits = []
        if shard > 0:
            limits.append(self._add("GreaterEqual", [flat, self._id(ids, offsets[shard])], near, f"{name}/from"))
        if shard + 1 < len(offsets):
            limits.append(self._add("Less", [flat, self._id(ids, offsets[shard + 1])], near, f"{name}/below"))
        inside = limits[0] if len(limits) == 1 else self._add("LogicalAnd", limits, near, f"{name}/inside")
        places = self._add("Where", [inside], near, f"{name}/places", shape=(None, 1))
        local = self._add("GatherNd", [flat, places], near, f"{name}/ids", shape=(None,))
        if blockwise:
            mark((places.node, local.node), BLOCKWISE)
        else:
            for value in (places, local):
                value.node.set_raw_attr(WHOLE, encode("bool", True))
        if shard > 0:
            local = self._add("Sub", [local, self._id(ids, offsets[shard])], near, f"{name}/local")
        return places, local

    def select(self, rows: Value, row: tuple[int, ...], places: Value, shard: int) -> Value:
        """Return those of a list of rows that stand at some places.

        Args:
            rows: [n..., *row].
            row: static shape of one row.
            places: [m, 1], which of the n rows are wanted.
            shard: its number, for names.
        """
        flat = self.flat(rows, row)
        return self._add("GatherNd", [flat, places], rows.node, f"part_{shard}/rows", shape=(None, *row))

    def lookup(
        self, node: Node, tables: Sequence[Value], ids: Value, row: tuple[int, ...]
    ) -> tuple[Value, tuple[Node, ...]]:
        """Return what a gather of whole rows gives, from the shards of its table (handles, or values).

        The nodes that read the shards come with it.

        Args:
            node: the gather, for names.
            tables: one per shard.
            ids: [...], numbers of rows of the unsharded table.
            row: static shape of one row.
        """
        pieces, places = [], []
        for shard, (table, (where, local)) in enumerate(zip(tables, self.of(ids, blockwise=True), strict=True)):
            pieces.append(self._rows(node, table, local, shard, row))
            line = self._const([-1], np.int32, node, "line")
            at = self._add("Cast", [where], node, f"part_{shard}/places", DstT=dtypes.INT32)
            places.append(self._add_blockwise("Reshape", [at, line], node, f"part_{shard}/line", shape=(None,)))
        stitched = self._add_blockwise("DynamicStitch", [*places, *pieces], node, "stitched", shape=(None, *row))
        shape = self._add("Shape", [ids], node, "shape", out_type=dtypes.INT32)
        if row:
            shape = self._add(
                "ConcatV2", [shape, self._const(row, np.int32, node, "row"), self._const(0, np.int32, node, "end")],
                node, "shape_of_rows",
            )  # fmt: skip
        stated = (node.attr("_output_shapes") or (None,))[0]
        found = self._add_blockwise("Reshape", [stitched, shape], node, "rows", shape=stated)
        return found, tuple(piece.node for piece in pieces)

    def _rows(self, node: Node, table: Value, local: Value, shard: int, row: tuple[int, ...]) -> Value:
        if table.dtype == dtypes.RESOURCE:
            attrs = {"dtype": node.output_dtypes[0]}
            return self._add("ResourceGather", [table, local], node, f"part_{shard}", shape=(None, *row), **attrs)
        first = self._const(0, np.int32, node, "first")
        return self._add("GatherV2", [table, local, first], node, f"part_{shard}")

    def _id(self, ids: Value, row: int) -> Value:
        return self._const(row, dtypes.numpy_dtype(ids.dtype), ids.node, f"row_{row}")

    def _const(self, content: Any, dtype: Any, near: Node, what: str) -> Value:
        array = np.asarray(content, dtype)
        attrs = {"value": array, "dtype": dtypes.from_numpy(array.dtype)}
        return self._graph.add(
            "Const", name=f"{near.name}/{what}", attrs=attrs, device=near.device, origin=near
        ).output()

    def _add(
        self, op: str, inputs: Sequence[Value], near: Node, what: str, shape: Shape | None = None, **attrs: Any
    ) -> Value:
        """Add a node; `shape` states what no rule could tell of its result."""
        made = self._graph.add(
            op, inputs, name=f"{near.name}/{what}", attrs=attrs or None, device=near.device, origin=near
        )
        if shape is not None:
            made.set_raw_attr("_output_shapes", encode("list(shape)", [shape]))
        return made.output()

    def _add_blockwise(self, op: str, inputs: Sequence[Value], near: Node, what: str, shape: Shape | None) -> Value:
        """Add a node whose result means something for its own block only."""
        made = self._add(op, inputs, near, what, shape)
        mark((made.node,), BLOCKWISE)
        return made
