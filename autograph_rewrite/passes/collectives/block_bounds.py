"""Compute, once per step, where each replica's block of the batch begins and ends.

    B = shape(x)[0]      replica r holds examples  r*(B//N) + min(r, B%N)  ...  the same for r+1

The first B mod N replicas hold one example more. A batch of static size gives constants.

Each of several processes is fed a part, of any size, and divides it among its replicas. The sizes of the parts are
exchanged once per step:

    parts = all processes' shape(x)[0]      B = sum(parts)      this process's part begins at the sum of those before

With its size each process sends a digest of the inputs that must be equal in all processes; the runtime feeds it, and
compares all digests (`runtime.job.digests`). If nothing in the step needs the sizes, both are sent in a bucket of
gradients (`resolve.buckets`).

The micro-batches of a replica divide its examples again. Of M interleaved micro-batches, number m has every M-th
example, from the replica's m-th on; they are as many as in the m-th of M contiguous parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.mesh import EACH, ONCE, PER_REPLICA, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.passes.collectives.all_reduce import reduce_between_processes
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.plan.parts.batch_split import DIGEST, block_begin, bounds, limits
from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan

SCOPE = "autograph_batch"


class Blocks:
    """Int32 values about the batch and its blocks, each added once.

    Args:
        source: the batch input that is measured: whole in one process, else this process's part.
        axis: its batch dimension.
        keys: of collectives.
    """

    def __init__(self, rewrite: Rewrite, source: Value, axis: int, keys: Keys) -> None:
        self._rewrite = rewrite
        self.source = source
        self._axis = axis
        self._keys = keys
        self._scaled: dict[tuple[str, int], Value] = {}
        self._orders: dict[tuple[int, ...], Value] = {}
        self._heard: Value | None = None  # the rows of all processes, if sent in a bucket
        self.interleaved = rewrite.plan.microbatches > 1 and rewrite.plan.interleaved

    @property
    def static(self) -> int | None:
        """The size of the whole batch; None if it is not static."""
        return self._rewrite.state.semantics.extent.units

    @property
    def even(self) -> bool:
        """Whether all blocks are certainly of one length."""
        return self.static is not None and self.static % self._rewrite.replicas == 0

    @cached_property
    def _limits(self) -> list[int]:
        assert self.static is not None
        return limits(self.static, self._rewrite.processes, self._rewrite.local)

    @cached_property
    def part(self) -> Value:
        """The number of examples of this process (scalar, runs once)."""
        rewrite, source = self._rewrite, self.source
        if self.static is not None:
            first, last = rewrite.task * rewrite.local, (rewrite.task + 1) * rewrite.local
            return self._const("size", self._limits[last] - self._limits[first])
        shape = self._once("Shape", "shape", source)
        ends = [self._vector(n, [v]) for n, v in (("axis", self._axis), ("next", self._axis + 1), ("one", 1))]
        return self._once("StridedSlice", "size", shape, *ends, shrink_axis_mask=1)

    @cached_property
    def parts(self) -> Value:
        """The number of examples of each process (vector, runs once)."""
        rewrite = self._rewrite
        if self.static is not None:
            sizes = [b - a for a, b in pairwise(bounds(self.static, rewrite.processes))]
            return self._vector("parts", sizes)
        return self._once("GatherV2", "parts", self._table, self._const("size_column", 0), self._const("columns", 1))

    @cached_property
    def digest(self) -> Value:
        """The placeholder of this process's digest (vector, runs once); zeros if it is not fed."""
        zeros = self._vector("no_digest", [0] * DIGEST)
        return self._once("PlaceholderWithDefault", "digest", zeros, shape=(DIGEST,))

    @cached_property
    def _table(self) -> Value:
        """The number of examples, and the digest, of each process (matrix, runs once)."""
        edge = self._rewrite.edges[self.source.name, SIZES]
        if not edge.bucket:
            return self.of_each_process(self._row, edge, self.source, is_row=True)
        # The plan expected no reader of the sizes before the bucket, and gave this edge the key of the bucket.
        alone = replace(edge, lowering="host_reduce", bucket=0)
        return self.of_each_process(self._row, alone, self.source, is_row=True, changing=True)

    @cached_property
    def _row(self) -> Value:
        """The number of examples, and the digest, of this process (vector, runs once)."""
        size = self._once("ExpandDims", "size_row", self.part, self._const("row_axis", 0))
        return self._once("ConcatV2", "row", size, self.digest, self._const("row_line", 0), N=2)

    @cached_property
    def digests(self) -> Value:
        """The sizes and digests of all processes, for the runtime to compare (matrix, runs once)."""
        return self._once("Identity", "digests", self._heard if self._heard is not None else self._table)

    @property
    def row_length(self) -> int:
        """The length of `row_in_halves`."""
        return 2 * (1 + DIGEST) * self._rewrite.processes

    def row_in_halves(self, dtype: int) -> Value:
        """Return this process's row in halves, at its place among zeros for the other processes (vector, runs once).

        Args:
            dtype: a floating-point type.
        """
        build = FoldedBuilder.of(self._rewrite, self._row, f"{SCOPE}/told", span=ONCE)
        return split_row(build, self._row, dtype, (self._rewrite.task, self._rewrite.processes))

    def take_halves(self, total: Value) -> None:
        """Take the rows of all processes from the sum of their `row_in_halves` (vector)."""
        build = FoldedBuilder.of(self._rewrite, self._row, f"{SCOPE}/heard", span=ONCE)
        self._heard = join_rows(build, self._rewrite.once(total), (self._rewrite.processes, 1 + DIGEST))

    def of_each_process(
        self, number: Value, edge: EdgePlan, near: Value, *, is_row: bool = False, changing: bool = False
    ) -> Value:
        """Return the numbers of all processes, given this one's (scalar int32, or a row of them).

        Each process adds a vector with one entry, so the order in which the runtime has the processes does not matter.

        Args:
            number: scalar int32, or a row of these [1, k].
            edge: the plan's, of the exchange of sizes.
            near: the value that is measured.
            is_row: whether `number` is a row.
            changing: whether the key follows from the size.
        """
        rewrite = self._rewrite
        mine = np.zeros((rewrite.processes, 1) if is_row else rewrite.processes, np.int32)
        mine[rewrite.task] = 1
        build = FoldedBuilder.of(rewrite, near, f"{near.node.name}/{SIZES}", span=ONCE)
        placed = build.op("Mul", number, build.numbers(mine, "own"), what="mine")
        return reduce_between_processes(Exchange(rewrite, self._keys, edge), placed, "sum", changing=changing)

    @cached_property
    def batch(self) -> Value:
        """The number of examples of the whole batch (scalar, runs once)."""
        if self._rewrite.processes == 1:
            return self.part
        if self.static is not None:
            return self._const("whole_size", self.static)
        return self._once("Sum", "whole_size", self.parts, self._const("first_axis", 0))

    @cached_property
    def offset(self) -> Value:
        """The first example of this process's part (scalar, runs once)."""
        rewrite = self._rewrite
        if self.static is not None:
            return self._const("offset", self._limits[rewrite.task * rewrite.local])
        before = self._vector("before", [int(task < rewrite.task) for task in range(rewrite.processes)])
        return self._once("Sum", "offset", self._once("Mul", "earlier", self.parts, before), self._const("axis_0", 0))

    @cached_property
    def lengths(self) -> Value:
        """The number of examples of each replica of all processes (vector, runs once)."""
        rewrite = self._rewrite
        if self.static is not None:
            return self._vector("lengths", [b - a for a, b in pairwise(self._limits)])
        each = self._const("each", rewrite.local)
        sizes = self.part
        if rewrite.processes > 1:
            sizes = self._once("ExpandDims", "rows", self.parts, self._const("column", 1))
        ranks = self._vector("ranks", list(range(rewrite.local)))
        longer = self._once("Less", "is_longer", ranks, self._once("FloorMod", "left", sizes, each))
        more = self._once("Cast", "longer", longer, DstT=dtypes.INT32)
        table = self._once("AddV2", "table", self._once("FloorDiv", "share", sizes, each), more)
        return self._once("Reshape", "lengths", table, self._vector("line", [-1]))

    @cached_property
    def longest(self) -> Value:
        """The number of examples of the longest block, at least 1 (scalar, runs once).

        Blocks are padded to it before they are gathered, and TensorFlow's gather of an empty tensor ends the process.
        """
        if self.static is not None:
            return self._const("longest", max(1, *(b - a for a, b in pairwise(self._limits))))
        longest = self._once("Max", "longest", self.lengths, self._const("axis_of_lengths", 0))
        return self._once("Maximum", "padded", longest, self._const("least", 1))

    def _vector(self, name: str, entries: Sequence[int]) -> Value:
        vector = self._rewrite.const(entries, np.int32, name=f"{SCOPE}/{name}", near=self.source)
        vector.node.set_span(ONCE)
        return vector

    def _const(self, name: str, entry: int) -> Value:
        return self._rewrite.const(entry, np.int32, name=f"{SCOPE}/{name}", near=self.source)

    def _once(self, op: str, name: str, *inputs: Value, **attrs: Any) -> Value:
        return self._add(ONCE, op, name, inputs, attrs)

    def _each(self, op: str, name: str, *inputs: Value) -> Value:
        return self._add(EACH, op, name, inputs, {})

    def _add(self, span: Span, op: str, name: str, inputs: Sequence[Value], attrs: dict[str, Any]) -> Value:
        return self._rewrite.add(op, inputs, Site(f"{SCOPE}/{name}", span, self.source.node), attrs=attrs).output()

    def _own(self, name: str, entries: Sequence[int]) -> Value:
        """Return each instance's entry of a list with one entry per instance of the job."""
        return self._rewrite.const_each(entries, np.int32, name=f"{SCOPE}/{name}", near=self.source)

    def _limit(self, name: str, offset: int, micro: int = 1) -> Value:
        """Return r -> start of block r + offset within this process's part; each block consists of `micro` of them."""
        rewrite = self._rewrite
        places = [r // micro * micro + offset * micro for r in range(rewrite.replicas)]
        if self.static is not None:
            starts = [self._limits[r // rewrite.local * rewrite.local] for r in range(rewrite.replicas)]
            return self._own(name, [self._limits[at] - start for at, start in zip(places, starts, strict=True)])
        firsts = [r // rewrite.local * rewrite.local for r in range(rewrite.replicas)]
        index = self._own(f"{name}_index", [at - first for at, first in zip(places, firsts, strict=True)])
        names = {"Mul": f"{name}_whole", "Minimum": f"{name}_extra", "AddV2": f"{name}_limit"}
        begin: Value = block_begin(
            index, self._quotient, lambda: self._remainder, lambda op, a, b: self._each(op, names[op], a, b)
        )
        return begin

    @cached_property
    def _quotient(self) -> Value:
        return self._once("FloorDiv", "quotient", self.part, self._const("quotient_replicas", self._rewrite.local))

    @cached_property
    def _remainder(self) -> Value:
        return self._once("FloorMod", "remainder", self.part, self._const("remainder_replicas", self._rewrite.local))

    @cached_property
    def part_begin(self) -> Value:
        """The first example of this replica's block within this process's part (scalar, each)."""
        return self._limit("begin", 0)

    @cached_property
    def part_end(self) -> Value:
        """The example after this replica's block within this process's part (scalar, each)."""
        return self._limit("end", 1)

    @cached_property
    def part_first(self) -> Value:
        """The first of the interleaved examples of this micro-batch within this process's part (scalar, each)."""
        rewrite = self._rewrite
        own = self._own("micro", [r % rewrite.micro for r in range(rewrite.replicas)])
        first = self._each("AddV2", "first", self._limit("replica_begin", 0, rewrite.micro), own)
        return self._each("Minimum", "first_or_none", first, self.part_last)

    @cached_property
    def part_last(self) -> Value:
        """The example after all micro-batches of this replica within this process's part (scalar, each)."""
        return self._limit("replica_end", 1, self._rewrite.micro)

    @cached_property
    def examples(self) -> Value:
        """The examples of this micro-batch within this process's part (vector, each)."""
        return self._each(
            "Range", "examples", self.part_first, self.part_last, self._const("stride", self._rewrite.micro)
        )

    @cached_property
    def whole_examples(self) -> Value:
        """The examples of this micro-batch within the whole batch (vector, each)."""
        if self._rewrite.processes == 1:
            return self.examples
        return self._each("AddV2", "whole_examples", self.examples, self.offset)

    @cached_property
    def restored(self) -> Value:
        """The position of each example of this process's part among its joined micro-batches (vector, runs once)."""
        build, line = FoldedBuilder.of(self._rewrite, self.source, SCOPE), self._const("line_of_examples", 0)
        joined = build.gather("ConcatV2", self.examples, line, what="joined")
        return self._once("InvertPermutation", "restored", joined)

    def all_rows(self, what: str, per_example: int) -> Value:
        """Return the vector of examples `what` as a vector of rows, of which each example has `per_example`."""
        value: Value = getattr(self, what)
        if per_example == 1:
            return value
        key = (f"rows of {what}", per_example)
        if key not in self._scaled:
            span = value.node.span
            column, unit = self._const(f"{what}_axis", 1), self._const(f"{what}_unit", per_example)
            rows = self._add(span, "ExpandDims", f"{what}_column", [value, column], {})
            rows = self._add(span, "Mul", f"{what}_begins", [rows, unit], {})
            offsets, line = self._vector(f"{what}_next", range(per_example)), self._vector(f"{what}_line", [-1])
            rows = self._add(span, "AddV2", f"{what}_table", [rows, offsets], {})
            self._scaled[key] = self._add(span, "Reshape", f"{what}_all", [rows, line], {})
        return self._scaled[key]

    def restored_rows(self, joined: Value, dim: int) -> Value:
        """Return `restored` in rows; all examples have the same number of rows, which is counted in the run."""
        extent = self._once("Shape", "restored_extent", joined)
        ends = [self._vector(f"restored_{what}", [at]) for what, at in (("dim", dim), ("behind", dim + 1), ("by", 1))]
        rows = self._once("StridedSlice", "restored_count", extent, *ends, shrink_axis_mask=1)
        some = self._once("Maximum", "restored_examples", self.part, self._const("restored_least", 1))
        each = self._once("FloorDiv", "restored_each", rows, some)
        column = self._once("ExpandDims", "restored_places", self.restored, self._const("restored_column", 1))
        begins = self._once("Mul", "restored_begins", column, each)
        zero, one = self._const("restored_zero", 0), self._const("restored_one", 1)
        table = self._once("AddV2", "restored_table", begins, self._once("Range", "restored_next", zero, each, one))
        return self._once("Reshape", "restored_all", table, self._vector("restored_line", [-1]))

    def ordered(self, key: tuple[int, ...], make: Callable[[], Value]) -> Value:
        """Return the order of the segments of these blocks, which `make` adds once per key."""
        if key not in self._orders:
            self._orders[key] = make()
        return self._orders[key]

    @cached_property
    def begin(self) -> Value:
        """The first example of this replica's block (scalar, each)."""
        if self._rewrite.processes == 1:
            return self.part_begin
        return self._each("AddV2", "whole_begin", self.part_begin, self.offset)

    @cached_property
    def end(self) -> Value:
        """The example after this replica's block (scalar, each)."""
        if self._rewrite.processes == 1:
            return self.part_end
        return self._each("AddV2", "whole_end", self.part_end, self.offset)

    @cached_property
    def count(self) -> Value:
        """The number of examples in this replica's block (scalar, each)."""
        if self.static is not None:
            return self._own("count", [b - a for a, b in pairwise(self._limits)])
        return self._each("Sub", "count", self.part_end, self.part_begin)

    def rows(self, what: str, per_example: int) -> Value:
        """Return the number of examples `what` as a number of rows, of which each example has `per_example`."""
        value: Value = getattr(self, what)
        if per_example == 1:
            return value
        key = (what, per_example)
        if key not in self._scaled:
            factor = self._const(f"{what}_unit", per_example)
            self._scaled[key] = self._add(value.node.span, "Mul", f"{what}_rows", [value, factor], {})
        return self._scaled[key]


class ShardBlocks(Blocks):
    """The same values about shards of variables: one on each replica, of known sizes.

    Args:
        blocks: of the batch.
        sizes: of the shards, in units; some may be 0.
        keys: of collectives.
    """

    def __init__(self, rewrite: Rewrite, blocks: Blocks, sizes: tuple[int, ...], keys: Keys) -> None:
        super().__init__(rewrite, blocks.source, blocks._axis, keys)
        self._sizes = sizes
        self.interleaved = False

    @property
    def static(self) -> int:
        """The size of all shards together."""
        return sum(self._sizes)

    @property
    def even(self) -> bool:
        """Whether all shards are equally long."""
        return len(set(self._sizes)) == 1

    @cached_property
    def _limits(self) -> list[int]:
        return list(accumulate(self._sizes, initial=0))

    def _own(self, name: str, entries: Sequence[int]) -> Value:
        """Return each replica's entry of a list with one entry per replica; its micro-batches share the shard."""
        span = PER_REPLICA if self._rewrite.micro > 1 else EACH
        return FoldedBuilder.of(self._rewrite, self.source, SCOPE, span=span).of_replicas(entries, np.int32, name)

    def _limit(self, name: str, offset: int, micro: int = 1) -> Value:
        return self._own(name, self._limits[offset:][: len(self._sizes)])

    @cached_property
    def _of_processes(self) -> list[int]:
        each = self._rewrite.plan.replicas_each
        return [sum(self._sizes[first : first + each]) for first in range(0, len(self._sizes), each)]

    @cached_property
    def part(self) -> Value:
        """The size of the shards of this process together (scalar, runs once)."""
        return self._const("size", self._of_processes[self._rewrite.task])

    @cached_property
    def parts(self) -> Value:
        """The size of the shards of each process (vector, runs once)."""
        return self._vector("parts", self._of_processes)

    @cached_property
    def count(self) -> Value:
        """The size of this replica's shard (scalar, each)."""
        return self._own("count", self._sizes)


# Send integers among floating-point numbers: in halves of 16 bits, which float32 holds and adds to 0 without rounding.
#
# [size, digest...]  ──►  low halves, high halves, at this process's place among zeros  ── sum ──►  all rows


BITS = 16


def split_row(build: FoldedBuilder, row: Value, dtype: int, place: tuple[int, int]) -> Value:
    """Return a row of integers in halves, at its place among zeros for the other members, as a vector.

    Args:
        row: int32 [k].
        dtype: a floating-point type.
        place: the number of this member, and how many there are.
    """
    mask, bits = build.numbers(2**BITS - 1, "mask"), build.numbers(BITS, "bits")
    low = build.op("BitwiseAnd", row, mask, what="low")
    high = build.op("BitwiseAnd", build.op("RightShift", row, bits, what="upper"), mask, what="high")
    both = build.op("ConcatV2", low, high, build.numbers(0, "axis"), what="halves", N=2)
    member, members = place
    own = np.zeros((members, 1), np.int32)
    own[member] = 1
    placed = build.op("Mul", both, build.numbers(own, "own"), what="placed")
    line = build.op("Reshape", placed, build.numbers([-1], "line"), what="flat")
    return build.op("Cast", line, what="exact", DstT=dtype)


def join_rows(build: FoldedBuilder, total: Value, shape: tuple[int, int]) -> Value:
    """Return the rows of all members (int32 matrix) from the sum of their `split_row`.

    Args:
        total: vector.
        shape: the number of members, and of integers of each.
    """
    members, count = shape
    exact = build.op("Cast", total, what="exact", DstT=dtypes.INT32)
    halves = build.op("Reshape", exact, build.numbers([members, 2, count], "shape"), what="halves")
    low = build.op("Unpack", halves, what="apart", num=2, axis=1)
    high = build.op("LeftShift", low.node.output(1), build.numbers(BITS, "bits"), what="high")
    return build.op("BitwiseOr", low, high, what="rows")
