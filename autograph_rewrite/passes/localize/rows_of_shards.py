"""Look up and update rows on the shard of each replica, by the row numbers of the whole variable.

    before   ResourceGather(w, ids)                    ids of rows of all shards
    after    places = Where(first <= ids < end)        which of them lie in the shard of this replica
             rows = ResourceGather(w, ids[places] - first)
             UnsortedSegmentSum(rows, places)          zeros for the others, so that the sum over the replicas is all
             DynamicStitch(all(places), all(rows))     the sum itself, where ops of one device would make it

    before   ResourceSparseApplyAdagrad(w, a, rate, dw, ids)
    after    ResourceSparseApplyAdagrad(w, a, rate, dw[places], ids[places] - first)

Duplicates and order are kept, and a replica may have no ids. The first and the last shard also take ids out of range,
which their kernels refuse as the kernel of the whole variable does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import REPLICA, Select, Span
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ir.variable_ops import handle_node, is_handle, rows_argument, updates_rows
from autograph_rewrite.ops.facts.placement import split
from autograph_rewrite.ops.facts.symbolic_dims import Sym, shards_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from autograph_rewrite.passes.sharding.local_program import Levels, blocks_of
from autograph_rewrite.passes.sharding.residence import split_over_replicas

Rows = tuple[tuple[str, tuple[int, ...]], ...]
"""The axes along which rows are split, major to minor, with the number of rows at each coordinate."""


class Table(NamedTuple):
    """A table in blocks of rows, each of which may be in shards of rows.

    Attributes:
        row: the shape of a row.
    """

    levels: Rows
    row: tuple[int, ...] = ()

    def begin(self, at: Mapping[str, int]) -> int:
        """Return the first row of the block at a coordinate."""
        return sum(sum(sizes[: at[axis]]) for axis, sizes in self.levels)

    def end(self, at: Mapping[str, int]) -> int:
        """Return the row after the last one of the block at a coordinate."""
        axis, sizes = self.levels[-1]
        return self.begin(at) + sizes[at[axis]]

    def is_first(self, at: Mapping[str, int]) -> bool:
        """Return whether the block at a coordinate is the first."""
        return all(at[axis] == 0 for axis, _ in self.levels)

    def is_last(self, at: Mapping[str, int]) -> bool:
        """Return whether the block at a coordinate is the last."""
        return all(at[axis] == len(sizes) - 1 for axis, sizes in self.levels)


class Block(NamedTuple):
    """The rows of each device of a replica, along each axis, and the shape of a device's block."""

    levels: Rows
    shape: tuple[int | None, ...]


def _rows(levels: Levels) -> Rows:
    return tuple((axis, cut.sizes) for axis, cut in levels if not cut.axis)


