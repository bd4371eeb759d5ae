"""Look up and update blocks of rows by row numbers of the whole, where coordinates of an axis do not run alike.

    ids [b, 4]  ──► flat ──► which of them lie in block k ──► their place in it ──► rows of block k ─┐
                                                                    in the order of the ids again ◄──┘

Duplicates and order are kept, and a block may get no ids. The first and the last block also take ids out of range,
which their kernels refuse as the kernel of the whole variable does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Select, Value
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ir.variable_ops import rows_argument, updates_rows
from autograph_rewrite.ops.facts.placement import REPLICATED, split
from autograph_rewrite.ops.facts.symbolic_dims import unit
from autograph_rewrite.ops.rules.marked import BLOCKWISE, keep_in_block, make_whole
from autograph_rewrite.passes.sharding.placements import SEGMENT_SUM
from autograph_rewrite.passes.sharding.unroll import Conversion

if TYPE_CHECKING:
    from autograph_rewrite.passes.sharding.local_program import LocalProgram
    from autograph_rewrite.passes.sharding.shard_propagation import ShardedVariable


@dataclass
class BlockRows:
    """Rewrites lookups, updates and sums by row numbers; those with the same ids share the selection of rows.

    Attributes:
        program: the program that it helps to write; a node's operands must be converted before `rewrite`.
    """

    program: LocalProgram
    _flat: dict[tuple[Value, tuple[int, ...]], Value] = field(default_factory=dict)
    _found: dict[tuple[Value, int, bool], tuple[Value, Value]] = field(default_factory=dict)

    def rewrite(self, node: Node, member: ShardedVariable | None) -> None:
        """Let a node work with row numbers of its block.

        Args:
            member: the variable that it reads or writes.
        """
        state = self.program.state
        if member is not None and updates_rows(node) and member.axis == 0:
            self._update(node, member)
        elif member is not None and node.op == "ResourceGather" and member.axis == 0:
            self._lookup(node, member.rows, member.shape[1:])
        elif member is not None and node.op == "ResourceGather":
            self._join_columns(node, member)
        elif node.op == "VarIsInitializedOp" and member is not None:
            asked = self.program.converted(node.output(), REPLICATED)  # even if no node reads it
            self.program.let_stand(asked, node.output(), asked.node)
        elif self.program.is_lookup(node):
            table = node.inputs[0]
            shape = self.program.found.whole.facts[table].shape or ()
            row = tuple(dim for dim in shape[1:] if isinstance(dim, int))
            self._lookup(node, unit(state.source(table).split_size) or 1, row)
        elif node.op == SEGMENT_SUM and state.source(node.output()).placement == split(0):
            self._sum(node)

    def _own(self, ids: Value, rows: int, *, blockwise: bool) -> tuple[Value, Value]:
        """Return the positions, in the flat ids, of those in each block, and their rows there.

        Args:
            rows: of each unit of a block.
            blockwise: for a lookup, which each replica does for its ids only; an update needs the ids of all.
        """
        key = ids, rows, blockwise
        if key not in self._found:
            self._found[key] = self._find(ids, rows, blockwise)
        return self._found[key]

    def _find(self, ids: Value, rows: int, blockwise: bool) -> tuple[Value, Value]:
        what, flat = "looked_up" if blockwise else "updated", self.flat(ids)
        build = Builder.at(ids.node, what, span=self.program.span)
        inside, first = self._inside(build, ids, flat, self.program.rows_of(rows), f"{what}/")
        places = build.op("Where", inside, what="places", recorded=[(None, 1)])
        local = build.op("GatherNd", flat, places, what="ids", recorded=[(None,)])
        if blockwise:
            keep_in_block((places.node, local.node), BLOCKWISE)
        else:
            for value in (places, local):
                make_whole(value.node)
        return places, build.op("Sub", local, first, what="local")

    def _inside(
        self, build: Builder, ids: Value, asked: Value, rows: Sequence[int], scope: str = ""
    ) -> tuple[Value, Value]:
        """Return which of the ids in `asked` are in each block, and the number of its first row.

        Args:
            ids: determine the type and the names of constants.
            rows: of each block.
            scope: begins the names of constants.
        """
        ends, kind = list(accumulate(rows, initial=0)), np.int32 if ids.dtype == dtypes.INT32 else np.int64
        begin = self.program.each(ids, [np.iinfo(kind).min, *ends[1:-1]], f"{scope}begin")
        last = self.program.each(ids, [*(end - 1 for end in ends[1:-1]), np.iinfo(kind).max], f"{scope}end")
        from_first = build.op("GreaterEqual", asked, begin, what="from")
        inside = build.op("LogicalAnd", from_first, build.op("LessEqual", asked, last, what="to"), what="inside")
        return inside, self.program.each(ids, ends[:-1], f"{scope}first")

    def flat(self, value: Value, row: tuple[int, ...] = ()) -> Value:
        """Return ids as a vector, or the rows that belong to them (of shape `row`) as a list of rows."""
        if (value, row) not in self._flat:
            build = Builder.at(value.node, "listed" if row else "flat")
            shape = build.const(np.array([-1, *row], np.int32), what="shape")
            self._flat[value, row] = build.op("Reshape", value, shape)
        return self._flat[value, row]

    def _update(self, node: Node, member: ShardedVariable) -> None:
        """Let each coordinate update the rows of its block."""
        names, at = [arg.name for arg in get_op(node.op).inputs], rows_argument(node.op)
        ids = names.index("indices")
        places, local = self._own(node.inputs[ids], member.rows, blockwise=False)
        node.set_input(ids, local)
        value = None if at is None else node.inputs[at]
        if value is None or at is None or self.program.state.facts[self.program.unconverted(value)].shape == ():
            return  # one number for all rows
        row = member.shape[1:]
        build = Builder.at(value.node, "own_rows", span=self.program.span)
        node.set_input(at, build.op("GatherNd", self.flat(value, row), places, recorded=[(None, *row)]))

    def _join_columns(self, node: Node, member: ShardedVariable) -> None:
        """Join the columns of the rows that are looked up, unless their reader works on columns."""
        if self.program.state.source(node.output()).placement.differs:
            return
        columns = Conversion(split(member.axis - len(member.shape)), REPLICATED)
        asked = self.program.convert(node.output(), "whole", columns, is_exchange=False)
        self.program.let_stand(asked.output(), node.output(), asked)

    def _lookup(self, node: Node, rows: int, row: tuple[int, ...]) -> None:
        """Let each coordinate look up the rows that it has, and bring them into the order of the ids.

        Args:
            node: a gather of whole rows.
            rows: of the table in each unit of a block.
            row: static shape of one row.
        """
        ids, stated = node.inputs[1], (node.attr("_output_shapes") or (None,))[0]
        places, local = self._own(ids, rows, blockwise=True)
        node.set_input(1, local)
        build = Builder.at(node, "whole", span=self.program.span)
        narrow = build.op("Cast", places, what="places", DstT=dtypes.INT32)
        line = Builder.at(node, "whole").const(np.array([-1], np.int32), what="line")
        at = build.op("Reshape", narrow, line, what="at", recorded=[(None,)])
        build = Builder.at(node, "whole")
        stitched = build.op(
            "DynamicStitch", at, node.output(), what="stitched", selects={0: Select.ALL, 1: Select.ALL},
            recorded=[(None, *row)], N=len(self.program.cut.sizes),
        )  # fmt: skip
        shape = build.op("Shape", ids, what="shape", out_type=dtypes.INT32)
        if row:
            size = build.const(np.array(row, np.int32), what="row")
            shape = build.op("ConcatV2", shape, size, build.const(np.int32(0), what="end"), what="shape_of_rows")
        found = build.op("Reshape", stitched, shape, what="in_order", recorded=[stated])
        keep_in_block((at.node, stitched.node, found.node), BLOCKWISE)
        record_shapes(node, [(None, *row)])
        self.program.let_stand(found, node.output(), stitched.node)

    def _sum(self, node: Node) -> None:
        """Let each coordinate add up the segments that are its rows; the kernel ignores negative numbers."""
        program, (data, ids, count) = self.program, node.inputs
        rows = program.rows_of(unit(program.state.source(node.output()).split_size) or 1)
        build, each = Builder.at(node, span=program.span), program.each
        inside, first = self._inside(build, ids, ids, rows)
        local = build.op("Sub", ids, first, what="from_first")
        own = build.op("SelectV2", inside, local, each(ids, [-1] * len(rows), "none"), what="ids")
        node.set_inputs([data, own, each(count, rows, "rows")])
