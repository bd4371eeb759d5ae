"""Halo exchange: an op with a window runs on a block of rows, and on rows of its neighbours.

    before   x ──► Conv2D, 3 rows, SAME ──► y                   8 rows, split along them over 2 devices
    after    x/part_0, first row of x/part_1 ──► ConcatV2 ──► Conv2D, EXPLICIT (1, 0) ──► y/part_0      4 rows
             last row of x/part_0, x/part_1 ──► ConcatV2 ──► Conv2D, EXPLICIT (0, 1) ──► y/part_1       4 rows

Padding is left to the kernel, which knows what its op makes of it (zeros, or nothing at all in a maximum); a device
states its own. The gradient of an input is computed for whole windows and cut to the device's rows: no window is
divided, so that the first of several equal maxima is the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import REPLICATED, split
from autograph_rewrite.ops.facts.windows import READ, Halo, Rows
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice

if TYPE_CHECKING:
    from autograph_rewrite.passes.tensor_parallel.partition import Partitioner


def halo_of(reshards: Mapping[int, Reshard]) -> tuple[int, Halo] | None:
    """Return the dimension and the halo of a node's operands, None where it reads none."""
    for want in reshards.values():
        if isinstance(want, Slice) and want.halo is not None:
            return want.dim, want.halo
        if isinstance(want, LocalEntry) and want.halo is not None:
            return want.position, want.halo
    return None


def units_of(sizes: Sequence[int]) -> list[Rows]:
    """Return the first and the last unit of each device, from their numbers."""
    return list(pairwise(accumulate(sizes, initial=0)))