class RowsOfShards:
    """Rewrites lookups and updates; those with the same ids share the selection of the ids in a shard."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite, self._state = rewrite, rewrite.get(Propagation)
        self._found: dict[tuple[Value, Table, Span], tuple[Value, Value]] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        tables = [(node, table) for node in self._rewrite.graph if (table := self._table(node)) is not None]
        for node, table in tables:
            (self._update if updates_rows(node) else self._lookup)(node, table)
        for name, levels in blocks_of(self._rewrite).sums.items():
            if name in self._rewrite.graph:
                self._sum(self._rewrite.graph.nodes[name], Table(_rows(levels)))

    def _table(self, node: Node) -> Table | None:
        """Return the table in blocks of rows that a node reads or writes, if any."""
        if not (has(node.op, "reads_rows") or node.op == "GatherV2" or updates_rows(node)):
            return None
        transfer = self._state.transfers.get(node)  # nodes that passes have added read local rows already
        fact = transfer.inputs[0] if transfer is not None and transfer.inputs else None
        if fact is None:
            return None
        levels: list[tuple[str, tuple[int, ...]]] = []
        shape, lookups = fact.shape or (), blocks_of(self._rewrite).lookups
        if is_handle(node.inputs[0]) and (block := self._blocks.get(handle_node(node.inputs[0]).name)):
            levels += block.levels
            shape = block.shape
        elif node.name in lookups:
            levels += _rows(lookups[node.name])
        size = fact.split_size
        if fact.placement == split(0) and isinstance(size, Sym) and shards_of(size):
            levels.append((REPLICA, tuple(one * size.coef for one in shards_of(size))))
        return Table(tuple(levels), tuple(dim for dim in shape[1:] if isinstance(dim, int))) if levels else None

    @cached_property
    def _blocks(self) -> dict[str, Block]:
        """The tables whose rows are split over the devices of a replica, by the names of their handles."""
        blocked = blocks_of(self._rewrite).of
        tables = [(self._rewrite.item.variables[name], rows) for name, one in blocked.items() if (rows := _rows(one))]
        return {one.handle: Block(rows, one.shape or ()) for one, rows in tables}

    def _lookup(self, node: Node, table: Table) -> None:
        ids, made = node.inputs[1], node.output()
        readers, anchored = list(made.uses), made in self._rewrite.graph.anchors.values()
        places, local = self._own(node, ids, table)
        build = FoldedBuilder.of(self._rewrite, made, f"{node.name}/shard")
        self._read(node, 1, local)
        node.drop_attr("_output_shapes")
        sums = dict.fromkeys(use.node for use in readers if self._adds_all(use.node, node, table))
        for total in sums:
            self._stitch(total, made, places, ids, table)
        if len(sums) == len(readers) and not anchored:
            return
        rows = build.op("UnsortedSegmentSum", made, places, build.op("Size", ids, what="count"), what="rows")
        if self._state.transfers[node].inputs[1].rank != 1:
            rows = build.op("Reshape", rows, self._shape(build, ids, table), what="in_shape")
        for reader, index in readers:
            if reader not in sums:
                reader.set_input(index, rows, reader.selects.get(index))
        if anchored:
            self._rewrite.graph.move_anchors(made, rows)

    def _adds_all(self, reader: Node, lookup: Node, table: Table) -> bool:
        """Return whether a node adds up the rows of all shards, each of them once, and nothing else."""
        if reader.op != "AddN" or reader.selects.get(0) is not Select.ALL or len(table.levels) > 1:
            return False
        mesh, (axis, sizes) = self._rewrite.mesh, table.levels[0]
        taken = mesh.read(reader.span, 0, lookup.span, Select.ALL)
        return [mesh.coordinates(lookup.span, one).get(axis) for one in taken] == [*range(len(sizes))]

    def _stitch(self, total: Node, rows: Value, places: Value, ids: Value, table: Table) -> None:
        """Let a sum of rows that each only one shard has put them in their places: it adds no zeros then.

        Args:
            rows: those of each shard.
            places: their positions among all ids.
        """
        build = FoldedBuilder.of(self._rewrite, rows, f"{total.name}/rows", span=total.span, origin=total)
        narrow = FoldedBuilder.of(self._rewrite, places).op("Cast", places, what="narrow", DstT=dtypes.INT32)
        found = build.op("DynamicStitch", narrow, rows, what="stitched", N=total.attr("N"), gather=(0, 1))
        shape = self._shape(build, ids, table)
        become(total, "Reshape", [found, shape], {"T": rows.dtype, "Tshape": dtypes.INT32})

    @staticmethod
    def _shape(build: FoldedBuilder, ids: Value, table: Table) -> Value:
        """Return the shape of the rows of all ids."""
        row, counts = build.numbers(list(table.row), "row"), build.op("Shape", ids, what="counts")
        return build.op("ConcatV2", counts, row, build.numbers(0, "axis"), what="shape", N=2)

    def _update(self, node: Node, table: Table) -> None:
        names = [arg.name for arg in get_op(node.op).inputs]
        at, rows_at = names.index("indices"), rows_argument(node.op)
        ids = node.inputs[at]
        places, local = self._own(node, ids, table)
        self._read(node, at, local)
        if rows_at is None or self._state.transfers[node].inputs[rows_at].shape == ():
            return  # one number for all rows
        build = FoldedBuilder.of(self._rewrite, node.inputs[rows_at], f"{node.name}/shard", span=node.span)
        listed = build.op("Reshape", node.inputs[rows_at], build.numbers([-1, *table.row], "list"), what="listed")
        node.set_input(rows_at, self._at(build, listed, places, "rows"))

    def _own(self, node: Node, ids: Value, table: Table) -> tuple[Value, Value]:
        """Return the positions, in the list of ids, of those in the local block, and their rows there."""
        key = ids, table, node.span
        if key not in self._found:
            self._found[key] = self._find(node, ids, table)
        return self._found[key]

    def _sum(self, node: Node, table: Table) -> None:
        """Let each device drop the segments that are not among its rows: the kernel ignores negative numbers."""
        ids = node.inputs[1]
        build = FoldedBuilder.of(self._rewrite, ids, f"{node.name}/own", span=node.span)
        first, last = self._each(build, table, table.begin, "first"), self._last(build, table, "last")
        wide = ids if ids.dtype == dtypes.INT64 else build.op("Cast", ids, what="wide", DstT=dtypes.INT64)
        local = build.op("Sub", wide, first, what="local")
        none = build.const(-1, dtypes.INT64, "none")
        inside = build.op("LessEqual", wide, last, what="to")
        kept = build.op("SelectV2", inside, local, none, what="kept")
        node.set_input(1, build.op("Maximum", kept, none, what="rows"))
        node.set_attr("Tindices", dtypes.INT64)

    def _each(
        self, build: FoldedBuilder, table: Table, content: Callable[[Mapping[str, int]], int], what: str
    ) -> Value:
        """Return a number that differs between the blocks of a table."""
        rewrite = self._rewrite

        def of_job(at: Mapping[str, int]) -> int:
            return content({**at, REPLICA: rewrite.replica_at(at)})

        return rewrite.const_at(of_job, np.int64, name=f"{build.name}/{what}", near=build.near, span=build.span)

    def _last(self, build: FoldedBuilder, table: Table, what: str) -> Value:
        """Return the last row of each block; the last block has no limit, so that its kernel refuses ids too large."""
        most = np.iinfo(np.int64).max
        return self._each(build, table, lambda at: most if table.is_last(at) else table.end(at) - 1, what)

    def _find(self, node: Node, ids: Value, table: Table) -> tuple[Value, Value]:
        build = FoldedBuilder.of(self._rewrite, ids, f"{node.name}/own", span=node.span)
        least = np.iinfo(np.int64).min
        begin = self._each(build, table, lambda at: least if table.is_first(at) else table.begin(at), "begin")
        # GPU kernels compare and reshape int64; for int32 they run on the host.
        wide = ids if ids.dtype == dtypes.INT64 else build.op("Cast", ids, what="wide", DstT=dtypes.INT64)
        flat = build.op("Reshape", wide, build.numbers([-1], "line"), what="flat")
        inside = build.op(
            "LogicalAnd",
            build.op("GreaterEqual", flat, begin, what="from"),
            build.op("LessEqual", flat, self._last(build, table, "end"), what="to"),
            what="inside",
        )
        places = build.op("Squeeze", build.op("Where", inside, what="where"), what="places", squeeze_dims=[1])
        kept = self._at(build, flat, places, "ids")
        return places, build.op("Sub", kept, self._each(build, table, table.begin, "first"), what="local")

    @staticmethod
    def _at(build: FoldedBuilder, rows: Value, places: Value, what: str) -> Value:
        # Not GatherNd, whose kernel copies element by element.
        return build.op("GatherV2", rows, places, build.numbers(0, f"{what}/axis"), what=what)

    @staticmethod
    def _read(node: Node, index: int, ids: Value) -> None:
        node.set_input(index, ids)
        node.set_attr("Tindices", ids.dtype)


def _run(rewrite: Rewrite) -> None:
    """Let replicas look up and update the rows of their shards, and devices of a model axis those of their blocks."""
    RowsOfShards(rewrite).run()


ROWS_OF_SHARDS = Pass(
    "rows-of-shards", _run, lambda rewrite: bool(split_over_replicas(rewrite)) or rewrite.along > 1, (ReplicaLayout,)
)
