"""Who holds a variable and computes its update, where that is not every replica."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autograph_rewrite.ir import dtypes
from autograph_rewrite.item import Variable
from autograph_rewrite.plan.parts import VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.shards import axis_of


@dataclass(frozen=True)
class Holder:
    """How one variable is held.

    Attributes:
        name: of the variable.
        shards: into how many parts it is split; 1 is whole.
        servers: the device of each part; empty where every replica holds all parts.
        stage: of a variable that is split over the replicas; 0 where it is not.
    """

    name: str
    shards: int = 1
    servers: tuple[str, ...] = ()
    stage: int = 0

    @property
    def is_served(self) -> bool:
        """Whether servers hold it, and not the replicas."""
        return bool(self.servers) and not self.stage


def holders(plan: Plan) -> dict[str, Holder]:
    """Return the holder of each variable that is not simply replicated."""
    return {one.name: _holder(one) for one in plan.variables if one.placement != "replicated"}


def _holder(request: VariableRequest) -> Holder:
    shards = len(request.sizes) if axis_of(request.placement) is not None else 1
    return Holder(request.name, max(shards, 1), request.servers, request.stage)


def variable_bytes(variable: Variable) -> int:
    """Return the size of a variable; an unknown dimension counts as 1."""
    number = dtypes.NUMBERS.get(variable.dtype)
    return math.prod(dim or 1 for dim in variable.shape or ()) * (dtypes.width(number) if number else 0)
