"""Sizes: integers from shapes, which rules evaluate symbolically instead of placing them.

`Shape` of a split value gives `[b, 16]`; `Prod`, `Pack`, `StridedSlice` and similar ops compute with it. A result that
is not a constant times symbols (b - 1, max(b, 8)) has no value here; propagation makes its operands global first.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ops.facts.placement import Axes, Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim, are_rows, broadcast, divide, is_local, product, to_global
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, Values, like_first, scalar, whole
from autograph_rewrite.ops.rules.kernels import add, by_kernel
from autograph_rewrite.ops.traits import ops_with


def value_shape(n: Op) -> Values | None:
    """Return the shape of each operand."""
    return tuple(fact.shape for fact in n.inputs)


def value_size(n: Op) -> Values | None:
    """Return the product of the shape."""
    shape = n.shape(0)
    return None if shape is None else ((product(shape),),)


def shape_of_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return vectors as long as the ranks of the operands."""
    return tuple(None if fact.rank is None else (fact.rank,) for fact in n.inputs)


def place_shape(n: Op) -> Placed:
    """Return sizes of the operand, which is not converted unless its rank is unknown."""
    return whole(n)


def broadcast_gradient_axes(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Axes, Axes]:
    """Return the dimensions over which the gradient of a broadcast op is summed for each operand.

    If sizes are known at run time only, TensorFlow's kernel also lists dimensions that are 1 on both sides.
    """
    rank = max(len(a), len(b))
    left: list[Dim] = [*[1] * (rank - len(a)), *a]
    right: list[Dim] = [*[1] * (rank - len(b)), *b]
    found = _stretched(left, right), _stretched(right, left)
    if all(axes.sure == axes.possible for axes in found):
        return found
    pairs = enumerate(zip(left, right, strict=True))
    both = frozenset(i for i, pair in pairs if all(not isinstance(size, int) or size == 1 for size in pair))
    return found[0]._replace(possible=found[0].possible | both), found[1]._replace(possible=found[1].possible | both)


def _stretched(mine: Sequence[Dim], others: Sequence[Dim]) -> Axes:
    """Return where an operand is stretched: surely along dimensions of size 1, possibly along those of open size."""
    pairs = list(enumerate(zip(mine, others, strict=True)))
    sure = frozenset(i for i, (size, _) in pairs if size == 1)
    open_ = {i for i, (size, other) in pairs if not isinstance(size, int) and other != 1 and not are_rows(size, other)}
    return Axes(sure, sure | open_)


def value_broadcast_gradient_args(n: Op) -> Values | None:
    """Return the axes that BroadcastGradientArgs names, where they are known."""
    found = [axes for axes in axes_of_broadcast_gradient(n) if axes is not None]
    if len(found) < 2:
        return None
    return tuple(tuple(sorted(axes.sure)) if axes.sure == axes.possible else None for axes in found)


def axes_of_broadcast_gradient(n: Op) -> tuple[Axes | None, ...]:
    """Return bounds on the axes that BroadcastGradientArgs names."""
    if n.value(0) is None or n.value(1) is None:
        return (None, None)
    a, b = (tuple(to_global(size, n.semantics.extent.units) for size in n.value(i) or ()) for i in (0, 1))
    nothing = Axes(frozenset(), frozenset())
    return (nothing, nothing) if a == b and None not in a else broadcast_gradient_axes(a, b)  # as the kernel does


def place_broadcast_gradient_args(n: Op) -> Placed:
    """Return the same dimensions for all blocks; where only the run knows them, rows of blocks are left out."""
    is_open = any(axes is not None and axes.sure != axes.possible for axes in axes_of_broadcast_gradient(n))
    rows = rows_of_operands(n.value(0) or (), n.value(1) or ())
    return whole(n)._replace(decompose=is_open and any(map(any, rows)))


