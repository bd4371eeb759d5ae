"""Rows of shards: lookups and updates by the row numbers of a whole variable, on the shard of each replica.

    before   ResourceGather(w, ids)                    ids of rows of all shards
    after    places = Where(first <= ids < end)        which of them lie in the shard of this replica
             rows = ResourceGather(w, ids[places] - first)
             UnsortedSegmentSum(rows, places)          zeros for the others, so that the sum over the replicas is all

    before   ResourceSparseApplyAdagrad(w, a, rate, dw, ids)
    after    ResourceSparseApplyAdagrad(w, a, rate, dw[places], ids[places] - first)

Duplicates and order are kept, and a replica may have none. The ends are open: an id out of range falls to the first or
the last shard, whose kernel refuses it as that of the whole variable would.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ir.variable_ops import rows_argument, updates_rows
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import Sym, shards_of
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from autograph_rewrite.passes.variable_sharding.residence import split_over_replicas


class RowsOfShards:
    """Rewrites lookups and updates; which ids lie in a shard is found once for all that ask."""

    def __init__(self, rewrite: Rewrite) -> None:
        self._rewrite, self._state = rewrite, rewrite.get(Propagation)
        self._found: dict[tuple[Value, tuple[int, ...], frozenset[str]], tuple[Value, Value]] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        tables = [(node, table) for node in self._rewrite.graph if (table := self._table(node)) is not None]
        for node, table in tables:
            (self._update if updates_rows(node) else self._lookup)(node, table)

    def _table(self, node: Node) -> Fact | None:
        """Return what is known of the shards whose rows a node reads or writes; None where it does not."""
        if not (has(node.op, "reads_rows") or node.op == "GatherV2" or updates_rows(node)):
            return None
        transfer = self._state.transfers.get(node)  # what a pass has added reads what is on its replica
        fact = transfer.inputs[0] if transfer is not None and transfer.inputs else None
        is_split = fact is not None and fact.placement.is_split and not fact.placement.dim
        return fact if fact is not None and is_split and shards_of(fact.split_size) else None

    def _lookup(self, node: Node, table: Fact) -> None:
        ids, made = node.inputs[1], node.output()
        readers, anchored = list(made.uses), made in self._rewrite.graph.anchors.values()
        places, local = self._own(node, ids, table)
        build = FoldedBuilder.of(self._rewrite, made, f"{node.name}/shard")
        self._read(node, 1, local)
        node.drop_attr("_output_shapes")
        line = build.op("Squeeze", places, what="line", squeeze_dims=[1])
        rows = build.op("UnsortedSegmentSum", made, line, build.op("Size", ids, what="count"), what="rows")
        if self._state.transfers[node].inputs[1].rank != 1:
            row = build.numbers([dim for dim in (table.shape or ())[1:] if isinstance(dim, int)], "row")
            counts = build.op("Shape", ids, what="counts")
            shape = build.op("ConcatV2", counts, row, build.numbers(0, "axis"), what="shape", N=2)
            rows = build.op("Reshape", rows, shape, what="in_shape")
        for reader, index in readers:
            reader.set_input(index, rows, reader.selects.get(index))
        if anchored:
            self._rewrite.graph.move_anchors(made, rows)

    def _update(self, node: Node, table: Fact) -> None:
        names = [arg.name for arg in get_op(node.op).inputs]
        at, rows_at = names.index("indices"), rows_argument(node.op)
        ids = node.inputs[at]
        places, local = self._own(node, ids, table)
        self._read(node, at, local)
        if rows_at is None or self._state.transfers[node].inputs[rows_at].shape == ():
            return  # one number for all rows
        build = FoldedBuilder.of(self._rewrite, node.inputs[rows_at], f"{node.name}/shard", span=node.span)
        row = [dim for dim in (table.shape or ())[1:] if isinstance(dim, int)]
        listed = build.op("Reshape", node.inputs[rows_at], build.numbers([-1, *row], "list"), what="listed")
        node.set_input(rows_at, build.op("GatherNd", listed, places, what="rows"))

    def _own(self, node: Node, ids: Value, table: Fact) -> tuple[Value, Value]:
        """Return which ids lie in the shard of a replica, as places in the list of them, and their rows there."""
        size = table.split_size
        assert isinstance(size, Sym)
        sizes = tuple(one * size.coef for one in shards_of(size))
        key = ids, sizes, node.span
        if key not in self._found:
            self._found[key] = self._find(node, ids, sizes)
        return self._found[key]

    def _find(self, node: Node, ids: Value, sizes: tuple[int, ...]) -> tuple[Value, Value]:
        build = FoldedBuilder.of(self._rewrite, ids, f"{node.name}/own", span=node.span)
        kind = np.int64
        starts = list(accumulate(sizes, initial=0))
        first, end, limits = starts[:-1], starts[1:], np.iinfo(kind)
        lowest, highest = [limits.min, *first[1:]], [*(one - 1 for one in end[:-1]), limits.max]
        # GPUs have kernels for numbers of 64 bits, and compare and reshape those of 32 on the host.
        wide = ids if ids.dtype == dtypes.INT64 else build.op("Cast", ids, what="wide", DstT=dtypes.INT64)
        flat = build.op("Reshape", wide, build.numbers([-1], "line"), what="flat")
        inside = build.op(
            "LogicalAnd",
            build.op("GreaterEqual", flat, build.of_replicas(lowest, kind, "begin"), what="from"),
            build.op("LessEqual", flat, build.of_replicas(highest, kind, "end"), what="to"),
            what="inside",
        )
        places = build.op("Where", inside, what="places")
        kept = build.op("GatherNd", flat, places, what="ids")
        return places, build.op("Sub", kept, build.of_replicas(first, kind, "first"), what="local")

    @staticmethod
    def _read(node: Node, index: int, ids: Value) -> None:
        node.set_input(index, ids)
        node.set_attr("Tindices", ids.dtype)


def _run(rewrite: Rewrite) -> None:
    """Let each replica look up and update the rows of its shard, where variables are split over the replicas."""
    RowsOfShards(rewrite).run()


ROWS_OF_SHARDS = Pass(
    "rows-of-shards", _run, lambda rewrite: bool(split_over_replicas(rewrite)), needs=(ReplicaLayout,)
)
