"""Roll the micro-batches of each replica into one loop: the graph does not grow with their number.

    before   %dw each ──► AddN(all)                           a copy of everything for each micro-batch
    after    total = 0;  loop m < M:  total += %dw            each: one copy, in a frame of its own
             %y each ──► ConcatV2(all)    ──►   list.push(%y) ... concatenated behind the loop

What runs once enters the loop as a constant. Numbers that differ between micro-batches become a table. Relies on the
folded graph being complete: nothing edits it afterwards but what places its nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from autograph_rewrite.analysis.barriers import barrier_depths, late_nodes, needed_of_all
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of, unconditional_nodes
from autograph_rewrite.ir.copying import copy_node, select_first
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, MICRO, ONCE, PER_REPLICA, REPLICA, Mesh, PerInstance, Select, prefix
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.verify.loops import loop_faults
from autograph_rewrite.ops.traits import BACK_EDGES, SWITCHES, has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.collectives.all_gather import RESTORES
from autograph_rewrite.passes.micro_batches.loop_bodies import Cluster, LoopBodies
from autograph_rewrite.passes.micro_batches.relax_waits import let_actors_wait, relax_waits
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL, Loop
from autograph_rewrite.plan.parts.pipeline_schedule import FORWARD


def roll_micro_batches(graph: Graph, mesh: Mesh, slices: Mapping[Value, Value], roots: Iterable[Node]) -> None:
    """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

    Args:
        graph: the folded graph, complete.
        mesh: of this process.
        slices: by block, what it was cut out of.
        roots: what the outside needs.

    Raises:
        PassError: something cannot be done in a loop; the message says what.
    """
    order, unconditional = order_of_bodies(graph, slices, list(roots))
    if not any(node.span == EACH for node in order):
        return
    all_of_it = Cluster(FORWARD, 0)
    loop = Loop(graph, [prefix(r) for r in range(mesh.size(REPLICA))], mesh.size(MICRO))
    LoopBodies(graph, {FORWARD: loop}).fill(order, unconditional, lambda _: all_of_it, mesh)
    for node in graph:
        if node.span == PER_REPLICA:
            node.set_span(EACH)  # as the loop has it now: an instance for each replica
    require_closed(graph)


def require_closed(graph: Graph) -> None:
    """Make sure that no loop waits for its own end: the step would end without values, and without an error.

    Raises:
        PassError: one does.
    """
    for fault in loop_faults(topological_order(graph)):
        raise PassError(fault.problem, node=fault.node, hint=UNROLL)


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
    _join_before_branches(graph)
    hoist_batch_counts(graph, slices)
    eliminate_dead_code(graph, kept)
    order = let_actors_wait(graph, count_first=False)
    _refuse_what_meets(order)
    return order, unconditional_nodes(order)


def _join_before_branches(graph: Graph) -> None:
    """Let what reads all micro-batches in a branch, as the message of an assertion does, read them before it.

    before   %x ──► Switch each ──► ConcatV2(all)             a loop cannot keep what is there only sometimes
    after    %x ──► ConcatV2(all) ──► Switch once
    """
    pending = [n for n in topological_order(graph) if has(n.op, "joins") and Select.ALL in n.selects.values()]
    while pending:
        node = pending.pop()
        value = node.inputs[0]
        switch = value.node
        if switch.op not in SWITCHES or switch.span != EACH or switch.inputs[1].node.span != ONCE:
            continue
        before = copy_node(graph, node, [switch.inputs[0], *node.inputs[1:]], name=f"{node.name}/before")
        before.set_inputs(before.inputs, node.selects)
        pending.append(before)
        inputs = [before.output(), switch.inputs[1]]
        branch = Builder(graph, f"{node.name}/branch", switch, span=node.span).node("Switch", *inputs)
        become(node, "Identity", [branch.output(value.index)], {"T": value.dtype})


def _refuse_what_meets(order: list[Node]) -> None:
    """Refuse loops of the user's, and values of the whole batch that each micro-batch needs.

    Raises:
        PassError: there is one.
    """
    frames = frames_of(order)
    levels = barrier_depths(order, frames, ())
    for node in order:
        if node.span == EACH and node in frames:
            raise PassError(f"'{node.name}' is in a loop of its own", node=node, hint=UNROLL)
        if node.span == EACH and node.op != "Const" and levels[node]:
            problem = f"'{node.name}' {needed_of_all(node, levels)}, and runs in each iteration of a loop"
            raise PassError(problem, node=node, hint=UNROLL)


# Hoist counts over the batch (how many examples a mask keeps) out of the micro-batches that need them.
#
#     before   %block ──► Greater ──► Sum each ──► AddN(all) ──► each
#     after    %batch ──► Greater ──► Sum once ─────────────────► each
#
#     before   %block ──► f each ──► ConcatV2(all) ──► rows in their order ──► each        micro-batches interleaved
#     after    %batch ──► f once ────────────────────────────────────────────► each
#
#     before   %block ──► Shape each ──► [1] of the first ──► each
#     after    %batch ──► Shape once ──► [1] ───────────────► each
#
# What is the same in all blocks is what the original makes of the whole batch. It needs no variable, so there is no
# gradient, and nothing to keep. It waits for none either: what does comes when the graph says, which is behind the
# loop.


def hoist_batch_counts(graph: Graph, slices: Mapping[Value, Value]) -> None:
    """Rewrite what joins values of all blocks for the blocks themselves.

    Args:
        graph: the folded graph.
        slices: by block, what it was cut out of.

    Raises:
        PassError: such a value depends on the number of the block, or is made in a loop.
    """
    order = topological_order(graph)
    late = late_nodes(order)
    made: dict[Value, Value] = {}
    _leave_in_order(order, late)
    needed = ancestors(node for node in order if node.span == EACH)
    for node in order:
        if node in late or node not in needed or not node.selects:
            continue
        if Select.ALL not in node.selects.values():
            for index in tuple(node.selects):
                node.set_input(index, _whole(graph, node.inputs[index], slices, made))
            select_first(node)
            continue
        if node.span == PER_REPLICA or node.inputs[0].node.span != EACH:
            continue  # a part of the whole; whoever needs it in a micro-batch is refused by name
        if not has(node.op, "joins"):
            raise PassError(
                f"{node.op} '{node.name}' reads all micro-batches before they begin",
                node=node,
                hint=UNROLL,
            )
        try:
            whole = _whole(graph, node.inputs[0], slices, made)
        except PassError:
            continue  # whoever needs it in a micro-batch is refused by name
        _stand_for(node, _as_only_row(node, whole) if node.op == "Pack" else whole)


def _leave_in_order(order: Sequence[Node], late: Collection[Node]) -> None:
    """Let nobody restore the order of rows that are not taken out of it."""
    needed = ancestors(node for node in order if node.span == EACH)
    for node in order:
        if RESTORES in node.attrs and node in needed and node not in late:
            _stand_for(node, node.inputs[0])


def _stand_for(node: Node, value: Value) -> None:
    """Let what read or awaited a node that joins all parts read or await a value of the whole."""
    node.output().replace_all_uses_with(value)
    for user in node.control_users:
        user.remove_control(node)
        user.add_control(value.node)


def _as_only_row(node: Node, whole: Value) -> Value:
    """Return what a fold over the parts' rows gives back: there is one part."""
    return Builder.at(node).op("Pack", whole, what="whole", N=1, axis=0)


def _whole(graph: Graph, value: Value, slices: Mapping[Value, Value], made: dict[Value, Value]) -> Value:
    """Return a value as it is of the whole batch."""
    if value in slices:
        return slices[value]
    if value.node.span != EACH:
        return value
    if value not in made:
        node = value.node
        if node.op in BACK_EDGES:
            raise PassError(f"'{node.name}' is in a loop of its own", node=node, hint=UNROLL)
        if any(isinstance(raw, PerInstance) for raw in node.attrs.values()):
            raise PassError(
                f"'{node.name}' differs between micro-batches, and all of them need it before they begin",
                node=node,
                hint=UNROLL,
            )
        inputs = [_whole(graph, one, slices, made) for one in node.inputs]
        controls = [control for control in node.controls if control.span != EACH]
        copy = copy_node(graph, node, inputs, name=f"{node.name}/whole", controls=controls)
        copy.set_span(ONCE)
        select_first(copy)
        made |= {other: copy.output(other.index) for other in node.read_outputs}
    return made[value]
