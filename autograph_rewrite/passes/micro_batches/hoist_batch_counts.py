"""Hoist counts over the batch (how many examples a mask keeps) out of the micro-batches that need them.

    before   %block ──► Greater ──► Sum each ──► AddN(all) ──► each
    after    %batch ──► Greater ──► Sum once ─────────────────► each

    before   %block ──► f each ──► ConcatV2(all) ──► rows in their order ──► each        micro-batches interleaved
    after    %batch ──► f once ────────────────────────────────────────────► each

    before   %block ──► Shape each ──► [1] of the first ──► each
    after    %batch ──► Shape once ──► [1] ───────────────► each

What is the same in all blocks is what the original makes of the whole batch. It needs no variable, so there is no
gradient, and nothing to keep. It waits for none either: what does comes when the graph says, which is behind the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autograph_rewrite.analysis.barriers import late_nodes
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.copying import copy_node, select_first
from autograph_rewrite.ir.graph import Graph, Node, PerInstance, Select, Span, Value
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ops.traits import BACK_EDGES, has
from autograph_rewrite.passes.collectives.all_gather import RESTORES
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL


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
    needed = ancestors(node for node in order if node.span is Span.EACH)
    for node in order:
        if node in late or node not in needed or not node.selects:
            continue
        if Select.ALL not in node.selects.values():
            for index in tuple(node.selects):
                node.set_input(index, _whole(graph, node.inputs[index], slices, made))
            select_first(node)
            continue
        if node.span is Span.REPLICA or node.inputs[0].node.span is not Span.EACH:
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
        _stand_for(node, _as_only_row(graph, node, whole) if node.op == "Pack" else whole)


def _leave_in_order(order: Sequence[Node], late: Collection[Node]) -> None:
    """Let nobody restore the order of rows that are not taken out of it."""
    needed = ancestors(node for node in order if node.span is Span.EACH)
    for node in order:
        if RESTORES in node.attrs and node in needed and node not in late:
            _stand_for(node, node.inputs[0])


def _stand_for(node: Node, value: Value) -> None:
    """Let what read or awaited a node that joins all parts read or await a value of the whole."""
    node.output().replace_all_uses_with(value)
    for user in node.control_users:
        user.remove_control(node)
        user.add_control(value.node)


def _as_only_row(graph: Graph, node: Node, whole: Value) -> Value:
    """Return what a fold over the parts' rows gives back: there is one part."""
    return graph.add("Pack", [whole], name=f"{node.name}/whole", attrs={"N": 1, "axis": 0}, origin=node).output()


def _whole(graph: Graph, value: Value, slices: Mapping[Value, Value], made: dict[Value, Value]) -> Value:
    """Return a value as it is of the whole batch."""
    if value in slices:
        return slices[value]
    if value.node.span is not Span.EACH:
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
        controls = [control for control in node.controls if control.span is not Span.EACH]
        copy = copy_node(graph, node, inputs, name=f"{node.name}/whole", controls=controls)
        select_first(copy)
        made |= {other: copy.output(other.index) for other in node.read_outputs}
    return made[value]
