"""Trip counts of loops, and the memory of the lists that a loop fills for its gradient.

forward    EmptyTensorList ──► Merge ──► Push(list, h) ──► NextIteration        32 times: 32 h are alive
backward   ──► Merge ──► Pop(list)                                              as often as was pushed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autograph_rewrite.analysis.facts.concrete_sizes import Sizes
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.work.op_work import VIEWS
from autograph_rewrite.ir.control_flow import Frame
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.shapes.functions import constant

_PUSHES = {"TensorListPushBack": 1, "TensorListSetItem": 2, "StackPushV2": 1, "TensorArrayWriteV3": 2}
"""The input that each of them puts into a list."""
_FILLED = {"TensorListFromTensor": 0, "TensorArrayScatterV3": 2}
"""The input of which they make a whole list."""
_TAKES = frozenset(("TensorListPopBack", "StackPopV2", "TensorListGetItem", "TensorArrayReadV3"))
_LISTS = frozenset((*_PUSHES, *_TAKES, "TensorArrayScatterV3"))
LIST_VIEWS = frozenset(("TensorListPushBack", "TensorListSetItem", *_TAKES))
"""Their output shares the memory of the list that they are given."""
_KNOWN = frozenset(("ReadVariableOp", "VarHandleOp", "Const", "Placeholder"))
"""What is kept anyway: a list of it takes no memory."""


def _no_number(value: Value) -> int:
    return 0


def trips_of(
    order: Iterable[Node], frames: Mapping[Node, Frame], number: Callable[[Value], int] = _no_number
) -> dict[Frame, int]:
    """Return how often loops run: those that count to a known number, and those that take what these put into lists.

    Args:
        order: of the nodes.
        frames: the loops of those that are in one.
        number: tells what a value is that is no constant; 0 where that is not known.
    """
    nodes = list(order)
    conditions = [node for node in nodes if node.op == "LoopCond"]
    found = {frames.get(node, ()): bound for node in conditions if (bound := _bound(node, number))}
    put = {_made(node): frames[node] for node in nodes if node.op in _PUSHES and node in frames}
    for node in nodes:
        if node.op in _TAKES and node in frames and (there := put.get(_made(node))) in found:
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
        state: a propagation.
        frames: the loops around each node.
        trips: iterations of each loop.
        sizes: numbers for the symbols of shapes.
    """
    found: dict[Node, int] = {}
    seen: set[Value] = set()
    for node in state.order:
        index = _PUSHES.get(node.op, _FILLED.get(node.op))
        if index is None:
            continue
        value = _origin(node.inputs[index])
        if value in seen or value.node.op in _KNOWN:
            continue
        seen.add(value)
        count = runs(frames.get(node, ()), trips) if node.op in _PUSHES else 1
        maker = node if node.op == "TensorListFromTensor" else _made(node)
        found[maker] = found.get(maker, 0) + sizes.nbytes(state.source(node.inputs[index])) * count
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
    while node.inputs and (node.op in VIEWS or node.op in _LISTS):
        node = node.inputs[0].node
    return node


def _origin(value: Value) -> Value:
    """Return the value whose memory a value shares; a state has that of the iteration before."""
    value = _viewed(value)
    back = [one.node for one in value.node.inputs if one.node.op == "NextIteration"] if value.node.op == "Merge" else ()
    return _viewed(back[0].inputs[0]) if back else value


def _viewed(value: Value) -> Value:
    """Return what a value is a view of, in one iteration."""
    while value.node.op in VIEWS and value.node.inputs and value.node.op not in _KNOWN and value.node.op != "Merge":
        value = value.node.inputs[0]
    return value
