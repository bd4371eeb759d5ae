"""Apply moving-average updates sequentially in one loop, where micro-batches are too many to unroll.

    before   v += rate * (average - v)                                          once
    after    loop m < M:  v += rate * (statistics[m] - v)                       the variable is read and written in it

An iteration begins when the one before it has ended, so that it reads what that one has written. Whoever waited for the
update waits for the end of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.micro_batches.while_frame import Loop

if TYPE_CHECKING:
    from autograph_rewrite.passes.micro_batches.sequential_averages import Update


def update_averages_in_loop(
    graph: Graph, update: Update, micro: int, means: Value, filled: Value | None, named: Collection[str]
) -> None:
    """Move an update into a loop over the micro-batches.

    Args:
        graph: the folded graph.
        update: what one statistic goes into.
        micro: how many micro-batches there are.
        means: the statistic of each.
        filled: whether each has examples; None where all certainly have.
        named: names of nodes that the outside runs.
    """
    scope = graph.unique_name(f"{update.total.node.name}/in_turn_{update.total.index}/loop")
    loop = Loop(graph, [""], micro, scope, span=ONCE)
    for read in _other_reads(graph, update):
        loop.wait_for(read)
    made: dict[Node, Node] = {}
    for read in update.reads:
        made[read] = _copy(graph, loop, read, [loop.constant(value) for value in read.inputs], made)
        made[read].add_control(loop.number.node)
    statistic = loop.entry(means, "statistic")
    if filled is not None and update.reads:
        old = loop.cast(made[update.reads[0]].output(), statistic.dtype, "old")
        statistic = loop.chosen(loop.entry(filled, "is_there"), statistic, old, "or_old")
    for node in update.chain:
        made[node] = _copy(graph, loop, node, _inputs(loop, node, update, statistic, made), made)
    for write in update.writes:
        write.set_inputs(_inputs(loop, write, update, statistic, made))
        _wait(loop, write, write.controls, made)
        _finish(graph, loop, write, named)


def _inputs(loop: Loop, node: Node, update: Update, statistic: Value, made: dict[Node, Node]) -> list[Value]:
    found: list[Value] = []
    for value in node.inputs:
        if value is update.total:
            found.append(statistic)
        elif value.node in made:
            found.append(made[value.node].output(value.index))
        else:
            found.append(loop.constant(value))
    return found


def _copy(graph: Graph, loop: Loop, node: Node, inputs: Iterable[Value], made: dict[Node, Node]) -> Node:
    copy = copy_node(graph, node, inputs, name=f"{node.name}/in_turn", controls=node.controls)
    copy.set_span(ONCE)
    _wait(loop, copy, node.controls, made)
    return copy


def _wait(loop: Loop, node: Node, controls: Iterable[Node], made: dict[Node, Node]) -> None:
    """Let a node wait for what is in the loop; the loop waits for what is not."""
    for control in controls:
        node.remove_control(control)
        if control in made:
            node.add_control(made[control])
        else:
            loop.wait_for(control)


def _finish(graph: Graph, loop: Loop, write: Node, named: Collection[str]) -> None:
    """Let whoever waits for a write wait for the last one."""
    waiting = write.control_users
    end = loop.finished(write)
    for user in waiting:
        user.remove_control(write)
        user.add_control(end)
    if write.name in named:
        name = write.name
        take_name(graph, write, graph.unique_name(f"{name}/in_turn"))
        Builder(graph, name, name).node("NoOp", controls=[end])


def _other_reads(graph: Graph, update: Update) -> list[Node]:
    """Return what else reads the variables: on one device that comes first, if nothing says otherwise."""
    handles = {handle_node(read.inputs[0]) for read in update.reads}
    handles |= {handle_node(write.inputs[0]) for write in update.writes}
    after = descendants(update.writes)
    reads = (node for node in graph if has(node.op, "reads_whole") and handle_node(node.inputs[0]) in handles)
    return [read for read in reads if read not in update.reads and read not in after and not read.controls]
