"""Sizes: integers that come from shapes, interpreted symbolically instead of being placed.

`Shape` of a split value gives `[b, 16]`; `Prod`, `Pack`, `StridedSlice` and the like carry it along. What leaves the
form "constant times symbols" (b - 1, max(b, 8)) has no value here, and the engine makes it global first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from autograph_rewrite.ops.facts.placement import Axes, Shape
from autograph_rewrite.ops.facts.symbolic_dims import (
    Dim,
    Sym,
    are_rows,
    broadcast,
    divide,
    is_local,
    product,
    times,
    to_global,
)
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, whole
from autograph_rewrite.ops.traits import ops_with

Array = npt.NDArray[np.object_]
Values = tuple[tuple[Dim, ...] | None, ...]


def array(n: Op, index: int) -> Array | None:
    """Return the known contents of an input with its static shape, or None."""
    value, shape = n.value(index), n.shape(index)
    if value is None or shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    flat = np.empty(len(value), dtype=object)
    for i, entry in enumerate(value):
        flat[i] = entry
    return flat.reshape([dim for dim in shape if isinstance(dim, int)])


def arrays(n: Op) -> list[Array] | None:
    """Return the contents of all inputs, or None if one is not known."""
    found = [array(n, i) for i in range(len(n.inputs))]
    return None if any(a is None for a in found) else [a for a in found if a is not None]


def flat(values: Array | Sequence[Dim]) -> tuple[Dim, ...]:
    """Return contents as a fact's value."""
    return tuple(np.ravel(np.asarray(values, dtype=object)).tolist())


def ints(values: Array) -> list[int] | None:
    """Return contents as plain integers, or None if one is symbolic."""
    listed = np.ravel(values).tolist()
    return listed if all(isinstance(v, int) for v in listed) else None


def _elementwise(a: Array, b: Array, function: Callable[[Dim, Dim], Dim]) -> tuple[Dim, ...]:
    # Sym is a tuple, which numpy would take apart: apply by hand over broadcast object arrays.
    left, right = np.broadcast_arrays(a, b)
    return tuple(function(x, y) for x, y in zip(left.ravel().tolist(), right.ravel().tolist(), strict=True))


def _add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0:
        return b
    if b == 0:
        return a
    if isinstance(a, Sym) and isinstance(b, Sym) and a.factors == b.factors:
        return Sym(a.coef + b.coef, a.factors)
    return None


