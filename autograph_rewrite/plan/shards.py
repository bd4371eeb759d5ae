"""How a variable is cut into shards along one axis.

10 rows in 4 shards    3 3 2 2    at 0 3 6 8
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autograph_rewrite.plan.parts import VariableRequest

_SPLIT = re.compile(r"split\((\d{1,3})\)")


@dataclass(frozen=True)
class Cut:
    """Where a variable is cut.

    Attributes:
        axis: the axis along which it is cut.
        sizes: of the shards, in order.
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def extent(self) -> int:
        """The size of the axis."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard begins."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def shape(self, whole: Sequence[int | None], shard: int) -> tuple[int | None, ...]:
        """The shape of one shard."""
        return (*whole[: self.axis], self.sizes[shard], *whole[self.axis + 1 :])


def axis_of(placement: str) -> int | None:
    """The axis of a placement that is written `split(axis)`, None for another placement."""
    found = _SPLIT.fullmatch(placement)
    return int(found[1]) if found else None


def cut_of(request: VariableRequest) -> Cut | None:
    """How a request wants its variable cut, None where it stays whole."""
    axis = axis_of(request.placement)
    return None if axis is None else Cut(axis, request.sizes)


def shard_name(variable: str, shard: int) -> str:
    """The name of one shard."""
    return f"{variable}/part_{shard}"
