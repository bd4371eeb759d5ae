"""The variables that an optimizer keeps for another one: they are cut as that one is.

    ResourceApplyAdam(w, m, v, ...)                  m and v are written together with w
    m := b m + dw;  w := w - rate m                  m has w's shape, and serves no variable but w

Nothing here goes by names or by kinds of optimizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.rules import TABLE
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.resources import is_handle, source, writes, written
from autograph_rewrite.item import Variable
from autograph_rewrite.passes.partition_place import dense_inputs, updates_rows

_PASSES = frozenset(("elementwise", "gather", "control", "layout", "pieces", "slicing", "segment"))
"""The families of rules through which contents of a slot come to an update, also row by row."""
MAX_REACH = 400
"""How many values to look at for the slots behind one update."""


def slots_of(
    state: Propagation,
    owner: Node,
    variables: Mapping[Node, Variable],
    by_handle: Mapping[Node, list[Node]],
    taken: Collection[Node],
) -> list[Node]:
    """Return the handles of the slots of one variable.

    Args:
        state: placements of the graph.
        owner: the node that gives the variable's handle.
        variables: all variables, by that node.
        by_handle: the updates of one step, by that node.
        taken: variables that are cut for their own sake.
    """
    shape = variables[owner].shape
    group = {owner: None}
    pending = [owner]
    while pending:
        handle = pending.pop()
        for update in by_handle.get(handle, ()):
            together = [node for node in written(update) if node in variables]
            read = [node for node in _read_by(state, update) if _serves_only(node, {*group, node})]
            for node in (*together, *read):
                alike = node in variables and variables[node].shape == shape
                if node not in group and node not in taken and alike:
                    group[node] = None
                    pending.append(node)
    return [node for node in group if node is not owner]


def _read_by(state: Propagation, update: Node) -> Iterable[Node]:
    """Return the variables from which an update is computed element by element, or row by row."""
    if updates_rows(update):
        positions: Iterable[int] = [i for i, value in enumerate(update.inputs) if not is_handle(value)]
    else:
        positions = dense_inputs(update)
    pending = deque(update.inputs[i] for i in positions)
    seen = set(pending)
    found: dict[Node, None] = {}
    while pending and len(seen) < MAX_REACH:
        value = pending.popleft()
        node = value.node
        if node.op in ("ReadVariableOp", "ResourceGather"):
            found[source(node.inputs[0])] = None
            continue
        rule = TABLE.get(node.op)
        if rule is None or rule.family not in _PASSES or _is_scalar(state, value):
            continue
        new = [other for other in node.inputs if other not in seen]
        seen.update(new)
        pending += new
    return found


def _is_scalar(state: Propagation, value: Value) -> bool:
    return state.facts[value].shape == ()


def _serves_only(handle: Node, group: Collection[Node]) -> bool:
    """Return whether what is read from a variable decides about the contents of a group of variables only."""
    pending = [handle]
    seen = {handle}
    while pending:
        node = pending.pop()
        for value in node.read_outputs:
            for reader, _ in value.uses:
                if writes(reader.op) and any(other not in group for other in written(reader)):
                    return False
                if reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
    return True
