"""Record of compressed gradients: the tensors from which `ar.verify` checks the compressed sums."""

from __future__ import annotations

from typing import NamedTuple

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.plan.parts.messages import EdgePlan


class Compressed(NamedTuple):
    """One compressed sum, by tensors of the folded graph.

    Attributes:
        owner: the variable.
        compressor: what compressed it.
        lowering: how what was left travelled.
        gradient: one replica's contribution.
        before: one replica's residual before the step; empty without error feedback.
        after: the same after the step.
        result: the sum that the variable's update gets.
    """

    owner: str
    compressor: str
    lowering: str
    gradient: str
    before: str
    after: str
    result: str


class CompressedSum(NamedTuple):
    """The same while passes work; nodes may still be renamed."""

    edge: EdgePlan
    gradient: Value
    before: Value | None
    after: Value | None
    result: Value

    def named(self) -> Compressed:
        """Return the record."""
        edge, gradient, before, after, result = self
        states = [value.name if value is not None else "" for value in (before, after)]
        return Compressed(edge.owner, edge.compressor, edge.lowering, gradient.name, states[0], states[1], result.name)
