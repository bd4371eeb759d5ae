"""Checks ops with windows along a dimension that the devices of a replica split, window by window.

    Conv2D, 3 rows, stride 1, SAME    device k reads rows -1 to R + 1 of its block, and pads nothing itself
    its output r                      reads input rows r - 1, r, r + 1, which have to be those three of what is read

The check uses no formula of the rewrite: it visits every window of every block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autograph_rewrite.certify.seen import Seen, said, whole
from autograph_rewrite.ir.claims import OWN, Claim, Claims, Read
from autograph_rewrite.ir.graph import Node, Value

OPERANDS = {
    "Conv2D": "x f", "DepthwiseConv2dNative": "x f", "MaxPool": "x", "AvgPool": "x",
    "Conv2DBackpropFilter": "x s y", "DepthwiseConv2dNativeBackpropFilter": "x s y",
    "Conv2DBackpropInput": "s f y", "DepthwiseConv2dNativeBackpropInput": "s f y",
    "MaxPoolGrad": "x y y", "AvgPoolGrad": "s y",
}  # fmt: skip
"""The operands of each op: `x` has the input's rows, `y` the output's, `f` is a filter, `s` a shape."""
MAXIMA = frozenset(("MaxPool", "MaxPoolGrad"))


class _Window(NamedTuple):
    """A window along one dimension.

    Attributes:
        taps: the rows that it reads, counted from its first row.
        stride: rows from one window to the next.
        before: rows of padding before the input.
    """

    taps: tuple[int, ...]
    stride: int
    before: int
    rows: int
    outputs: int

    def reads(self, output: int) -> Iterator[int]:
        """Yield the rows that an output reads; rows outside the input are padding."""
        for tap in self.taps:
            yield output * self.stride - self.before + tap


def reads_windows(node: Node, claims: Claims) -> bool:
    """Return whether a node reads rows of neighbours."""
    return any(read.rows for read in _reads(node, claims))


def _reads(node: Node, claims: Claims) -> list[Read]:
    return [claims.reads.get((node.name, index), OWN) for index in range(len(node.inputs))]


def judge_windows(seen: Seen, claims: Claims) -> str | None:
    """Return the problem with the rows of neighbouring blocks that a node reads, and with the claim of its result."""
    node = seen.node
    reads = _reads(node, claims)
    cut = [read for read in reads if read.rows and read.kind == "split"]
    if node.op not in OPERANDS or claims.batch is None or claims.batch % claims.instances:
        return "it reads rows of its neighbours, of which nothing is known"
    dim, *others = {read.dim for read in reads if read.rows}
    window = _window_of(node, dim, claims) if not others else None
    if window is None:
        return "the rows that its windows read are not known"
    count = claims.instances
    block, made = window.rows // count, window.outputs // count
    if window.rows % count or window.outputs % count:
        return f"{window.rows} rows and {window.outputs} windows do not lie on the same {count} blocks"
    of = dict(zip(OPERANDS[node.op].split(), reads, strict=True))
    if wrong := _filled(node, cut, window):
        return wrong
    for device in range(count):
        if wrong := _misread(of, window, device * block, device * made, block, made):
            return f"on device {device} {wrong}"
    return _made(node, seen.results[0], dim, block, made, claims)


def _filled(node: Node, cut: list[Read], window: _Window) -> str | None:
    """Return the problem with the value of padding rows: zeros, or the lowest number in a maximum."""
    for read in cut:
        if read.lowest and node.op not in MAXIMA:
            return "padding is the lowest number, and its op adds it up"
    pads = window.before or (window.outputs - 1) * window.stride - window.before + window.taps[-1] >= window.rows
    if pads and node.op.startswith("AvgPool"):
        return "padding is counted as rows of an average"
    if node.op in MAXIMA and any(not read.lowest for read in cut[:1]):
        return "padding is zero, and its op takes a maximum"
    return None


def _misread(of: dict[str, Read], window: _Window, row: int, output: int, block: int, made: int) -> str | None:
    """Return the problem with the rows that one device reads.

    Args:
        of: the reads of the input and the output.
        row: the first of `block` rows of the input.
        output: the first of `made` rows of the output.
    """
    x, y = of.get("x", of.get("s", OWN)), of.get("y", OWN)
    outputs = range(output, output + made)
    if y.rows:
        outputs = range(output + y.rows[0], output + y.rows[1])
    first, end = row + x.rows[0], row + x.rows[1]
    for local, one in enumerate(outputs):
        if local * window.stride != one * window.stride - window.before - first:
            return f"window {one} begins in row {one * window.stride - window.before}, and is laid on another one"
        if not all(first <= read < end for read in window.reads(one)):
            return f"window {one} reads beyond the rows from {first} to {end}"
    if (end - first - window.taps[-1] - 1) // window.stride + 1 != len(outputs):
        return f"there are other windows on rows {first} to {end} than {len(outputs)}"
    if y.rows:  # the gradient of an input needs all windows that contain its rows
        for one in range(window.outputs):
            if one not in outputs and any(row <= read < row + block for read in window.reads(one)):
                return f"window {one}, in which rows of its block are, is left out"
    return None


def _made(node: Node, claim: Claim, dim: int, block: int, made: int, claims: Claims) -> str | None:
    kinds = OPERANDS[node.op].split()
    if "Filter" in node.op:
        return None if claim[:3] == ("partial", 0, "sum") else f"result 0 is claimed {said(claim)}, and is a sum"
    rows = made if "y" not in kinds else block
    unit = (claims.batch or 0) // claims.instances
    size = claim.shape[dim] if claim.shape is not None else None
    is_right = claim[:2] == ("split", dim) and isinstance(size, tuple) and size[0] * unit == rows
    return None if is_right else f"result 0 is claimed {said(claim)}, and is {rows} rows of dimension {dim}"


def _window_of(node: Node, dim: int, claims: Claims) -> _Window | None:
    """Return the window of a node, from the claimed shapes."""
    first = 2 if bytes(node.attr("data_format", b"NHWC")).startswith(b"NC") else 1
    kinds, result = OPERANDS[node.op].split(), _sizes(node.output(), claims)
    known = {kind: _sizes(value, claims) for kind, value in zip(kinds, node.inputs, strict=True)}
    rows = (known["x"] if "x" in kinds else result)[dim]
    outputs = (known["y"] if "y" in kinds else result)[dim]
    if "Pool" in node.op:
        taps: range | None = range(node.attr("ksize")[dim])
    else:
        size, step = known.get("f", result)[dim - first], node.attr("dilations", (1, 1, 1, 1))[dim]
        taps = range(0, (size - 1) * step + 1, step) if size is not None else None
    if rows is None or outputs is None or not taps:
        return None
    stride, padding = node.attr("strides")[dim], node.attr("padding")
    before = 0
    if padding == b"SAME":
        before = max(0, (outputs - 1) * stride + taps[-1] + 1 - rows) // 2
    elif padding == b"EXPLICIT":
        before = node.attr("explicit_paddings")[2 * dim]
    return _Window(tuple(taps), stride, before, rows, outputs)


def _sizes(value: Value, claims: Claims) -> tuple[int | None, ...]:
    """Return the shape of a whole value, with None for unknown sizes."""
    dims = claims.values[value.name].shape or (None,) * 4
    sizes = tuple(whole(dim, claims.batch) for dim in dims)
    return tuple(size if isinstance(size, int) else None for size in sizes)


# In the program of one device, ops no longer pad along the dimension, and a block keeps its rows.


def unpadded(found: Node, node: Node, claims: Claims) -> str | None:
    """Return the problem with an op that still pads the dimension along which it reads rows of padding."""
    dims = {read.dim for read in _reads(node, claims) if read.rows}
    if not dims or found.attr("padding") == b"VALID":
        return None
    (dim,) = dims
    if found.attr("padding") == b"EXPLICIT" and not any(found.attr("explicit_paddings")[2 * dim : 2 * dim + 2]):
        return None
    return "pads rows that it reads with their padding"


def own_rows(kept: Node, wanted: Value, claims: Claims) -> str | None:
    """Return the problem with the rows that a device keeps, if it also computes rows of its neighbours."""
    claim, read = claims.values[wanted.name], claims.reads.get((wanted.node.name, 0), OWN)
    begin, size = (np.ravel(value.node.attr("value")).tolist() for value in kept.inputs[1:])
    unit = (claims.batch or 0) // claims.instances
    rows = claim.shape[claim.dim][0] * unit if claim.shape and isinstance(claim.shape[claim.dim], tuple) else None
    expected = [-read.rows[0] if i == claim.dim else 0 for i in range(len(begin))] if read.rows else None
    if begin != expected or size != [rows if i == claim.dim else -1 for i in range(len(size))]:
        return f"keeps other rows of '{wanted.name}' than its block"
    return None
