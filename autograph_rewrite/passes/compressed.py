"""What a rewrite compressed: the tensors by which the sum can be checked (`ar.verify` does)."""

from __future__ import annotations

from typing import NamedTuple

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.plan.parts import EdgePlan


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

    @classmethod
    def of(cls, edge: EdgePlan, value: Value, before: str, after: str, result: Value) -> Compressed:
        """Return the record of an edge."""
        return cls(edge.owner, edge.compressor, edge.lowering, value.name, before, after, result.name)
