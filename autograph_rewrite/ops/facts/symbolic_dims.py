"""Computes with symbolic sizes: a constant times unknown factors, such as `32*b` for 32 rows per example.

`b` is the number of examples in this replica's block, `B` in the whole batch. A size that contains `b` differs between
replicas. Every other symbol, such as `T:x/1` for an open dimension of x, has one value everywhere: equal symbols are
equal sizes. Sizes outside this form (b - 1, max(b, 8)) are None: unknown.

`b/3,2` is the size of a shard of a variable: 3 on the first replica, 2 on the second.

`b[1,2]` is the size of a block with segments: one row of a first part for each example, then two rows of a second part
for each. It differs from `3*b`, because the rows are not in the same order; the size of the whole is `3*B` for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from autograph_rewrite.ir.claims import SEGMENTS, SHARDS, segment_rows, sizes_of_shards

LOCAL_MARK = "b"
BLOCK = "b"
BATCH = "B"
COMMON = "T"


class Sym(NamedTuple):
    """`coef` times the product of `factors` (sorted, at least one)."""

    coef: int
    factors: tuple[str, ...]

    def __repr__(self) -> str:
        product = "*".join(self.factors)
        return product if self.coef == 1 else f"{self.coef}*{product}"


def read_symbol(text: str) -> Sym:
    """Parse a printed size, `2*b`."""
    first, *others = text.split("*")
    return Sym(int(first), tuple(others)) if first.isdigit() else Sym(1, (first, *others))


Dim = int | Sym | None
"""A size; None for an unknown size."""


def local_symbol(origin: str = "") -> Sym:
    """Return the block size `b`, or a separate block size for the value named `origin`."""
    return Sym(1, (f"{BLOCK}#{origin}" if origin else BLOCK,))


def shard_symbol(sizes: Sequence[int]) -> Sym:
    """Return the symbol of shard sizes, one for each replica: `b/3,2` is 3 on the first replica, 2 on the second."""
    return Sym(1, (f"{SHARDS}{','.join(map(str, sizes))}",))


def shards_of(dim: Dim) -> tuple[int, ...]:
    """Return the shard sizes in the symbol of a size, one for each replica; empty where it counts examples."""
    return sizes_of_shards(dim.factors[0]) if isinstance(dim, Sym) and len(dim.factors) == 1 else ()


def common_symbol(origin: str) -> Sym:
    """Return the size of a dimension that is never split, such as time: unknown, but equal in all replicas."""
    return Sym(1, (f"{COMMON}:{origin}",))


def maker_of(factor: str) -> str:
    """Return the name of the node that an open dimension belongs to; empty for a factor that counts examples."""
    return factor.removeprefix(f"{COMMON}:").rpartition("/")[0].partition(":")[0]


EXAMPLES_OF_ALL = common_symbol("batch")
"""The examples of the whole batch, on an axis that does not split them."""


def on_axis(dim: Dim, axis: str, before: str) -> Dim:
    """Return a size as rules on `axis` see it, where rules on `before` see it as `dim`.

    Block sizes of any other axis are open sizes: `b` on the axis `replica` is `T:@replica/b` on `model`.
    """
    if not isinstance(dim, Sym) or axis == before:
        return dim
    here = f"{COMMON}:@{axis}/"
    factors = [
        f"{COMMON}:@{before}/{factor}" if factor[0] in (BLOCK, BATCH) else factor.removeprefix(here)
        for factor in dim.factors
    ]
    return Sym(dim.coef, tuple(sorted(factors)))


def is_local(dim: Dim) -> bool:
    """Return whether the size differs between replicas."""
    return isinstance(dim, Sym) and any(factor.startswith(LOCAL_MARK) for factor in dim.factors)


def is_settled(dim: Dim) -> bool:
    """Return whether a size is known, and is no placeholder symbol that was made for one value."""
    return dim is not None and not (isinstance(dim, Sym) and any("#" in factor for factor in dim.factors))


def any_local(dims: Iterable[Dim] | None) -> bool:
    """Return whether some size differs between replicas."""
    return dims is not None and any(is_local(dim) for dim in dims)


def local_entry(dims: Sequence[Dim] | None) -> int | None:
    """Return the position of the only local size in a shape vector; None if there are none or several."""
    found = [i for i, dim in enumerate(dims or ()) if is_local(dim)]
    return found[0] if len(found) == 1 else None


def times(a: Dim, b: Dim) -> Dim:
    """Multiply two sizes; a product of two block sizes is unknown, as no block has it."""
    if a is None or b is None:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a == 0 or b == 0:
        return 0
    if is_local(a) and is_local(b):
        return None
    coef_a, factors_a = (a, ()) if isinstance(a, int) else a
    coef_b, factors_b = (b, ()) if isinstance(b, int) else b
    return Sym(coef_a * coef_b, tuple(sorted(factors_a + factors_b)))


def product(dims: Iterable[Dim]) -> Dim:
    """Multiply all sizes."""
    result: Dim = 1
    for dim in dims:
        result = times(result, dim)
    return result


def divide(a: Dim, b: Dim) -> Dim:
    """Divide exactly: every factor of the divisor `b` must cancel; otherwise the result is unknown."""
    if a is None or b is None or b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a % b == 0 else None
    coef_a, factors_a = (a, ()) if isinstance(a, int) else a
    coef_b, factors_b = (b, ()) if isinstance(b, int) else b
    left = list(factors_a)
    for factor in factors_b:
        if factor not in left:
            return None
        left.remove(factor)
    if coef_b == 0 or coef_a % coef_b:
        return None
    return Sym(coef_a // coef_b, tuple(left)) if left else coef_a // coef_b


def to_global(dim: Dim, batch: int | None) -> Dim:
    """Return the size over the whole batch for a size per block.

    Args:
        batch: the number of examples, where it is static.
    """
    if not isinstance(dim, Sym) or not is_local(dim):
        return dim
    rest = tuple(f for f in dim.factors if not f.startswith(LOCAL_MARK))
    (mine,) = (f for f in dim.factors if f.startswith(LOCAL_MARK))
    if parts := segment_rows(mine):
        return to_global(Sym(dim.coef * sum(parts), (*rest, BLOCK)), batch)
    if sizes := sizes_of_shards(mine):
        return times(dim.coef * sum(sizes), Sym(1, rest)) if rest else dim.coef * sum(sizes)
    if mine == BLOCK and batch is not None:
        return times(dim.coef * batch, Sym(1, rest)) if rest else dim.coef * batch
    return Sym(dim.coef, tuple(sorted((*rest, BATCH + mine[len(BLOCK) :]))))


def are_same(a: Dim, b: Dim) -> bool:
    """Return whether two sizes are known to be equal; two unknown sizes are not."""
    return a is not None and a == b


def is_open(dim: Dim) -> bool:
    """Return whether a size depends on an open dimension."""
    return isinstance(dim, Sym) and any(factor.startswith(f"{COMMON}:") for factor in dim.factors)


def may_be_same(a: Dim, b: Dim) -> bool:
    """Return whether two sizes of the whole can be equal in some run: an open dimension may have any length."""
    return a is not None and b is not None and (a == b or is_open(a) or is_open(b))


def are_rows(a: Dim, b: Dim) -> bool:
    """Return whether two sizes, `b*T` and `b*5`, must be equal in each block if they are equal over the whole batch.

    This holds for ops that refuse other sizes: if `B*T` is `B*5`, then T is 5, and the blocks line up. An op that
    stretches a single row does so only with one example, and then it also does in the block of that example.
    """
    for mine in (BLOCK, BATCH):
        rest = [divide(dim, Sym(1, (mine,))) for dim in (a, b)]
        if None not in rest:
            return rest[0] == rest[1] or (1 not in rest and may_be_same(*rest))
    return are_same(a, b)


def broadcast_dim(a: Dim, b: Dim) -> Dim:
    """Return the size that two sizes broadcast to; unless they are known to be equal, a symbol may stand for 1."""
    if a == 1 or a == b:
        return b
    if are_rows(a, b):
        return a
    if b == 1:
        return a
    return next((dim for dim in (a, b) if isinstance(dim, int)), None)


def broadcast(shapes: Sequence[tuple[Dim, ...] | None]) -> tuple[Dim, ...] | None:
    """Return the broadcast shape, None when a rank is unknown."""
    result: list[Dim] = []
    for shape in shapes:
        if shape is None:
            return None
        longer, shorter = (result, list(shape)) if len(result) >= len(shape) else (list(shape), result)
        offset = len(longer) - len(shorter)
        result = longer[:offset] + [broadcast_dim(x, y) for x, y in zip(longer[offset:], shorter, strict=True)]
    return tuple(result)


def is_whole_of(dim: Dim, block: Dim, batch: int | None) -> bool:
    """Return whether a size is known to be the whole of which `block` is one replica's part.

    Any other size may be 1, where one row is broadcast, or count something else: it has no blocks. If the batch is
    open, a number does not qualify either, since the batch may have one example.
    """
    return are_same(dim, to_global(block, batch))


def unit(dim: Dim) -> int | None:
    """Return c where the size is `c * b` with `b` the common block size; None otherwise."""
    return dim.coef if isinstance(dim, Sym) and dim.factors == (BLOCK,) else None


def joined(parts: Sequence[int]) -> Sym:
    """Return the size of a block with a segment for each part.

    Args:
        parts: the rows of one example in each part.
    """
    common = gcd(*parts)
    if len(parts) == 1:
        return Sym(common, (BLOCK,))
    return Sym(common, (f"{SEGMENTS}{','.join(str(rows // common) for rows in parts)}]",))


def is_segmented(dim: Dim) -> bool:
    """Return whether a size is the size of a block with segments."""
    return isinstance(dim, Sym) and any(factor.startswith(SEGMENTS) for factor in dim.factors)


def segments(dim: Dim) -> tuple[int, ...]:
    """Return the rows of each example in each segment; empty where there are no segments, or they are unknown."""
    if not isinstance(dim, Sym) or len(dim.factors) != 1:
        return ()
    return tuple(dim.coef * rows for rows in segment_rows(dim.factors[0]))


def parts(dim: Dim) -> tuple[int, ...]:
    """Return `segments`, or for a block without segments one entry with its rows per example."""
    rows = unit(dim)
    return segments(dim) if rows is None else (rows,)


def rows_per_example(dim: Dim) -> int | None:
    """Return how many rows of a block one example has, over all segments; None where that is not known."""
    return sum(parts(dim)) or None


def rows_of_unit(dim: Dim) -> int | None:
    """Return how many rows of a block belong to one unit: an example, or a row of a shard."""
    return dim.coef if isinstance(dim, Sym) and shards_of(dim) else rows_per_example(dim)


def has_rows_of_each_example(dim: Dim) -> bool:
    """Return whether every example has the same number of adjacent rows in a block, even if the number is open."""
    return isinstance(dim, Sym) and [factor for factor in dim.factors if factor.startswith(LOCAL_MARK)] == [BLOCK]


def between_seams(dim: Dim, begin: int, end: int) -> Dim:
    """Return the size of a block between two seams (bounds of segments, in rows per example); None without a seam."""
    rows = segments(dim)
    seams = [0, *accumulate(rows)]
    if not rows or begin not in seams or end not in seams or begin >= end:
        return None
    return joined([rows[i] for i, (a, b) in enumerate(pairwise(seams)) if begin <= a and b <= end])


def seam(entry: Dim, batch: int | None) -> int | None:
    """Return a bound in rows per example; None where that is not known."""
    if isinstance(entry, int):
        return 0 if entry == 0 else entry // batch if batch and entry > 0 and entry % batch == 0 else None
    return rows_per_example(entry)
