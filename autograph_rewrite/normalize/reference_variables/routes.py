"""Dereference references that pass through control flow and are not updated behind it.

    before   RefMerge(Assign(w, a), Assign(w, b)) ──► Mul
    after    Merge(Identity(Assign(w, a)), Identity(Assign(w, b))) ──► Mul

That is what branches and loops make that return assignments. Only a Switch or an Enter has a form for handles that
leads to one variable, so what is updated behind another route stays, and is refused later.
"""

from __future__ import annotations

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import has


def read_before_routes(graph: Graph) -> int:
    """Make the references values, in place; return how many routes were changed."""
    routes = [node for node in graph if has(node.op, "reference_routes")]
    if not any(has(node.op, "joins_references") for node in routes):
        return 0
    needed: set[Node] = set()  # by an update behind them
    changed = True
    while changed:
        more = [node for node in routes if node not in needed and _is_needed(node, needed)]
        needed.update(more)
        changed = bool(more)
    found = dict.fromkeys(n for n in routes if has(n.op, "joins_references") and n not in needed)
    pending = list(found)
    while pending:
        node = pending.pop()
        users = [use.node for value in node.outputs for use in value.uses if has(use.node.op, "reference_routes")]
        pending += [user for user in users if user not in found]
        found |= dict.fromkeys(users)
    for node in found:
        node_type = node.attr("T")
        become(node, node.op.removeprefix("Ref"), node.inputs, {"T": dtypes.base(node_type)})
    for node in found:
        for index, value in enumerate(node.inputs):
            if value.dtype > dtypes.REF_OFFSET:
                read = graph.add("Identity", [value], name=f"{node.name}/read_{index}", origin=node)
                node.set_input(index, read.output())
    return len(found)


def _is_needed(node: Node, needed: set[Node]) -> bool:
    """Return whether something takes an output of a route as a reference, and is no route that could do without."""
    return any(
        use.node in needed or not has(use.node.op, "reference_routes")
        for value in node.outputs
        for use in value.uses
        if use.node.input_dtypes[use.index] > dtypes.REF_OFFSET
    )
