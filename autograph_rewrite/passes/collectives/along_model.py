"""Convert values among the devices of a replica that run one program on their blocks: by collectives, or by cutting.

    partial(sum) -> replicated    CollectiveReduceV2 among the devices of the replica
    partial(sum) -> split         CollectiveAllToAllV2 of the blocks, then AddN: CPUs have no reduce-scatter
    split -> replicated           CollectiveGatherV2, whose parts are joined along the dimension
    replicated -> split           the rows of one's block
    replicated -> partial(sum)    the value on the first device, zeros on the others

Each replica is a group. Micro-batches of one replica have different keys, since they may run at the same time. A value
whose shape may differ between steps has a different key for each size (`passes.collectives.key_operands`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from autograph_rewrite.ir.format.annotations import placements_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import MICRO, MODEL, STAGE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import axis_along
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.all_reduce import MERGES
from autograph_rewrite.passes.collectives.key_operands import KEY_BITS, collective_attrs, in_stage, salted
from autograph_rewrite.passes.collectives.wire_values import cast, decode, encode
from autograph_rewrite.plan.parts.collective_keys import KEYS, group_key, instance_keys
from autograph_rewrite.plan.parts.names import EDGE_ATTR, model_axis_name
from autograph_rewrite.resolve.model_axis import number_of
from autograph_rewrite.resolve.wire_types import may_change, wire_type

SCOPE = "autograph_model"
"""Name prefix of the constants that all conversions share."""


@dataclass
class AlongModel:
    """Makes the conversions of one rewrite.

    Attributes:
        nodes: the reshards, in the same order in all processes.
        salt: makes their groups differ from those of other plans (`Keys`).
    """

    rewrite: Rewrite
    nodes: tuple[Node, ...]
    salt: str
    _numbers: dict[str, int] = field(default_factory=dict)
    _keys: dict[tuple[str, str], int] = field(default_factory=dict)
    _constants: dict[tuple[object, ...], Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = {node.name: i for i, node in enumerate(self.nodes)}
        parts = range(self.rewrite.micro)
        self._keys = instance_keys((node.name, f"micro_{part}") for node in self.nodes for part in parts)

    def lower(self, node: Node) -> Value:
        """Return the converted value of a reshard."""
        axis = axis_along(node)
        before, after = (placements_of(node.attr(key).decode()).get(axis, REPLICATED) for key in ("before", "after"))
        (value,) = node.inputs
        fact, dim, sizes = self.rewrite.fact(node.output()), node.attr("dim"), node.attr("shards")
        if rows := node.attr("rows"):
            return self._rows(node, value, rows, is_cut=before.is_split)
        if before.is_partial:
            return self._sum(node, value, fact, before.op, dim if after.is_split else None)
        if before.is_split:
            return self._joined(node, value, fact, dim)
        if after.is_split:
            return self._block(node, value, dim, sizes, axis)
        build = FoldedBuilder.of(self.rewrite, value, node.name, span=node.span)
        name = f"{node.name}/is_first"
        mine = self.rewrite.const_at(lambda at: at[axis] == 0, np.bool_, name=name, near=value, span=node.span)
        return build.op("SelectV2", mine, value, build.op("ZerosLike", value, what="zeros"), what="term")

    def _block(self, node: Node, value: Value, dim: int, sizes: Sequence[int], axis: str) -> Value:
        ends, build = [0, *accumulate(sizes)], FoldedBuilder.of(self.rewrite, value, node.name, span=node.span)

        def limits(further: int, what: str) -> Value:
            def limit(at: Mapping[str, int]) -> list[int]:
                return [0] * dim + [ends[at[axis] + further]]

            return self.rewrite.const_at(limit, np.int32, name=f"{node.name}/{what}", near=value, span=node.span)

        step, before = self._number(build, [1] * (dim + 1), "step"), (1 << dim) - 1
        ahead: dict[str, Any] = {"begin_mask": before, "end_mask": before}
        return build.op("StridedSlice", value, limits(0, "begin"), limits(1, "end"), step, what="rows", **ahead)

    def _sum(self, node: Node, value: Value, fact: Fact, op: str, dim: int | None) -> Value:
        """Return the sum, or the device's block of it along `dim`, for which half as much is sent."""
        rewrite, build = self.rewrite, FoldedBuilder.of(self.rewrite, value, node.name, span=node.span)
        wide = cast(rewrite, value, wire_type(fact.dtype, op), f"{node.name}/widen")
        coded = encode(rewrite, wide, op, node.name)
        changing = may_change(fact)
        parts = [coded] if dim is None else self._blocks_of(node, build, coded, dim)
        ready = [self._line(build, one) for one in parts] if changing else parts
        if dim is None:
            attrs = collective_attrs(rewrite) | {"merge_op": MERGES[op], "final_op": "Id"}
            operands = self._operands(node, ready[0], changing)
            total = build.op("CollectiveReduceV2", ready[0], *operands, what="sum", **attrs)
            self._mark(node, total.node)
        else:
            total = self._sum_of_mine(node, build, ready, changing)
        if changing:
            total = build.op("Reshape", self._without_last(build, total), self._shape(build, parts[0]), what="unflat")
        total = decode(rewrite, total, wide.dtype, node.name)
        return cast(rewrite, total, fact.dtype, f"{node.name}/narrow")

    def _blocks_of(self, node: Node, build: FoldedBuilder, value: Value, dim: int) -> list[Value]:
        count = self.rewrite.mesh.size(axis_along(node))
        blocks = build.op("Split", self._number(build, dim, "axis"), value, what="blocks", num_split=count).node
        return [blocks.output(k) for k in range(count)]

    def _sum_of_mine(self, node: Node, build: FoldedBuilder, blocks: Sequence[Value], changing: bool) -> Value:
        """Send each device its block, and add up the received ones."""
        count, attrs = len(blocks), collective_attrs(self.rewrite)
        sent = build.op("Pack", *blocks, what="packed", N=count)
        operands = self._operands(node, sent, changing)
        met = build.op("CollectiveAllToAllV2", sent, *operands, what="all_to_all", **attrs)
        self._mark(node, met.node)
        terms = build.op("Unpack", met, what="terms", num=count).node
        return build.op("AddN", *(terms.output(k) for k in range(count)), what="sum", N=count)

    def _joined(self, node: Node, value: Value, fact: Fact, dim: int) -> Value:
        rewrite, count = self.rewrite, self.rewrite.mesh.size(axis_along(node))
        build = FoldedBuilder.of(rewrite, value, node.name, span=node.span)
        coded = encode(rewrite, value, "gather", node.name)
        changing = may_change(fact)
        ready = self._line(build, coded) if changing else coded
        operands = self._operands(node, ready, changing)
        gathered = build.op("CollectiveGatherV2", ready, *operands, what="gather", **collective_attrs(rewrite))
        self._mark(node, gathered.node)
        if changing or dim:
            axis = self._number(build, 0, "first_axis")
            parts = build.op("Split", axis, gathered, what="parts", num_split=count).node
            each = [parts.output(k) for k in range(count)]
            if changing:
                shape = self._shape(build, coded)
                each = [build.op("Reshape", self._without_last(build, one), shape, what=f"of_{k}")
                        for k, one in enumerate(each)]  # fmt: skip
            gathered = build.op("ConcatV2", *each, self._number(build, dim, "axis"), what="joined", N=count)
        return decode(rewrite, gathered, value.dtype, node.name)

    def _rows(self, node: Node, value: Value, rows: Sequence[int], *, is_cut: bool) -> Value:
        """Return the rows that a window reads: the device's block, rows of neighbours, and padding at both ends.

        h/halo    edges = gather(last rows, first rows)      0 | e0 | e1 | e2 | 0       each device takes
                  concat(edges[k], h, edges[k + 1])                                     those next to its block
        """
        rewrite, axis, dim = self.rewrite, axis_along(node), node.attr("dim")
        build = FoldedBuilder.of(rewrite, value, node.name, span=node.span)
        size, before, after = node.attr("shards")[0], max(0, -rows[0]), max(0, rows[1] - node.attr("shards")[0])
        rank = rewrite.fact(node.output()).rank or 0  # the rank of images is known

        def part(whole: Value, first: Callable[[Mapping[str, int]], int], count: int, what: str) -> Value:
            def begin(at: Mapping[str, int]) -> list[int]:
                return [first(at) if i == dim else 0 for i in range(rank)]

            begins = rewrite.const_at(begin, np.int32, name=f"{node.name}/{what}/begin", near=value, span=node.span)
            sizes = self._number(build, [count if i == dim else -1 for i in range(rank)], f"{what}/size")
            return build.op("Slice", whole, begins, sizes, what=what)

        if not is_cut or max(before, after) > size:  # every device has all rows, or needs some beyond its neighbours
            whole = self._joined(node, value, rewrite.fact(node.output()), dim) if is_cut else value
            padded = self._padded(node, build, whole, rank, before, after)
            return part(padded, lambda at: at[axis] * size + rows[0] + before, rows[1] - rows[0], "rows")
        first, end = max(0, rows[0]), min(size, rows[1])
        own = value if (first, end) == (0, size) else part(value, lambda at: first, end - first, "own")
        if not before and not after:  # windows that reach no neighbour
            return build.op("Identity", own, what="rows")
        edges = [part(value, lambda at: 0, after, "first")] if after else []
        edges += [part(value, lambda at: size - before, before, "last")] if before else []
        at_dim = self._number(build, dim, "at")
        sent = edges[0] if len(edges) == 1 else build.op("ConcatV2", *edges, at_dim, what="edges")
        whole = self._joined(node, sent, rewrite.fact(node.output()), dim)
        padded = self._padded(node, build, whole, rank, before, after)
        taken = [part(padded, lambda at: at[axis] * (before + after), before, "ahead")] if before else []
        taken.append(own)
        if after:
            taken.append(part(padded, lambda at: before + (at[axis] + 1) * (before + after), after, "behind"))
        return build.op("ConcatV2", *taken, at_dim, what="rows")

    def _padded(self, node: Node, build: FoldedBuilder, value: Value, rank: int, before: int, after: int) -> Value:
        """Return rows with padding at both ends."""
        if not before and not after:
            return value
        dim = node.attr("dim")
        paddings = self._number(build, [[before, after] if i == dim else [0, 0] for i in range(rank)], "paddings")
        if not node.attr("lowest"):
            return build.op("Pad", value, paddings, what="padded")
        kind: Any = np.dtype(dtypes.numpy_dtype(value.dtype) or np.float32)
        lowest = -np.inf if kind.kind == "f" else int(np.iinfo(kind).min)
        number = self._number(build, lowest, "lowest", dtypes.from_numpy(kind))
        number = cast(self.rewrite, number, value.dtype, f"{node.name}/lowest")
        return build.op("PadV2", value, paddings, number, what="padded")

    def _mark(self, reshard: Node, made: Node) -> None:
        """Record on a collective the model axis along which its devices meet."""
        made.set_attr(EDGE_ATTR, model_axis_name(number_of(axis_along(reshard))))

    def _line(self, build: FoldedBuilder, value: Value) -> Value:
        """Return a vector with one number more: a TensorFlow collective of an empty tensor ends the process."""
        line = build.op("Reshape", value, self._number(build, [-1], "line"), what="flat")
        more = self._number(build, [0], "more", value.dtype)
        return build.op("ConcatV2", line, more, self._number(build, 0, "end"), what="sent", N=2)

    def _without_last(self, build: FoldedBuilder, line: Value) -> Value:
        ends = [self._number(build, [at], what) for at, what in ((0, "from"), (-1, "to"), (1, "by"))]
        return build.op("StridedSlice", line, *ends, what="kept")

    def _number(self, build: FoldedBuilder, content: object, what: str, dtype: int = dtypes.INT32) -> Value:
        """Return a constant that all conversions share; in a loop, each value has one, which waits for it."""
        key = what, str(content), dtype, self._loop(build.near)
        if key not in self._constants:
            self._constants[key] = replace(build, name=SCOPE).const(content, dtype, what)
        return self._constants[key]

    def _loop(self, near: Value) -> Value | None:
        return near if self.rewrite.frames.get(near.node) else None

    def _shape(self, build: FoldedBuilder, value: Value) -> Value:
        return build.op("Shape", value, what="shape")

    def _operands(self, node: Node, near: Value, changing: bool) -> list[Value]:
        """Return group size, group key and instance key."""
        rewrite, axis = self.rewrite, axis_along(node)
        mesh, plan = rewrite.mesh, rewrite.plan
        devices, count = plan.part_devices, mesh.size(axis)
        stage = node.at(STAGE) if plan.pipeline is not None else None

        def group(at: Mapping[str, int]) -> int:
            # If all replicas share the value, the devices of the first meet.
            begin = rewrite.replica_at(at) * plan.devices_each + plan.place(stage or 0)
            line = next(line for line in mesh.lines([axis]) if at[MODEL] in line)
            return salted(group_key([devices[begin + i] for i in line]), self.salt)

        def number(content: Callable[[Mapping[str, int]], int], what: str) -> Value:
            return rewrite.const_at(content, np.int32, name=f"{node.name}/{what}", near=near, span=node.span)

        def shared(content: Callable[[Mapping[str, int]], int], what: str) -> Value:
            key = what, node.span, axis, stage, self._loop(near)
            if key not in self._constants:
                name = f"{SCOPE}/{what}" if axis == MODEL else f"{SCOPE}/{axis}/{what}"
                made = rewrite.const_at(content, np.int32, name=name, near=near, span=node.span)
                self._constants[key] = in_stage(made, stage)
            return self._constants[key]

        size, of_group = shared(lambda at: count, "size"), shared(group, "group")
        if not changing:
            key = number(lambda at: self._keys[node.name, f"micro_{at.get(MICRO, 0)}"], "number")
            return [size, of_group, key]
        rows = len(self.nodes) * rewrite.micro
        bits, build = max(1, (rows - 1).bit_length()), FoldedBuilder.of(rewrite, near, f"{node.name}/key")
        mask = self._number(build, 2 ** (KEY_BITS - bits) - 1, "mask")
        bounded = build.op("BitwiseAnd", build.op("Size", near, what="size"), mask, what="bounded")
        spread = build.op("Mul", bounded, self._number(build, 2**bits, "rows"), what="spread")
        row = number(lambda at: KEYS + self._numbers[node.name] * rewrite.micro + at.get(MICRO, 0), "row")
        return [size, of_group, build.op("AddV2", spread, row, what="instance")]