def _subtract(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if b == 0:
        return a
    return 0 if a == b and a is not None else None


def _maximum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    for size, other in ((a, b), (b, a)):
        if isinstance(size, Sym) and (other == size or (isinstance(other, int) and other <= 1)):
            return size  # a size is at least 1, or the value that it divides is empty
    return None


def _minimum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return a if a == b else None


def _floor_div(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else None
    return divide(a, b)


def _truncated_div(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        # Towards zero, as Div of integers does; sizes themselves are never negative.
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else None
    return divide(a, b)


def _floor_mod(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else None
    return 0 if divide(a, b) is not None else None


_BINARY: dict[str, Callable[[Dim, Dim], Dim]] = {
    "Mul": times, "Add": _add, "AddV2": _add, "Sub": _subtract, "Maximum": _maximum, "Minimum": _minimum,
    "FloorDiv": _floor_div, "FloorMod": _floor_mod, "Div": _truncated_div, "TruncateDiv": _truncated_div,
}  # fmt: skip
SIZE_ARITHMETIC = tuple(_BINARY)
"""Elementwise ops that also compute sizes."""


def value_binary(n: Op) -> Values | None:
    """Interpret integer arithmetic."""
    known = arrays(n)
    if known is None:
        return None
    try:
        return (_elementwise(known[0], known[1], _BINARY[n.op]),)
    except ValueError:  # shapes that do not broadcast: TensorFlow will say so itself
        return None


def reduce_sizes(n: Op) -> Values | None:
    """Interpret Prod, Sum, Max and Min of a vector of sizes."""
    vector, axis = array(n, 0), array(n, 1)
    if vector is None or axis is None or vector.ndim > 1:
        return None
    entries = np.ravel(vector).tolist()
    if axis.size == 0:
        return (flat(vector),)
    functions: dict[str, Callable[[Dim, Dim], Dim]] = {"Sum": _add, "Max": _maximum, "Min": _minimum}
    if n.op == "Prod":
        return ((product(entries),),)
    if n.op not in functions or (not entries and n.op != "Sum"):
        return None
    combined: Dim = entries[0] if entries else 0
    for entry in entries[1:]:
        combined = functions[n.op](combined, entry)
    return ((combined,),)


def value_shape(n: Op) -> Values | None:
    """Shape and ShapeN: one entry per dimension."""
    return tuple(fact.shape for fact in n.inputs)


def value_size(n: Op) -> Values | None:
    """Size: the product of the shape."""
    shape = n.shape(0)
    return None if shape is None else ((product(shape),),)


def value_rank(n: Op) -> Values | None:
    """Rank: a plain integer whatever the sizes."""
    rank = n.rank(0)
    return None if rank is None else ((rank,),)


def place_shape(n: Op) -> Placed:
    """A shape needs no conversion of what it measures, unless its rank is unknown."""
    return whole(n)


def shape_of_shape(n: Op) -> tuple[Shape | None, ...]:
    """Vectors as long as the rank; scalars for Size and Rank."""
    if n.op in ("Size", "Rank"):
        return ((),)
    return tuple(None if fact.shape is None else (len(fact.shape),) for fact in n.inputs)


def broadcast_gradient_axes(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Axes, Axes]:
    """Return the dimensions over which the gradient of a broadcast op is summed for each operand.

    Where only the run knows them, TensorFlow's kernel also lists dimensions that are 1 on both sides.
    """
    rank = max(len(a), len(b))
    left: list[Dim] = [*[1] * (rank - len(a)), *a]
    right: list[Dim] = [*[1] * (rank - len(b)), *b]
    found = _stretched(left, right), _stretched(right, left)
    if all(axes.sure == axes.possible for axes in found):
        return found
    both = frozenset(i for i, pair in enumerate(zip(left, right, strict=True)) if not any(map(_is_more, pair)))
    return found[0]._replace(possible=found[0].possible | both), found[1]._replace(possible=found[1].possible | both)


def _is_more(size: Dim) -> bool:
    """Return whether a size is known not to be 1."""
    return isinstance(size, int) and size != 1


def _stretched(mine: Sequence[Dim], others: Sequence[Dim]) -> Axes:
    """Return where an operand is stretched: where it is 1, and perhaps where its size is open."""
    pairs = list(enumerate(zip(mine, others, strict=True)))
    sure = frozenset(i for i, (size, _) in pairs if size == 1)
    open_ = {i for i, (size, other) in pairs if not isinstance(size, int) and other != 1 and not are_rows(size, other)}
    return Axes(sure, sure | open_)


def _global(sizes: Sequence[Dim] | None, batch: int | None) -> tuple[Dim, ...] | None:
    return None if sizes is None else tuple(to_global(size, batch) for size in sizes)


def value_broadcast_gradient_args(n: Op) -> Values | None:
    """Interpret BroadcastGradientArgs."""
    found = [axes for axes in axes_of_broadcast_gradient(n) if axes is not None]
    if len(found) < 2:
        return None
    return tuple(tuple(sorted(axes.sure)) if axes.sure == axes.possible else None for axes in found)


def axes_of_broadcast_gradient(n: Op) -> tuple[Axes | None, ...]:
    """Tell which dimensions BroadcastGradientArgs names for each operand."""
    a, b = (_global(n.value(i), n.semantics.extent.units) for i in (0, 1))
    if a is None or b is None:
        return (None, None)
    nothing = Axes(frozenset(), frozenset())
    return (nothing, nothing) if a == b and None not in a else broadcast_gradient_axes(a, b)  # as the kernel does


def place_broadcast_gradient_args(n: Op) -> Placed:
    """Two vectors of dimensions, the same for all blocks; where the run decides, rows have no part in it."""
    is_open = any(axes is not None and axes.sure != axes.possible for axes in axes_of_broadcast_gradient(n))
    rows = rows_of_operands(n.value(0) or (), n.value(1) or ())
    return whole(n)._replace(decompose=is_open and any(map(any, rows)))


def rows_of_operands(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[list[bool], list[bool]]:
    """Return which entries of two shapes that broadcast count rows of a block, in both or against a 1."""

    def rows(mine: Sequence[Dim], others: Sequence[Dim]) -> list[bool]:
        missing = len(mine) - len(others)
        aligned = [*[1] * missing, *others] if missing > 0 else others[-len(mine) :] if mine else ()
        return [is_local(x) and (y == 1 or is_local(y)) for x, y in zip(mine, aligned, strict=True)]

    return rows(a, b), rows(b, a)


def shape_of_axes(n: Op) -> tuple[Shape | None, ...]:
    """Two vectors whose lengths follow from their contents."""
    value = value_broadcast_gradient_args(n)
    return (None, None) if value is None else tuple((len(v),) if v is not None else None for v in value)


def value_broadcast_args(n: Op) -> Values | None:
    """Interpret BroadcastArgs: the broadcast of two shape vectors."""
    a, b = n.value(0), n.value(1)
    if a is None or b is None:
        return None
    return (broadcast([a, b]),)


def shape_longest(n: Op) -> tuple[Shape | None, ...]:
    """A vector as long as the longer operand."""
    a, b = n.value(0), n.value(1)
    return (None,) if a is None or b is None else ((max(len(a), len(b)),),)


MOST_KNOWN = 2**12
"""Elements of a vector whose contents are followed: sizes, axes, positions."""


def value_range(n: Op) -> Values | None:
    """Interpret Range over plain integers."""
    known = arrays(n)
    limits = [ints(a) for a in known] if known is not None else [None]
    if any(limit is None for limit in limits):
        return None
    start, stop, step = (limit[0] for limit in limits if limit is not None)
    numbers = range(start, stop, step) if step else range(0)
    return (tuple(numbers),) if step and len(numbers) <= MOST_KNOWN else None


def shape_range(n: Op) -> tuple[Shape | None, ...]:
    """A vector; its length is known where its contents are, or where it counts from 0 by what goes into the limit."""
    value = value_range(n)
    if value is not None and value[0] is not None:
        return ((len(value[0]),),)
    start, stop, step = (n.value(i) for i in range(3))
    counts = start == (0,) and stop is not None and step is not None and isinstance(step[0], int) and step[0] > 0
    return ((divide(stop[0], step[0]),),) if counts and stop is not None and step is not None else ((None,),)


def value_invert_permutation(n: Op) -> Values | None:
    """Interpret InvertPermutation."""
    order = n.ints(0)
    return None if order is None else (tuple(int(i) for i in np.argsort(order)),)


def value_dynamic_stitch(n: Op) -> Values | None:
    """Interpret DynamicStitch of sizes by known indices."""
    known = arrays(n)
    if known is None:
        return None
    half = len(known) // 2
    merged: dict[int, Dim] = {}
    for index, data in zip(known[:half], known[half:], strict=True):
        places = ints(index)
        if places is None or index.size != data.size:
            return None
        merged.update(zip(places, np.ravel(data).tolist(), strict=True))
    return (tuple(merged[i] for i in range(len(merged))),) if sorted(merged) == list(range(len(merged))) else None


def shape_dynamic_stitch(n: Op) -> tuple[Shape | None, ...]:
    """One row per distinct index where the indices are known."""
    half = len(n.inputs) // 2
    index = [n.ints(i) for i in range(half)]
    data, first = n.shape(half), n.shape(0)
    if any(i is None for i in index) or data is None or first is None:
        return (n.static[0],)
    rows = max((max(i) for i in index if i), default=-1) + 1
    return ((rows, *data[len(first) :]),)


def value_concat_offset(n: Op) -> Values | None:
    """Interpret ConcatOffset: where each piece starts along the concatenated dimension."""
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
        offset = _add(offset, shape[at])
    counts = any(is_local(entry) for entries in result for entry in entries)
    return tuple(result) if not counts or _are_alike(known, at) else None


def _are_alike(shapes: Sequence[Sequence[Dim]], at: int) -> bool:
    """Return whether pieces have blocks along the same dimensions but `at`, as the kernel compares them."""
    columns = [column for i, column in enumerate(zip(*shapes, strict=True)) if i != at]
    return all(len(set(column)) == 1 for column in columns if any(map(is_local, column)))


def shape_concat_offset(n: Op) -> tuple[Shape | None, ...]:
    """Vectors like the given shapes."""
    return tuple(n.shape(i) for i in range(1, len(n.inputs)))


def shape_vector_same(n: Op) -> tuple[Shape | None, ...]:
    """The shape of the first input."""
    return (n.shape(0),)


RULES = {op: Rule(place_shape, shape_of_shape, value_shape, "sizes") for op in ops_with("shapes")} | {
    "Size": Rule(place_shape, shape_of_shape, value_size, "sizes"),
    "Rank": Rule(place_shape, shape_of_shape, value_rank, "sizes"),
    "BroadcastGradientArgs": Rule(
        place_broadcast_gradient_args,
        shape_of_axes,
        value_broadcast_gradient_args,
        "sizes",
        axes=axes_of_broadcast_gradient,
    ),
    "BroadcastArgs": Rule(whole, shape_longest, value_broadcast_args, "sizes"),
    "Range": Rule(whole, shape_range, value_range, "sizes"),
    "InvertPermutation": Rule(whole, shape_vector_same, value_invert_permutation, "sizes"),
    "DynamicStitch": Rule(whole, shape_dynamic_stitch, value_dynamic_stitch, "sizes"),
    "ParallelDynamicStitch": Rule(whole, shape_dynamic_stitch, value_dynamic_stitch, "sizes"),
    "ConcatOffset": Rule(whole, shape_concat_offset, value_concat_offset, "sizes"),
}
