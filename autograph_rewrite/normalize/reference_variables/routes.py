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

_VALUE_FORMS = {
    "RefMerge": "Merge",
    "RefExit": "Exit",
    "RefNextIteration": "NextIteration",
    "RefSwitch": "Switch",
    "RefEnter": "Enter",
    "RefIdentity": "Identity",
}
_BEGIN = frozenset(("RefMerge", "RefExit", "RefNextIteration"))


def read_before_routes(graph: Graph) -> int:
    """Make the references values, in place; return how many routes were changed."""
    routes = [node for node in graph if node.op in _VALUE_FORMS]
    if not any(node.op in _BEGIN for node in routes):
        return 0
    needed: set[Node] = set()  # by an update behind them
    changed = True
    while changed:
        more = [node for node in routes if node not in needed and _is_needed(node, needed)]
        needed.update(more)
        changed = bool(more)
    found: dict[Node, None] = dict.fromkeys(node for node in routes if node.op in _BEGIN and node not in needed)
    pending = list(found)
    while pending:
        node = pending.pop()
        users = [use.node for value in node.outputs for use in value.uses if use.node.op in _VALUE_FORMS]
        pending += [user for user in users if user not in found]
        found |= dict.fromkeys(users)
    for node in found:
        node_type = node.attr("T")
        become(node, _VALUE_FORMS[node.op], node.inputs, {"T": dtypes.base(node_type)})
    for node in found:
        for index, value in enumerate(node.inputs):
            if value.dtype > dtypes.REF_OFFSET:
                read = graph.add("Identity", [value], name=f"{node.name}/read_{index}", origin=node)
                node.set_input(index, read.output())
    return len(found)


def _is_needed(node: Node, needed: set[Node]) -> bool:
    """Return whether something takes an output of a route as a reference, and is no route that could do without."""
    return any(
        use.node in needed or use.node.op not in _VALUE_FORMS
        for value in node.outputs
        for use in value.uses
        if use.node.input_dtypes[use.index] > dtypes.REF_OFFSET
    )
