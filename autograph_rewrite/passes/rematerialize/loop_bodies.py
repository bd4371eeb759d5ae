"""Compute cells again in the loops of their gradients, instead of saving what they make in every iteration.

    before   Pop(a) ─► da            Pop(b) ─► db              three lists: h, a, b
    after    Pop(h) ─► a' ─► b'      a' ─► da;  b' ─► db       one list; ^dh': not before the gradient of the state

Without the control edge the executor would run ahead, up to ten iterations at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.analysis.propagate import revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.shapes.recorded import record_shapes, static_shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.loops.cells import Cell
from autograph_rewrite.resolve.stages.forward_backward import COPIES, copied


def recompute_in_loops(rewrite: Rewrite, acts: Activations, cells: Sequence[Cell]) -> Activations:
    """Edit the graph; return what may be computed again then, with the placements as they are.

    Args:
        rewrite: under way.
        acts: forward and backward of the graph.
        cells: what is computed again.
    """
    graph = acts.state.graph
    for number, cell in enumerate(cells, start=len(graph)):  # the names of segments outside of loops count from 0
        readers = [(one.value, use) for one in cell.dropped for use in one.taken.uses]
        known = {value: one.taken for value, one in cell.kept.items()}
        for value in [one for one in cell.kept if one in cell.moved]:
            _put_instead(graph, cell, value)
        known |= {value: _enter(graph, node, cell, number) for value, node in cell.fixed.items()}
        copies = _copy(graph, cell, known, number)
        for value, use in readers:
            use.node.set_input(use.index, copies[value.node].output(value.index), use.node.selects.get(use.index))
    eliminate_dead_code(graph, rewrite.roots)
    alive = set(graph)
    return Activations(
        revise(acts.state),
        tuple(node for node in acts.forward if node in alive),
        acts.backward & alive,
        acts.repeatable & alive,
        acts.unconditional & alive,
    )


def _put_instead(graph: Graph, cell: Cell, value: Value) -> None:
    """Let a list hold another value."""
    one = cell.kept[value]
    one.maker.set_input(0, Builder.at(one.maker, device=one.maker.device).const(-1, dtypes.INT32, "any_shape"))
    one.push.set_input(1, value)
    record_shapes(one.pop, [(), static_shape(value)])


def _enter(graph: Graph, node: Node, cell: Cell, number: int) -> Value:
    """Let what enters the forward's loop enter that of the gradient."""
    name = f"{COPIES}/{number}/{copied(node.name)}"
    enter = copy_node(graph, node, node.inputs, name=name)
    enter.span = node.span
    enter.set_attr("frame_name", cell.frame[0].encode())
    return enter.output()


def _copy(graph: Graph, cell: Cell, known: dict[Value, Value], number: int) -> dict[Node, Node]:
    """Copy the nodes of a cell into the loop of the gradient."""
    copies: dict[Node, Node] = {}
    for node in cell.nodes:
        inputs = [known[v] if v in known else copies[v.node].output(v.index) for v in node.inputs]
        first = all(value in known or value.node.op == "Const" for value in node.inputs)
        waits = cell.triggers if first else ()
        copies[node] = copy_node(graph, node, inputs, name=f"{COPIES}/{number}/{copied(node.name)}", controls=waits)
        copies[node].span = node.span
    return copies
