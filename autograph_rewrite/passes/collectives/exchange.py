"""Describe an exchange, which carries out one edge of the plan hop by hop."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.ir.mesh import ONCE, PER_REPLICA, Span
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.collectives.key_operands import Keys
from autograph_rewrite.plan.parts.lowerings import ACROSS, IN_REPLICA, LOWERINGS, Hop, Medium, Operation
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.resolve.compression import members_of

ADDS_MICRO_BATCHES = Hop(Operation.REDUCE, IN_REPLICA, Medium.OPS)


@dataclass(frozen=True)
class Exchange:
    """The context of every hop of one edge.

    Attributes:
        edge: None for a value that the plan does not name: then all hops are ordinary ops.
    """

    rewrite: Rewrite
    keys: Keys
    edge: EdgePlan | None

    def hops(self, usual: str) -> tuple[Hop, ...]:
        """Return the hops of the edge; those of the lowering `usual` where there is no edge."""
        return self.edge.lowered.hops if self.edge is not None else LOWERINGS[usual].hops

    @property
    def planned(self) -> EdgePlan:
        """The edge; hops that leave the process always have one."""
        assert self.edge is not None
        return self.edge

    @property
    def of_members(self) -> tuple[Hop, ...]:
        """The hops that compute the values of the last hop's members; micro-batches are added up first."""
        hops = self.planned.lowered.hops[:-1]
        return hops if hops or self.rewrite.plan.microbatches == 1 else (ADDS_MICRO_BATCHES,)

    @property
    def adds_micro_batches(self) -> bool:
        """Whether each replica first adds up its micro-batches."""
        return any(hop.over == IN_REPLICA for hop in self.of_members)

    @property
    def members(self) -> int:
        """How many members the last hop has: all replicas, or the processes if each has combined its replicas."""
        return members_of(self.planned.lowered, self.rewrite.plan)


def between_processes(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """Return the hops between processes, for a value that each process has combined already."""
    return tuple(hop for hop in hops if hop.over == ACROSS)


def span_behind(hop: Hop) -> Span:
    """Return the span of the result of a hop by ordinary ops: once, or per replica if it combines micro-batches."""
    return PER_REPLICA if hop.over == IN_REPLICA else ONCE
