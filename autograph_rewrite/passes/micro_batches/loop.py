"""Roll the micro-batches of each replica into one loop: the graph does not grow with their number.

    before   %dw each ──► AddN(all)                           a copy of everything for each micro-batch
    after    total = 0;  loop m < M:  total += %dw            each: one copy, in a frame of its own
             %y each ──► ConcatV2(all)    ──►   list.push(%y) ... concatenated behind the loop

What runs once enters the loop as a constant. Numbers that differ between micro-batches become a table. Relies on the
folded graph being complete: nothing edits it afterwards but what places its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from autograph_rewrite.analysis.barriers import barrier_depths, needed_of_all
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import frames_of, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node, PerInstance, Span, Value
from autograph_rewrite.ir.replication import prefix
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.verify.loops import loop_faults
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.micro_batches.hoist_batch_counts import hoist_batch_counts
from autograph_rewrite.passes.micro_batches.loop_results import read_behind
from autograph_rewrite.passes.micro_batches.relax_waits import let_actors_wait, relax_waits
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL, Loop


def roll_micro_batches(
    graph: Graph, replicas: int, micro: int, slices: Mapping[Value, Value], roots: Iterable[Node]
) -> None:
    """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

    Args:
        graph: the folded graph, complete.
        replicas: how many replicas this process has.
        micro: how many micro-batches each of them has.
        slices: by block, what it was cut out of.
        roots: what the outside needs.

    Raises:
        PassError: something cannot be done in a loop; the message says what.
    """
    kept = list(roots)
    order, unconditional = order_of_bodies(graph, slices, kept)
    body = [node for node in order if node.span is Span.EACH and not is_plain_constant(node)]
    if not body:
        return
    inside = set(body)
    loop = Loop(graph, [prefix(r) for r in range(replicas)], micro)
    for node in body:
        if node.op == "Const":
            _look_up(graph, loop, node, replicas, micro)
    body = [node for node in body if node.name in graph.nodes]
    inside &= set(body)
    for node in body:
        require_alike(node)
        _move_in(loop, node, inside, unconditional)
    for node in order:
        if node.span is not Span.EACH and node.name in graph.nodes:
            read_behind(graph, loop, node, inside, unconditional, replicas)
    for node in graph:
        if node.span is Span.REPLICA:
            node.set_span(Span.EACH)  # as the loop has it now: an instance for each replica
    require_closed(graph)


def require_closed(graph: Graph) -> None:
    """Make sure that no loop waits for its own end: the step would end without values, and without an error.

    Raises:
        PassError: one does.
    """
    for fault in loop_faults(topological_order(graph)):
        raise PassError(fault.problem, node=fault.node, hint=UNROLL)


def is_plain_constant(node: Node) -> bool:
    """Return whether a node is a constant that is the same for all micro-batches."""
    return node.op == "Const" and not any(isinstance(raw, PerInstance) for raw in node.attrs.values())


def order_of_bodies(graph: Graph, slices: Mapping[Value, Value], kept: Iterable[Node]) -> tuple[list[Node], set[Node]]:
    """Let the iterations need nothing of each other; return the nodes, producers first, and those that always run.

    Args:
        graph: the folded graph, complete.
        slices: by block, what it was cut out of.
        kept: what the outside needs.

    Raises:
        PassError: something needs all of them in each iteration.
    """
    relax_waits(graph)
    hoist_batch_counts(graph, slices)
    eliminate_dead_code(graph, kept)
    order = let_actors_wait(graph, count_first=False)
    _refuse_what_meets(order)
    return order, unconditional_nodes(order)


def _refuse_what_meets(order: list[Node]) -> None:
    """Refuse loops of the user's, and values of the whole batch that each micro-batch needs.

    Raises:
        PassError: there is one.
    """
    frames = frames_of(order)
    levels = barrier_depths(order, frames, ())
    for node in order:
        if node.span is Span.EACH and node in frames:
            raise PassError(f"'{node.name}' is in a loop of its own", node=node, hint=UNROLL)
        if node.span is Span.EACH and node.op != "Const" and levels[node]:
            problem = f"'{node.name}' {needed_of_all(node, levels)}, and runs in each iteration of a loop"
            raise PassError(problem, node=node, hint=UNROLL)


def require_alike(node: Node) -> None:
    """Refuse attributes that differ between iterations.

    Raises:
        PassError: there is one.
    """
    for key, raw in node.attrs.items():
        if isinstance(raw, PerInstance):
            raise PassError(f"'{key}' of '{node.name}' differs between micro-batches", node=node, hint=UNROLL)


def _look_up(graph: Graph, loop: Loop, node: Node, replicas: int, micro: int) -> None:
    """Replace a constant that differs between micro-batches by an entry of a table."""
    entry = loop.entry(table_of(graph, node, replicas, micro), node.name)
    node.output().replace_all_uses_with(entry)
    for user in node.control_users:
        user.remove_control(node)
    for control in node.controls:
        node.remove_control(control)
    graph.erase(node)


def require_certain(node: Node, producer: Node, unconditional: set[Node]) -> None:
    """Refuse what only some branch gives to a loop from outside: the loop would wait for it, or end with it.

    Args:
        node: the reader, in the loop.
        producer: of what it reads, outside of it.
        unconditional: nodes that run in every step.

    Raises:
        PassError: the producer is not certain.
    """
    if producer not in unconditional:
        problem = f"'{node.name}' is in a branch, and needs '{producer.name}' of it from outside of the loop"
        raise PassError(problem, node=node, hint=UNROLL)


def table_of(graph: Graph, node: Node, replicas: int, micro: int) -> Value:
    """Return, as a table of each replica, a constant that differs between micro-batches.

    Args:
        graph: edited in place.
        node: the Const, with a value per instance.
        replicas: of this process.
        micro: micro-batches per replica; the table's dimension 0.
    """
    raw = node.attrs["value"]
    assert isinstance(raw, PerInstance)
    arrays = [np.asarray(decode(one)) for one in raw.raws]
    tables = [np.stack(arrays[r * micro : (r + 1) * micro]) for r in range(replicas)]
    own = PerInstance(tuple(encode("tensor", one) for one in tables)) if replicas > 1 else tables[0]
    attrs = {"dtype": node.output_dtypes[0], "value": own}
    return graph.add("Const", name=f"{node.name}/table", attrs=attrs, span=Span.EACH, origin=node).output()


def _move_in(loop: Loop, node: Node, inside: set[Node], unconditional: set[Node]) -> None:
    """Let a node read what comes from outside through the door of the loop."""
    for index, value in enumerate(node.inputs):
        if value.node not in inside and not loop.has(value.node):
            require_certain(node, value.node, unconditional)
            node.set_input(index, loop.constant(value))
    for control in node.controls:
        if control not in inside:
            require_certain(node, control, unconditional)
            node.remove_control(control)
            loop.wait_for(control)
    if not node.inputs and not node.controls:
        node.add_control(loop.number.node)
