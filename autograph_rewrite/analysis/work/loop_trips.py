"""Trip counts of loops, and the memory of the lists that a loop fills for its gradient.

forward    EmptyTensorList ──► Merge ──► Push(list, h) ──► NextIteration        32 times: 32 h are alive
backward   ──► Merge ──► Pop(list)                                              as often as was pushed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import Frame
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.shapes.recorded import constant
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.traits import has, operands


def _no_number(value: Value) -> int:
    return 0


def trips_of(
    order: Iterable[Node], frames: Mapping[Node, Frame], number: Callable[[Value], int] = _no_number
) -> dict[Frame, int]:
    """Return how often loops run: those that count to a known number, and those that take what these put into lists.

    Args:
        order: of the nodes.
        number: tells what a value is that is no constant; 0 where that is not known.
    """
    nodes = list(order)
    conditions = [node for node in nodes if node.op == "LoopCond"]
    found = {frames.get(node, ()): bound for node in conditions if (bound := _bound(node, number))}
    put = {_made(node): frames[node] for node in nodes if has(node.op, "puts_element") and node in frames}
    for node in nodes:
        if has(node.op, "takes_element") and node in frames and (there := put.get(_made(node))) in found:
            found.setdefault(frames[node], found[there])
    return found


def runs(frame: Frame, trips: Mapping[Frame, int]) -> int:
    """Return how often what is in a loop runs, as far as that is known."""
    count = 1
    for depth in range(1, len(frame) + 1):
        count *= trips.get(frame[:depth], 1)
    return count


def held_in_lists(
    state: Propagation, frames: Mapping[Node, Frame], trips: Mapping[Frame, int], sizes: Sizes
) -> dict[Node, int]:
    """Return the most bytes that each list holds, by the node that makes it; a value in two lists is in the first.

    Args:
        frames: the loops around each node.
        trips: iterations of each loop.
        sizes: numbers for the symbols of shapes.
    """
    found: dict[Node, int] = {}
    seen: set[Value] = set()
    for node in state.order:
        put = operands(node.op, "puts_element") or operands(node.op, "fills_list")
        if not put:
            continue
        value = _origin(node.inputs[put[0]])
        if value in seen or has(value.node.op, "kept"):
            continue
        seen.add(value)
        count = runs(frames.get(node, ()), trips) if has(node.op, "puts_element") else 1
        maker = node if node.op == "TensorListFromTensor" else _made(node)
        found[maker] = found.get(maker, 0) + sizes.nbytes(state.source(node.inputs[put[0]])) * count
    return found


def _bound(condition: Node, number: Callable[[Value], int]) -> int:
    """Return the number that the condition of a loop compares with; 0 where it is not known."""
    pending, bounds = [condition.inputs[0].node], []
    for _ in range(4):  # a condition may be the conjunction of several
        for test in pending:
            if test.op in ("Less", "LessEqual"):
                stated = constant(test.inputs[1])
                bound = int(stated) if stated is not None and stated.ndim == 0 else None
                bound = bound if stated is not None else number(test.inputs[1]) or None
                if bound is not None:
                    bounds.append(bound + (test.op == "LessEqual"))
        pending = [value.node for test in pending if test.op in ("LogicalAnd", "Identity") for value in test.inputs]
    return max(min(bounds), 1) if bounds else 0


def _made(node: Node) -> Node:
    """Return the node that makes the list which a node is given."""
    node = node.inputs[0].node
    while node.inputs and has(node.op, "views", "lists"):
        node = node.inputs[0].node
    return node


def _origin(value: Value) -> Value:
    """Return the value whose memory a value shares; a state has that of the iteration before."""
    value = _viewed(value)
    back = [one.node for one in value.node.inputs if one.node.op == "NextIteration"] if value.node.op == "Merge" else ()
    return _viewed(back[0].inputs[0]) if back else value


def _viewed(value: Value) -> Value:
    """Return what a value is a view of, in one iteration."""
    while has(value.node.op, "views") and value.node.inputs and value.node.op not in ("ReadVariableOp", "Merge"):
        value = value.node.inputs[0]
    return value
