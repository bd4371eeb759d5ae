"""Places ops on blocks of rows or columns of images, which read rows of neighbouring blocks (halo exchange).

    Conv2D(x: split(1), f)          reads a halo of x             -> split(1)
    Conv2DBackpropInput(., f, dy)   reads a halo of dy            -> split(1)
    Conv2DBackpropFilter(x, ., dy)  reads a halo of x             -> partial
    MaxPoolGrad(x, y, dy)           reads halos of all            -> split(1)

Only where blocks have known sizes (`Extent.is_known`), and rows of input and output can be counted in the same
units; otherwise the op works on whole images, with a note.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import local_symbol, to_global, unit
from autograph_rewrite.ops.facts.windows import NEIGHBOURS, READ, READERS, Halo, Window
from autograph_rewrite.ops.rules.base import LocalEntry, Op, Placed, Reshard, Rule, Slice, whole
from autograph_rewrite.ops.rules.signature import Placer
from autograph_rewrite.ops.traits import has

X, Y, X_SIZES, FILTER, FILTER_SIZES = "x", "y", "x_sizes", "filter", "filter_sizes"
"""Roles of operands: a value of the input's or the output's shape, the shape of the input, the filter, its shape."""


def windowed(rule: Rule, operands: tuple[str, ...], output: str, *, lowest: bool = False) -> Rule:
    """Return the rule of an op with a window, which splits rows and columns, too.

    Args:
        rule: for every other split.
        lowest: the op takes maxima, so padding must be the lowest number.
    """

    def place(n: Op) -> Placed | None:
        dim = _cut(n, operands)
        return rule.place(n) if dim is None else _place(n, operands, output, dim, lowest=lowest)

    def shape(n: Op) -> tuple[Shape | None, ...]:
        assert rule.shape is not None
        dim = _cut(n, operands)
        stated = rule.shape(n)
        window = None if dim is None else window_of(n, operands, dim)
        if dim is None or window is None or output not in (X, Y) or stated[0] is None or not n.semantics.extent.units:
            return stated
        rows = (window.rows if output == X else window.outputs) // n.semantics.extent.units
        return ((*stated[0][:dim], local_symbol()._replace(coef=rows), *stated[0][dim + 1 :]),)

    place.__doc__ = rule.place.describe.__doc__ if isinstance(rule.place, Placer) else rule.place.__doc__
    return rule._replace(place=place, shape=shape)


def _cut(n: Op, operands: tuple[str, ...]) -> int | None:
    """Return the dimension of a window that the images are split along; None where there is none."""
    if not n.semantics.extent.is_known:
        return None
    first = _first(n)
    for fact, role in zip(n.inputs, operands, strict=True):
        if role in (X, Y) and fact.placement.is_split and fact.placement.dim in (first, first + 1):
            return fact.placement.dim
    return None


def _first(n: Op) -> int:
    """Return the first dimension that windows slide along."""
    return 2 if n.attr("data_format", b"NHWC").startswith(b"NC") else 1


def _place(n: Op, operands: tuple[str, ...], output: str, dim: int, *, lowest: bool) -> Placed:
    window, other = window_of(n, operands, dim), window_of(n, operands, 2 * _first(n) + 1 - dim)
    problem = _problem(n, window, other)
    if window is None or other is None or problem:
        return whole(n)._replace(note=problem)
    units = n.semantics.extent.units or 1
    rows, outputs = window.rows // units, window.outputs // units

    def halo(reads: str) -> Halo:
        return Halo(window, rows, outputs, reads, (other.before, other.after), lowest and reads != READERS)

    of_input = output == X
    wants: dict[int, Reshard] = {}
    for i, role in enumerate(operands):
        if role == X:
            wants[i] = Slice(dim, rows, halo=halo(NEIGHBOURS if of_input else READ))
        elif role == Y:
            wants[i] = Slice(dim, outputs, halo=halo(READERS) if of_input else None)
        elif role == X_SIZES:
            wants[i] = LocalEntry(dim, local_symbol()._replace(coef=rows), halo(NEIGHBOURS))
        elif n.placement(i).differs:
            wants[i] = REPLICATED
    placement: Placement = PARTIAL if output == FILTER else split(dim)
    return Placed((placement,), {i: want for i, want in wants.items() if not _is_there(n, i, want)})


def _is_there(n: Op, index: int, want: Reshard) -> bool:
    """Return whether an operand already has the wanted placement, without rows of neighbours."""
    fact = n.inputs[index]
    if not isinstance(want, Slice) or want.halo is not None:
        return False
    return fact.placement == split(want.dim) and unit(fact.split_size) == want.unit


def _problem(n: Op, window: Window | None, other: Window | None) -> str:
    """Return why an op with a window cannot work on blocks, "" where it can."""
    if window is None or other is None:
        return f"{n.op} reads rows of neighbouring blocks, and its sizes are not known"
    units = n.semantics.extent.units or 1
    if window.rows % units or window.outputs % units or not window.outputs:
        return f"{n.op} makes {window.outputs} rows of {window.rows}, which do not lie on the same {units} blocks"
    if (window.is_padded or other.is_padded) and not has(n.op, "pads_blocks"):
        return f"{n.op} pads its input, which blocks of it cannot be"
    if max(window.before, window.after) >= window.size:
        return f"{n.op} has windows that lie in the padding only"
    return ""


def window_of(n: Op, operands: tuple[str, ...], dim: int) -> Window | None:
    """Return the window of a node along a dimension, None where a size is not known."""
    rows, size = _known(n, operands, X, X_SIZES, dim), _size(n, operands, dim)
    if rows is None or size is None or n.attr("padding") not in (b"SAME", b"VALID", b"EXPLICIT"):
        return None
    stride = n.attr("strides")[dim]
    if n.attr("padding") == b"SAME":
        outputs = -(-rows // stride)
        return Window(size, stride, max(0, (outputs - 1) * stride + size - rows) // 2, rows, outputs)
    paddings = n.attr("explicit_paddings", ()) if n.attr("padding") == b"EXPLICIT" else ()
    before, after = paddings[2 * dim : 2 * dim + 2] or (0, 0)
    return Window(size, stride, before, rows, max(0, (rows + before + after - size) // stride + 1))


def _size(n: Op, operands: tuple[str, ...], dim: int) -> int | None:
    """Return how many rows a window spans."""
    if FILTER not in operands and FILTER_SIZES not in operands:
        return int(n.attr("ksize")[dim])
    taps = _known(n, operands, FILTER, FILTER_SIZES, dim - _first(n))
    return None if taps is None else (taps - 1) * n.attr("dilations", (1, 1, 1, 1))[dim] + 1


def _known(n: Op, operands: tuple[str, ...], value: str, sizes: str, dim: int) -> int | None:
    """Return a size of the whole value, from the operand with the value or with its shape."""
    for i, role in enumerate(operands):
        dims = n.value(i) if role == sizes else n.shape(i) if role == value else None
        if dims is not None and len(dims) == 4:
            size = to_global(dims[dim], n.semantics.extent.units)
            return size if isinstance(size, int) else None
    return None
