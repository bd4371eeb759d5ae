"""How many bytes a step exchanges: the one count that plan, comm, simulate, explain and report show."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.plan.parts.messages import EdgePlan


def exchanged_bytes(edges: Iterable[EdgePlan]) -> int:
    """Return what one member of each exchange hands over in a step of the examples that the plan counts."""
    return sum(edge.bytes for edge in edges if edge.lowered.hops or edge.compressor != "none")
