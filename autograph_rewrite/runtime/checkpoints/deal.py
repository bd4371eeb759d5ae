"""Which worker writes which part of which variable: contiguous shares of equal size.

    w [1000, 64]  b [64]  m [1000, 64]          3 workers
    worker 0   w 0:667        worker 1   w 667:1000, b, m 0:333        worker 2   m 333:1000

All workers deal alike, without a word: names are taken in order, and only the first dimension is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autograph_rewrite.plan.parts.batch_split import bounds

WHOLE_BELOW = 1 << 16
"""Bytes of a variable that is not worth cutting."""


@dataclass(frozen=True)
class Extent:
    """The shape of a variable, and the bytes of its value."""

    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a variable; of one that is written whole, no rows are said."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @property
    def slice_spec(self) -> str:
        """The form that `SaveV2` takes: the whole shape, then offset and length in each dimension."""
        if self.rows is None:
            return ""
        start, stop = self.rows
        ranges = [f"{start},{stop - start}", *("-" for _ in self.shape[1:])]
        return f"{' '.join(map(str, self.shape))} {':'.join(ranges)}"


def deal(extents: Mapping[str, Extent], workers: int) -> list[list[Piece]]:
    """Return the pieces that each worker writes; together they are every variable once.

    Args:
        extents: of the variables, by name.
        workers: how many there are.
    """
    shares: list[list[Piece]] = [[] for _ in range(workers)]
    ends = bounds(sum(extent.size for extent in extents.values()), workers)[1:]
    offset = 0
    for name in sorted(extents):
        extent = extents[name]
        if extent.size < WHOLE_BELOW or not extent.shape:
            owner = min(bisect_right(ends, offset), workers - 1)
            shares[owner].append(Piece(name, extent.shape))
        else:
            for owner, rows in _rows(extent, offset, ends):
                shares[owner].append(Piece(name, extent.shape, rows if rows != (0, extent.shape[0]) else None))
        offset += extent.size
    return shares


def _rows(extent: Extent, offset: int, ends: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield workers with their rows of a variable that begins `offset` bytes behind the first."""
    rows, start = extent.shape[0], 0
    for worker, end in enumerate(ends):
        stop = rows if end == ends[-1] else min(rows, max(start, round((end - offset) * rows / extent.size)))
        if stop > start:
            yield worker, (start, stop)
        start = stop
