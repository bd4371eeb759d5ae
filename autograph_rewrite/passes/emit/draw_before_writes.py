"""Let every write of a step wait for what the step draws from iterators (`steps_per_run`).

    IteratorGetNext ──► ... ──► gradient ──► AssignSub         waits for the element as it is
    IteratorGetNext - - - - - - - - - - ──► AssignAdd(step, 1)  waits now: where the data end, the step does nothing

In a loop of steps the last iteration is the one in which the data end. A write that needs nothing of the element would
happen in it: eight updates for seven elements.
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.ir.control_flow import frames_of, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ops.traits import ENTERS, has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


def draw_before_writes(graph: Graph, targets: Iterable[Node]) -> None:
    """Add the waits; what is drawn after a write, or only in some branch, is not waited for.

    Args:
        graph: the folded graph, complete.
        targets: what a step runs for its effects.
    """
    step, order = ancestors(targets), topological_order(graph)
    always, frames = unconditional_nodes(order), frames_of(order)
    draws = [node for node in order if node in step and node in always and has(node.op, "draws_element")]
    if not draws:
        return
    before = ancestors(draws)
    for node in order:
        if node not in step or node in before:
            continue
        enters = node.op in ENTERS and not any(value.node in frames for value in node.inputs)
        if enters or (has(node.op, "writes") and node not in frames):
            for draw in draws:
                node.add_control(draw)


def _run(rewrite: Rewrite) -> None:
    """Let every write wait for what the step draws: the step in which the data end does nothing (`steps_per_run`)."""
    draw_before_writes(rewrite.graph, rewrite.targets)


DRAW_BEFORE_WRITES = Pass("draw-before-writes", _run, lambda rewrite: rewrite.plan.steps_per_run > 1)
