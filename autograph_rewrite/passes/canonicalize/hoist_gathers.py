"""Hoist all-gathers out of conditionals: servers and stages exchange values outside of branches only.

before   x ──► Switch ──► Assert(data)                  every worker has its part of x
after    x ──► Identity, gathered ──► Switch ──► Assert(data)

An update that is skipped where some gradient is not finite is such a branch: which way it goes is known when all
micro-batches have come to their end, so nothing of theirs may be behind it.
"""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.plan.plan import Plan


def hoist_gathers(graph: Graph, state: Propagation, plan: Plan) -> list[str]:
    """Copy each value that is spread over the replicas and that some branch only wants whole, where that is needed.

    Returns:
        The names of the nodes that make the copies, which are to be gathered.

    Args:
        graph: edited in place.
        state: a propagation.
        plan: copies are needed with stages, and with servers in a job.
    """
    if plan.pipeline is None and not (plan.homes and len(plan.processes) > 1):
        return []
    copies: dict[Value, Node] = {}
    for node in state.order:
        if node.op == "Switch" and _wants_whole(state, node):
            value = node.inputs[0]
            if value not in copies:
                name = f"{value.node.name}/before_branch_{value.index}"
                copies[value] = graph.add("Identity", [value], name=name, origin=value.node)
            node.set_input(0, copies[value].output())
    return [node.name for node in copies.values()]


def _wants_whole(state: Propagation, switch: Node) -> bool:
    """Return whether all readers in the branches want the whole of what is spread."""
    if switch.inputs[1].node.op == "LoopCond" or not state.source(switch.inputs[0]).placement.differs:
        return False
    uses = [use for value in switch.outputs for use in value.uses]
    return bool(uses) and all(state.transfers[node].operand_reshards.get(index) == REPLICATED for node, index in uses)
