"""The choice of a builder for one variable: how its gradient is reduced, and into how many shards it is split."""

from __future__ import annotations

from dataclasses import dataclass, field

from autograph_rewrite.analysis.variables.roles import Role
from autograph_rewrite.training_graph import Variable


@dataclass(frozen=True)
class TrainedVariable:
    """A trained variable, as builders see it.

    Attributes:
        variable: as the item has it.
        role: what it is in the step.
        digest: of the graph: what a choice that shall look random is made from.
        obstacle: why it cannot be split; empty where it can.
    """

    variable: Variable
    role: Role
    digest: str
    obstacle: str = ""

    @property
    def name(self) -> str:
        """Its public name."""
        return self.variable.name

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Its static shape; none where it is unknown."""
        return self.variable.shape or ()


@dataclass(frozen=True)
class Parts:
    """Into how many parts a variable is split, along which axis."""

    axis: int
    count: int


@dataclass(frozen=True)
class Choice:
    """How one variable is held and updated.

    Attributes:
        synchronizer: "all_reduce" (every replica holds it) or "ps" (servers do).
        parts: how it is split; None leaves it whole.
        stage: 1, 2 or 3 where its parts are those of the replicas (`messages.VariableRequest.stage`).
        because: why it is not split, or not on servers, where the builder has a reason; `why-not` says it.
    """

    synchronizer: str = "all_reduce"
    parts: Parts | None = None
    stage: int = 0
    because: str = field(default="", compare=False)
