"""Set `parallel_iterations` to 1 for loops that read a random stream or an input pipeline.

    while (parallel_iterations=32): mask = RandomUniform()      the executor may let a later iteration draw first
    while (parallel_iterations=1):  mask = RandomUniform()      iteration i takes the i-th draw

Which iteration gets which draw is otherwise a race, whose result differs from run to run, and more so once the loop is
spread over devices. Enclosing loops are held back too: their iterations start inner loops.
"""

from __future__ import annotations

from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ops.traits import ENTERS, has


def draws(node: Node) -> bool:
    """Return whether each run of a node takes the next element of some stream."""
    op = find_op(node.op)
    return op is not None and op.is_stateful and has(node.op, "draws")


def run_in_turn(graph: Graph) -> int:
    """Let loops that draw run one iteration at a time, in place; return how many there are."""
    enters = [node for node in graph if node.op in ENTERS]
    drawing = [node for node in graph if draws(node)] if enters else []
    if not drawing:
        return 0
    frames = frames_of(topological_order(graph))
    held = {frames[node][: depth + 1] for node in drawing if node in frames for depth in range(len(frames[node]))}
    for enter in enters:
        if frames.get(enter) in held:
            enter.set_attr("parallel_iterations", 1)
    return len(held)
