"""Compute values that only outputs need on the gathered batch, instead of at a barrier between micro-batches.

    before   h each ──► mean of all ──► h - mean each ──► sum of all ──► output        nothing may wait in the middle
    after    h each ──► all of h ──► mean, h - mean, sum ──► output                    once, behind all micro-batches

Stages and loops of micro-batches cannot have a barrier. A value that is only an output, such as a standard deviation,
needs none, as no update waits for it. The cost is to keep `h` of all micro-batches.
"""

from __future__ import annotations

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.rules.marked import make_whole
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


def _gather_for_outputs(rewrite: Rewrite) -> None:
    """Compute values that only outputs need on the gathered batch, instead of at a barrier between micro-batches."""
    state = rewrite.state
    needed, late = ancestors(rewrite.targets), late_nodes(state.order)
    behind: set[Node] = set()
    marked = 0
    for node in state.order:
        if node not in late or node in needed or node in state.looped:
            continue
        if not any(value.node in behind for value in node.inputs):
            if any(_meets(state, node, index) for index in range(len(node.inputs))):
                behind.add(node)
            continue
        behind.add(node)
        if any(fact.placement.differs for fact in state.transfers[node].outputs):
            marked += make_whole(node)
    if marked:
        rewrite.put(revise(state))


def _meets(state: Propagation, node: Node, index: int) -> bool:
    """Return whether a node reads the whole of a value that is spread over micro-batches."""
    value = node.inputs[index]
    if state.transfers[node].operand_reshards.get(index) == REPLICATED and state.facts[value].placement.differs:
        return True
    return value in state.reduced


def cannot_wait(rewrite: Rewrite) -> bool:
    """Return whether micro-batches cannot wait for each other in the middle of a step."""
    return rewrite.plan.pipeline is not None or rewrite.plan.looped


GATHER_FOR_OUTPUTS = Pass("gather-for-outputs", _gather_for_outputs, cannot_wait, (Propagation,), (Propagation,))
