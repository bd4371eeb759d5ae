"""Bytes of the exchanges on the model axis, once it is known how many examples a step has."""

from __future__ import annotations

from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.wire_types import sent_bytes

COUNTED = frozenset(("add_n", "fold", "concat", "slice"))
"""Lowerings that hand over a whole value; of a halo exchange only some rows travel."""


def with_bytes(plan: Plan, state: Propagation, sizes: Sizes) -> Plan:
    """Return the plan with the bytes of model edges whose shapes were open.

    Args:
        plan: with its model edges.
        state: the placements.
        sizes: numbers for the symbols of shapes.
    """
    return replace(plan, model_edges=tuple(_counted(edge, state, sizes) for edge in plan.model_edges))


def _counted(edge: EdgePlan, state: Propagation, sizes: Sizes) -> EdgePlan:
    if edge.bytes or edge.lowering not in COUNTED or edge.node not in state.graph.nodes:
        return edge
    value = state.graph.value(edge.value)
    return replace(edge, bytes=sent_bytes(state, value, sizes)) if value in state.facts else edge