def rows_of_operands(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[list[bool], list[bool]]:
    """Return which entries of two shapes that broadcast count rows of a block, against rows or a 1."""

    def rows(mine: Sequence[Dim], others: Sequence[Dim]) -> list[bool]:
        missing = len(mine) - len(others)
        aligned = [*[1] * missing, *others] if missing > 0 else others[-len(mine) :] if mine else ()
        return [is_local(x) and (y == 1 or is_local(y)) for x, y in zip(mine, aligned, strict=True)]

    return rows(a, b), rows(b, a)


def shape_of_axes(n: Op) -> tuple[Shape | None, ...]:
    """Return the lengths of the two vectors."""
    value = value_broadcast_gradient_args(n)
    return (None, None) if value is None else tuple((len(v),) if v is not None else None for v in value)


def value_broadcast_args(n: Op) -> Values | None:
    """Return the broadcast of two shape vectors."""
    a, b = n.value(0), n.value(1)
    return None if a is None or b is None else (broadcast([a, b]),)


def shape_longest(n: Op) -> tuple[Shape | None, ...]:
    """Return a vector as long as the longer operand."""
    a, b = n.value(0), n.value(1)
    return (None,) if a is None or b is None else ((max(len(a), len(b)),),)


def shape_range(n: Op) -> tuple[Shape | None, ...]:
    """Return a vector; its length is known if its contents are, or if it starts at 0 and the step divides the limit."""
    value = by_kernel(n)
    if value is not None and value[0] is not None:
        return ((len(value[0]),),)
    start, stop, step = (n.value(i) for i in range(3))
    counts = start == (0,) and stop is not None and step is not None and isinstance(step[0], int) and step[0] > 0
    return ((divide(stop[0], step[0]),),) if counts and stop is not None and step is not None else ((None,),)


def shape_dynamic_stitch(n: Op) -> tuple[Shape | None, ...]:
    """Return one row for each index up to the largest, where the indices are known."""
    half = len(n.inputs) // 2
    index = [n.ints(i) for i in range(half)]
    data, first = n.shape(half), n.shape(0)
    if any(i is None for i in index) or data is None or first is None:
        return (n.static[0],)
    rows = max((max(i) for i in index if i), default=-1) + 1
    return ((rows, *data[len(first) :]),)


def value_concat_offset(n: Op) -> Values | None:
    """Return the start of each piece along the concatenated dimension (ConcatOffset)."""
    axis = n.ints(0)
    shapes = [n.value(i) for i in range(1, len(n.inputs))]
    if axis is None or any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    at = axis[0] % len(known[0]) if known[0] else 0
    offset: Dim = 0
    result: list[tuple[Dim, ...]] = []
    for shape in known:
        result.append(tuple(offset if i == at else 0 for i in range(len(shape))))
        offset = add(offset, shape[at])
    counts = any(is_local(entry) for entries in result for entry in entries)
    return tuple(result) if not counts or _are_alike(known, at) else None


def _are_alike(shapes: Sequence[Sequence[Dim]], at: int) -> bool:
    """Return whether pieces have equal block sizes in all dimensions but `at`: the kernel refuses unequal ones."""
    columns = [column for i, column in enumerate(zip(*shapes, strict=True)) if i != at]
    return all(len(set(column)) == 1 for column in columns if any(map(is_local, column)))


RULES = {op: Rule(place_shape, shape_of_shape, value_shape) for op in ops_with("shapes")} | {
    "Size": Rule(place_shape, scalar, value_size),
    "Rank": Rule(place_shape, scalar, lambda n: None if n.rank(0) is None else ((n.rank(0),),)),
    "BroadcastGradientArgs": Rule(
        place_broadcast_gradient_args, shape_of_axes, value_broadcast_gradient_args, axes=axes_of_broadcast_gradient
    ),
    "BroadcastArgs": Rule(whole, shape_longest, value_broadcast_args),
    "Range": Rule(whole, shape_range, by_kernel),
    "InvertPermutation": Rule(whole, like_first, by_kernel),
    "DynamicStitch": Rule(whole, shape_dynamic_stitch, by_kernel),
    "ParallelDynamicStitch": Rule(whole, shape_dynamic_stitch, by_kernel),
    "ConcatOffset": Rule(whole, lambda n: tuple(fact.shape for fact in n.inputs[1:]), value_concat_offset),
}
