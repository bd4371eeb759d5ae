"""Embedding lookups in a row-sharded variable: gathered from, and scattered to, the shard that holds the row.

    ids [b, 4]  ──► flat ──► which of them lie in shard k ──► their place in it ──► rows of shard k ─┐
                                                                    in the order of the ids again ◄──┘

Duplicates and order are kept, and a shard may get nothing. The ends are open: an id out of range falls to the first or
the last shard, whose kernel refuses it as that of the whole variable would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autograph_rewrite.analysis.rules.base import WHOLE
from autograph_rewrite.analysis.rules.marked.blockwise import BLOCKWISE
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.shapes.recorded import Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.plan.parts.residence import Sharded


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
        for value in (places, local):
            value.node.set_raw_attr(BLOCKWISE if blockwise else WHOLE, encode("bool", True))
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
        made.node.set_raw_attr(BLOCKWISE, encode("bool", True))
        return made
