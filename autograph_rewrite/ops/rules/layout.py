"""Ops that only move elements: the result is split along the dimension that the split one becomes.

A reshape keeps a value split if the blocks stay contiguous; a shape operand that is computed from local sizes is
already local, a constant with the global size is converted to the size of the block (`LocalEntry`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import numpy as np

from autograph_rewrite.ops.facts.placement import LOCAL, PARTIAL, REPLICATED, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import (
    Dim,
    any_local,
    are_rows,
    divide,
    is_local,
    is_whole_of,
    local_entry,
    local_symbol,
    may_be_same,
    product,
    segments,
    times,
    to_global,
)
from autograph_rewrite.ops.rules.base import (
    LocalEntry,
    Op,
    Placed,
    Reshard,
    Rule,
    Semantics,
    Values,
    block_of,
    first_value,
    made_whole,
    whole,
)
from autograph_rewrite.ops.rules.kernels import array, by_kernel, flat


def _moving(place: Callable[[Op], Placed | None]) -> Callable[[Op], Placed]:
    """Extend a `place` for blocks (None: whole values) to contributions and zeros.

    An op that moves elements is linear: contributions stay if the other operands are replicated, and zeros stay zeros.
    """

    @wraps(place)
    def placed(n: Op) -> Placed:
        zero = (n.inputs[0].zero,) * len(n.output_dtypes)
        if n.placement(0).is_partial and all(fact.placement == REPLICATED for fact in n.inputs[1:]):
            return Placed((n.placement(0),) * len(zero), zero=zero)
        return (place(n) or whole(n))._replace(zero=zero)

    return placed


def place_reshape(n: Op) -> Placed | None:
    """Follow the split dimension through a reshape."""
    fact, target = n.inputs[0], n.value(1)
    if not fact.placement.is_split or fact.shape is None or target is None:
        return None
    found = reshape_split(fact.shape, fact.placement.dim, target, n.semantics)
    if found is None:
        return None
    dim, entry = found
    return Placed((split(dim),), {} if entry is None else {1: entry})


def reshape_split(
    shape: Shape, dim: int, target: Sequence[Dim], semantics: Semantics
) -> tuple[int, LocalEntry | None] | None:
    """Return the output dimension that holds the blocks, and the entry of a static target to make local.

    Blocks stay contiguous when the dimensions before the split one multiply to the same number on both sides.

    Args:
        shape: of the operand's block.
        target: entries of the shape operand; -1 where the op infers the size.
        semantics: for the extent of the batch and its blocks.
    """
    batch, infer = semantics.extent.units, semantics.extent.is_known
    before, inside = product(shape[:dim]), product(shape[dim:])
    ahead: Dim = 1
    for j, entry in enumerate(target):
        if ahead == before and ahead is not None:
            if entry == shape[dim] and not any_local(target[j + 1 :]):
                return j, None  # the dimension keeps its size, so the other entries must fit
            if segments(shape[dim]) and isinstance(entry, int) and entry == to_global(shape[dim], batch):
                return j, LocalEntry(j, shape[dim])
            block = _block(inside, entry, target[j + 1 :], batch)
            if is_local(block):
                static = isinstance(entry, int) and entry != -1
                return j, LocalEntry(j, block) if static else None
        ahead = times(ahead, _inferred(shape, target, batch) if entry == -1 and infer else entry)
    return None


def _inferred(shape: Shape, target: Sequence[Dim], batch: int | None) -> Dim:
    """Return the size that -1 stands for in the target of the whole value; None where it is not known."""
    others = [entry for entry in target if entry != -1]
    if any_local(others):  # a target of the blocks: the inferred size counts if it is equal in all of them
        left = divide(product(shape), product(others))
        return None if is_local(left) else left
    return divide(product([to_global(dim, batch) for dim in shape]), product(others))


def _block(inside: Dim, entry: Dim, behind: Sequence[Dim], batch: int | None) -> Dim:
    """Return the size of one block of a target entry, None where it would not hold whole blocks."""
    if entry == -1:
        return divide(inside, product(behind))
    block = entry
    if isinstance(entry, int):
        if not batch or entry % batch:
            return None
        block = times(entry // batch, local_symbol())
    known = product([dim for dim in behind if dim != -1])
    if -1 not in behind and are_rows(divide(inside, known), block):
        return block
    rest = divide(inside, block)  # the product of the later entries, one of which may be -1
    fits = divide(rest, known) is not None if -1 in behind else may_be_same(rest, known)
    return block if fits and rest is not None and not is_local(rest) else None


def shape_reshape(n: Op) -> tuple[Shape | None, ...]:
    """Return the target, with -1 computed from the number of elements."""
    shape, target = n.shape(0), n.value(1)
    if target is None:
        return (None,)
    if -1 not in target:
        return (tuple(target),)
    rest = product([d for d in target if d != -1])
    missing = divide(product(shape), rest) if shape is not None else None
    return (tuple(missing if d == -1 else d for d in target),)


def place_transpose(n: Op) -> Placed | None:
    """Move the split dimension with the permutation."""
    order = n.ints(1)
    if not n.placement(0).is_split or order is None:
        return None
    return Placed((split(order.index(n.placement(0).dim)),))


def shape_transpose(n: Op) -> tuple[Shape | None, ...]:
    """Permute the sizes."""
    shape, order = n.shape(0), n.ints(1)
    return (None,) if shape is None or order is None else (tuple(shape[i] for i in order),)


def _expand_axis(n: Op) -> int | None:
    axis, rank = n.ints(1), n.rank(0)
    return None if axis is None or rank is None else axis[0] % (rank + 1)


def place_expand_dims(n: Op) -> Placed | None:
    """Insert a dimension."""
    axis, placement = _expand_axis(n), n.placement(0)
    if not placement.is_split or axis is None:
        return None
    return Placed((split(placement.dim + (axis <= placement.dim)),))


def shape_expand_dims(n: Op) -> tuple[Shape | None, ...]:
    """Insert a 1."""
    axis, shape = _expand_axis(n), n.shape(0)
    return (None,) if axis is None or shape is None else ((*shape[:axis], 1, *shape[axis:]),)


def _squeezed(n: Op) -> frozenset[int] | None:
    shape, wanted = n.shape(0), n.attr("squeeze_dims") or ()
    if shape is None:
        return None
    if not wanted:
        # Without names the kernel drops every dimension that is 1 at run time, perhaps a block of one example.
        return frozenset(i for i, d in enumerate(shape) if d == 1) if all(isinstance(d, int) for d in shape) else None
    return frozenset(axis % len(shape) for axis in wanted)


def place_squeeze(n: Op) -> Placed | None:
    """Drop dimensions of size 1."""
    dropped, placement = _squeezed(n), n.placement(0)
    if not placement.is_split or dropped is None or placement.dim in dropped:
        return None
    return Placed((split(placement.dim - sum(a < placement.dim for a in dropped)),))


def shape_squeeze(n: Op) -> tuple[Shape | None, ...]:
    """Remove the dropped dimensions."""
    dropped, shape = _squeezed(n), n.shape(0)
    return (None,) if dropped is None or shape is None else (tuple(d for i, d in enumerate(shape) if i not in dropped),)


def place_broadcast_to(n: Op) -> Placed | None:
    """A target with a local size makes a split value; otherwise the split dimension keeps its size."""
    placement, shape, target = n.placement(0), n.shape(0), n.value(1)
    if shape is None or target is None:
        return None
    offset = len(target) - len(shape)
    if n.inputs[1].is_local:
        at = local_entry(target)
        if at is None:
            return None
        if placement.is_split and placement.dim + offset == at and are_rows(n.inputs[0].split_size, target[at]):
            return Placed((split(at),))
        if at < offset or shape[at - offset] == 1:
            return Placed((split(at),), made_whole(n, 0))
        block, batch = block_of(at - offset, target[at]), n.semantics.extent.units
        if block is None or not is_whole_of(to_global(shape[at - offset], batch), target[at], batch):
            return None
        return Placed((split(at),), {0: block})
    if placement.is_split:
        at, size = placement.dim + offset, n.inputs[0].split_size
        if target[at] == to_global(size, n.semantics.extent.units) and isinstance(target[at], int):
            return Placed((split(at),), {1: LocalEntry(at, size)})
    return None


def stated_shape(n: Op, index: int) -> Shape | None:
    """Return the contents of a shape operand, with None for an unknown size; None where the rank is unknown."""
    value = n.value(index)
    return None if value is None or n.shape(index) == () else tuple(None if dim == -1 else dim for dim in value)


def place_tile(n: Op) -> Placed | None:
    """Repeat elements: a size of 1 times a local number becomes split; a split dimension must not be repeated."""
    placement, shape, repeats = n.placement(0), n.shape(0), n.value(1)
    if shape is None or repeats is None:
        return None
    at = local_entry(repeats)
    if at is not None and shape[at] == 1:
        return Placed((split(at),), made_whole(n, 0))
    if placement.is_split and not n.inputs[1].is_local and repeats[placement.dim] == 1:
        return Placed((placement,))
    return None


def shape_tile(n: Op) -> tuple[Shape | None, ...]:
    """Multiply the sizes."""
    shape, repeats = n.shape(0), n.value(1)
    if shape is None or repeats is None:
        return (None,)
    return (tuple(times(a, b) for a, b in zip(shape, repeats, strict=True)),)


def place_fill(n: Op) -> Placed:
    """A shape with a local size makes a split value."""
    at = local_entry(n.value(0)) if n.placement(0) == LOCAL else None
    placed = whole(n) if at is None else Placed((split(at),), made_whole(n, 1))
    return placed._replace(zero=(n.inputs[1].zero,))


def align_pieces(n: Op, pieces: Sequence[int], dim: int, size: Dim) -> dict[int, Reshard] | None:
    """Return the conversions that split equally shaped pieces along `dim`; None if blocks cannot be computed.

    Args:
        size: of the block along `dim`.
    """
    block = block_of(dim, size)
    others = [i for i in pieces if n.placement(i) != split(dim) or not are_rows(n.inputs[i].split_size, size)]
    if block is None:
        return None if others else {}
    return dict.fromkeys(others, block)


def join_pieces(n: Op, pieces: Sequence[int]) -> tuple[Placement, dict[int, Reshard]] | None:
    """Return the common placement of pieces that are stacked or concatenated, and the conversions to it."""
    placements = [n.placement(i) for i in pieces]
    first = next((i for i in pieces if n.placement(i).is_split), None)
    if first is not None:
        operand_reshards = align_pieces(n, pieces, n.placement(first).dim, n.inputs[first].split_size)
        return None if operand_reshards is None else (n.placement(first), operand_reshards)
    if PARTIAL in placements and set(placements) <= {PARTIAL, REPLICATED}:
        return PARTIAL, {i: PARTIAL for i in pieces if n.placement(i) == REPLICATED and not n.inputs[i].zero}
    return None


def value_transpose(n: Op) -> Values | None:
    """Transpose a matrix of sizes, such as repeats next to dimensions in the gradient of a tile."""
    known, order = array(n, 0), n.ints(1)
    return None if known is None or order is None else (flat(np.transpose(known, order)),)


RULES: dict[str, Rule] = {
    "Reshape": Rule(_moving(place_reshape), shape_reshape, first_value),
    "Transpose": Rule(_moving(place_transpose), shape_transpose, value_transpose),
    "ConjugateTranspose": Rule(_moving(place_transpose), shape_transpose),
    "ExpandDims": Rule(_moving(place_expand_dims), shape_expand_dims, first_value),
    "Squeeze": Rule(_moving(place_squeeze), shape_squeeze, first_value),
    "BroadcastTo": Rule(_moving(place_broadcast_to), lambda n: (stated_shape(n, 1),)),
    "Tile": Rule(_moving(place_tile), shape_tile),
    "Fill": Rule(place_fill, lambda n: (stated_shape(n, 0),), by_kernel),
}
