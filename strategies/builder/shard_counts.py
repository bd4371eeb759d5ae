"""Numbers of shards, and their sizes.

12 rows    smallest divisor 2    smallest number of uneven parts 5    5 shards of 3, 3, 2, 2, 2
"""

from __future__ import annotations

from itertools import pairwise

from autograph_rewrite.plan.parts.batch_split import bounds

MOST = 256
"""More parts than that cost more in ops than they spread: a variable whose size has no smaller divisor stays whole."""


def smallest_divisor(size: int) -> int:
    """Return the smallest divisor of `size` from 2 on; the size itself where it is prime, 1 below 2."""
    divisor = 2
    while divisor * divisor <= size:
        if size % divisor == 0:
            return divisor
        divisor += 1
    return max(size, 1)


def smallest_non_divisor(size: int) -> int:
    """Return the smallest number from 2 on that does not divide `size`; the size itself where all smaller ones do."""
    return next((count for count in range(2, size) if size % count), max(size, 1))


def shard_sizes(size: int, count: int) -> tuple[int, ...]:
    """Return the sizes of `count` nearly equal shards, the larger ones first."""
    return tuple(end - begin for begin, end in pairwise(bounds(size, count)))
