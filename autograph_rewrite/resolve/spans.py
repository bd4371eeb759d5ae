"""Find the nodes that must run on every replica: those that read or produce values that differ between replicas.

    dw: partial on each ──► AddN(all) ──► dw * dw ──► update          once, where the variable lives
    rows: split on each ──► Shape ──► [3, 4]: the same everywhere     each; a constant takes its place

All other nodes may run once: servers run some of them, and mirrored replicas repeat them. One loop runs for all
micro-batches, unless nothing in it is shared: then each micro-batch runs a separate loop.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.replicated_regions import maker
from autograph_rewrite.ir.control_flow import Frame, frames_of, loops_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import SERVER
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import axis_along, is_pure
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.traits import ENTERS, SWITCHES, has
from autograph_rewrite.plan.plan import Plan


def differs_by_replica(state: Propagation, node: Node, future_splits: Container[Value] = ()) -> bool:
    """Return whether the instances of a node read or give different values, so that it cannot run once.

    Args:
        node: an original node.
        future_splits: empty lists that will hold blocks.
    """
    transferred = state.transfers[node]
    if transferred.constant:  # it stays only where a node waits for it
        return True
    for index in range(len(transferred.outputs)):  # for every node of a graph: a generator would double the time
        value = node.output(index)
        if state.source(value).placement.differs or value in future_splits:
            return True
        if (cell := state.facts[value].cell) in state.cells and state.cells[cell].placement.differs:
            return True
    for index, value in enumerate(node._inputs):
        fact = state.facts[value]
        if fact.cell and state.cells.get(fact.cell, fact).placement.differs:
            return True
        if fact.placement.differs and fact.dtype == dtypes.RESOURCE:  # each replica has its shard of a variable
            return True
        if (
            fact.placement.differs
            and index not in transferred.operand_reshards
            and transferred.outputs
            and not has(node.op, "measures")
        ):
            return True
    return False


_EXACT = frozenset((dtypes.BOOL, dtypes.INT32, dtypes.INT64))
"""Types whose computations give the same result on every device."""


def own_loops(state: Propagation, plan: Plan) -> dict[Node, str]:
    """Return the nodes of the loops that each micro-batch runs separately, with the outermost loop.

    In one loop for all, the micro-batches would wait for each other in each iteration: a pipeline could not run it, and
    the values that all of them keep for the backward part would be alive at once.

    Args:
        state: the placements; nodes that servers run have their place.
    """
    if plan.microbatches == 1:
        return {}
    frames, loops = frames_of(state.order), loops_of(state.order)
    if not frames:
        return {}
    together = {frame[0] for node, frame in frames.items() if _is_shared(state, frames, node)}
    containers = _containers(state, frames)
    while more := {loop for used in containers.values() if used & {*together, ""} for loop in used} - together:
        together |= more
    own = {node: loop for node, loop in loops.items() if loop not in together}
    makers = {node: min(used) for node, used in containers.items() if not used & {*together, ""}}
    return {**own, **makers}


def _containers(state: Propagation, frames: Mapping[Node, Frame]) -> dict[Node, set[str]]:
    """Return the loops that use each container that would exist once, by its maker; "" stands for none."""
    found: dict[Node, set[str]] = {}
    for node in state.order:
        for value in node.inputs:
            cell = state.facts[value].cell
            if cell and value.dtype == dtypes.RESOURCE and not state.cells[cell].placement.differs:
                found.setdefault(maker(state, cell), set()).add(frames.get(node, ("",))[0])
    return found


def _is_shared(state: Propagation, frames: Mapping[Node, Frame], node: Node) -> bool:
    """Return whether a node of a loop needs one loop for all instances: it exchanges something, or acts for all."""
    made = state.transfers[node]
    if made.constant:
        return False
    if REPLICATED in made.operand_reshards.values() or axis_along(node) or node.is_driven or SERVER in node.place:
        return True
    if any(value in state.reduced for value in node.inputs):
        return True
    acts = not (is_pure(node.op) or any(has(node.op, trait) for trait in ("reads", "inspects", "routes", "lists")))
    if acts and not differs_by_replica(state, node):
        return True
    is_choice = node.op in SWITCHES and not has(node.inputs[1].node.op, "loop_test")
    if is_choice or has(node.op, "loop_test"):
        return not _is_exact(state, frames, node.inputs[int(is_choice)])
    return False


def _is_exact(state: Propagation, frames: Mapping[Node, Frame], predicate: Value) -> bool:
    """Return whether all instances compute the same predicate on any device: from integers and booleans only."""
    if state.source(predicate).placement.differs:
        return False
    frame, pending, seen = frames.get(predicate.node, ()), [predicate], {predicate}
    while pending:
        value = pending.pop()
        if value.dtype not in _EXACT:
            return False
        if frames.get(value.node, ()) == frame and value.node.op not in ENTERS:
            new = [one for one in value.node.inputs if one not in seen]
            seen.update(new)
            pending += new
    return True