class HaloExchange:
    """Reads rows of neighbouring blocks.

    Args:
        emit: adds nodes for logical devices.
    """

    def __init__(self, emit: Partitioner) -> None:
        self._emit = emit
        self._units = units_of(emit.sizes)
        self._read: dict[tuple[Value, int, tuple[Rows, ...]], list[Value]] = {}

    def rows(self, value: Value, want: Slice) -> list[Value]:
        """Return what each device reads of a value.

        Args:
            value: cut along the dimension, or whole.
            want: the dimension and the halo.
        """
        assert want.halo is not None
        spans = tuple(want.halo.span(units) for units in self._units)
        key = value, want.dim, spans
        if key not in self._read:
            blocks = self._blocks(value, want)
            self._read[key] = [self._joined(blocks, span, want.dim, k) for k, span in enumerate(spans)]
            self._note(value, want, blocks, spans)
        return self._read[key]

    def _blocks(self, value: Value, want: Slice) -> list[tuple[Rows, Value, int]]:
        """Return where a value is: rows, what holds them, and on which device."""
        emit = self._emit
        assert want.halo is not None
        fact = emit.shares.facts.get(value)
        is_cut = fact is not None and fact.placement == split(want.dim) and value not in emit.shares.summed
        if value in emit.parts and is_cut:
            owned = [want.halo.own(units) for units in self._units]
            return [(rows, part, k) for k, (rows, part) in enumerate(zip(owned, emit.parts[value], strict=True))]
        last = want.halo.own(self._units[-1])[1]
        return [((0, last), emit.whole(value), 0)]

    def _note(
        self, value: Value, want: Slice, blocks: Sequence[tuple[Rows, Value, int]], spans: tuple[Rows, ...]
    ) -> None:
        """Keep the exchange for the plan, with the rows that a device reads of others."""
        taken = sum(
            max(0, min(end, span[1]) - max(first, span[0]))
            for (first, end), _, owner in blocks
            for k, span in enumerate(spans)
            if owner != k
        )
        if not taken:
            return
        before, lowering = (split(want.dim), "halo") if len(blocks) > 1 else (REPLICATED, "slice")
        share = Fraction(taken, blocks[-1][0][1])
        owned = [part for _, part, _ in blocks]
        read = self._read[value, want.dim, spans]
        made = next((rows for rows in read if rows not in owned), read[0])  # a block of another device, read as it is
        self._emit.note(made.node, value, before, split(want.dim), lowering, share)

    def _joined(self, blocks: Sequence[tuple[Rows, Value, int]], span: Rows, dim: int, device: int) -> Value:
        taken = []
        for (first, end), part, owner in blocks:
            begin, stop = max(first, span[0]), min(end, span[1])
            if begin < stop:
                rows = begin - first, stop - first
                whole = (begin, stop) == (first, end)
                taken.append(part if whole else self._slice(part, rows, dim, owner, f"halo_{device}"))
        if len(taken) == 1:
            return taken[0]
        at = self._on(self._emit.const(dim, np.int32, taken[0].node, f"halo_{device}/axis"), device)
        joined = self._emit.add("ConcatV2", [*taken, at], taken[0].node, f"with_halo_{device}")
        self._emit.exchanges.mark(joined.node)
        return self._on(joined, device)

    def _slice(self, value: Value, rows: Rows, dim: int, device: int, what: str) -> Value:
        """Return some rows of images, taken where they are."""
        near = value.node
        begin = [rows[0] if i == dim else 0 for i in range(4)]
        size = [rows[1] - rows[0] if i == dim else -1 for i in range(4)]
        limits = [
            self._on(self._emit.const(content, np.int32, near, f"{what}/{name}"), device)
            for name, content in (("begin", begin), ("size", size))
        ]
        return self._on(self._emit.add("Slice", [value, *limits], near, what), device)

    def entries(self, value: Value, want: LocalEntry) -> list[Value]:
        """Return the shape of what each device computes.

        Args:
            value: the shape of the whole.
            want: the entry that says how many rows there are.
        """
        assert want.halo is not None
        emit, found = self._emit, []
        entries = emit.shares.fact(value).value or ()
        for k, units in enumerate(self._units):
            first, end = want.halo.span(units)
            if value not in emit.parts and entries and all(isinstance(entry, int) for entry in entries):
                content = [end - first if i == want.position else entry for i, entry in enumerate(entries)]
                found.append(emit.const(content, dtypes.numpy_dtype(value.dtype), value.node, f"part_{k}"))
                continue
            chosen = [i == want.position for i in range(4)]
            rows = want.halo.window.rows
            found.append(emit.scaled(emit.whole(value), chosen, end - first, rows, f"halo_{k}"))
        return found

    def copy(self, node: Node, device: int, inputs: Sequence[Value], cut: tuple[int, Halo]) -> tuple[Node, Value]:
        """Add a copy of a node for one device; return it, and the device's rows of what it makes.

        Args:
            node: with a window.
            device: the number of the device.
            inputs: operands of the copy.
            cut: the dimension and the halo.
        """
        dim, halo = cut
        units = self._units[device]
        made = self._emit.copy(node, device, inputs)
        _pad(made, dim, halo.padding(units), halo.beside)
        self._emit.put(made, device)
        if halo.reads == READ:
            return made, made.output()
        begin, stop = units[0] * halo.rows, units[1] * halo.rows
        first, end = halo.window.neighbours((begin, stop))
        if (begin, stop) == (first, end):
            return made, made.output()
        return made, self._slice(made.output(), (begin - first, stop - first), dim, device, "own")

    def _on(self, value: Value, device: int) -> Value:
        self._emit.put(value.node, device)
        return value


def _pad(node: Node, dim: int, rows: Rows, beside: Rows) -> None:
    """State the padding of a copy: of its own rows, and beside them as before."""
    if not (any(rows) or any(beside)):
        node.set_attr("padding", b"VALID")
        if "explicit_paddings" in node.attrs:
            node.set_attr("explicit_paddings", ())
        return
    first = 2 if node.attr("data_format", b"NHWC").startswith(b"NC") else 1
    stated = [0] * 8
    for at, (before, after) in ((dim, rows), (2 * first + 1 - dim, beside)):
        stated[2 * at : 2 * at + 2] = before, after
    node.set_attr("padding", b"EXPLICIT")
    node.set_attr("explicit_paddings", tuple(stated))
