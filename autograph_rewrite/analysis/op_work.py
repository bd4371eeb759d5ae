"""Estimate the work of one instance of an op: its family, FLOPs, bytes read and bytes written.

Contractions are counted from shapes, other ops by the elements that they touch, a few operations for each. Views
(Identity, Reshape, reads of variables) do no work: their output is their input's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.ir.control_flow import Frame
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.recorded_shapes import constant
from autograph_rewrite.ir.traversal import ancestors, traced_back
from autograph_rewrite.ir.types.opdefs import OWN
from autograph_rewrite.ir.variable_ops import is_handle, is_update, updates_rows
from autograph_rewrite.ops.facts.concrete_sizes import Shape, Sizes, static_bytes, static_elements
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.registered import FAMILY as REGISTERED
from autograph_rewrite.ops.rules.table import families, rule_of
from autograph_rewrite.ops.traits import has, operands, ops_with

ROW_BYTES = 512
"""Bytes that can be read in sequence while one row of a table that no cache holds is fetched: 0.1 us."""
_OF_RULE = {
    **dict.fromkeys(families("reduce", "pooling", "segment"), "reduce"),
    **dict.fromkeys(families("gather_scatter", "slicing"), "gather"),
    **dict.fromkeys(families("random"), "random"),
}
_COUNTED = {**dict.fromkeys(families("convolutions"), "conv"), REGISTERED: "elementwise"}
"""The kind of the work that a rule states, by the rule's family; matrix products for all other families."""
_VIEWS = ops_with("views") - {"ReadVariableOp", "Merge"}
_HANDS_ON_LIST = ops_with("views") | ops_with("lists")


class Work(NamedTuple):
    """The work of one instance.

    Attributes:
        nbytes: read and written.
    """

    family: str
    flops: float
    nbytes: float


NOTHING = Work("elementwise", 0.0, 0.0)


def is_view(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> bool:
    """Return whether a node aliases the memory of its first input.

    A transposition that changes nothing and a sum over no axis are views, too: TensorFlow copies nothing there.
    """
    if has(node.op, "views"):
        return True
    if node.op == "Transpose" and len(node.inputs) == 2:
        order = constant(node.inputs[1])
        return order is not None and order.tolist() == list(range(order.size))
    return has(node.op, "reduces") and bool(outputs) and inputs[:1] == outputs[:1] and 1 not in outputs[0]


def work_of(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape], nbytes: float) -> Work:
    """Return the work of one instance of a node.

    Args:
        inputs: the shapes that one instance reads.
        outputs: the shapes that it makes.
        nbytes: of all of them together.
    """
    if has(node.op, "free") or node.op in OWN or is_view(node, inputs, outputs):  # edges count the cost of conversions
        return NOTHING
    rule = rule_of(node.op)
    if rule is not None and rule.work is not None:
        try:
            return Work(_COUNTED.get(rule.family, "matmul"), rule.work(node.attr, inputs, outputs), nbytes)
        except (IndexError, ValueError):
            pass  # a shape is not known: count elements
    if updates_rows(node):
        return _rows_updated(node, inputs)
    elements = max((math.prod(shape) for shape in (*inputs, *outputs)), default=0)
    if has(node.op, "transcendental"):
        return Work("transcendental", elements * 2.0, nbytes)
    family = _OF_RULE.get(rule.family, "elementwise") if rule is not None else "elementwise"
    if family == "gather":  # rows that are not looked up are not read
        elements = sum(math.prod(shape) for shape in outputs)
        nbytes = min(nbytes, 12.0 * elements)
        if node.op == "ResourceGather" and outputs and math.prod(inputs[0]) > math.prod(outputs[0]):
            nbytes += _row_bytes(outputs[0], math.prod(inputs[1]))
    return Work(family, float(elements), nbytes)


def _rows_updated(node: Node, inputs: Sequence[Shape]) -> Work:
    """Return the work of an update of some rows: it reads and writes them in the table and in each slot."""
    _, rows = rows_given(node, inputs)
    tables = sum(map(is_handle, node.inputs))
    count = rows[0] if rows else 1
    nbytes = 2.0 * tables * (4.0 * math.prod(rows) + _row_bytes(rows, count))
    return Work("elementwise", 2.0 * tables * math.prod(rows), nbytes)


def rows_given(node: Node, inputs: Sequence[Shape]) -> tuple[Value, Shape]:
    """Return the rows that an update of some rows reads (its largest operand), and their shape."""
    given = [(value, shape) for value, shape in zip(node.inputs, inputs, strict=True) if not is_handle(value)]
    return max(given, key=lambda one: math.prod(one[1]))


def _row_bytes(shape: Shape, count: int) -> float:
    """Return the extra cost of fetching `count` rows, of one shape together, in bytes read in sequence."""
    return float(count) * max(0.0, ROW_BYTES - 4.0 * math.prod(shape) / max(count, 1))


# Trip counts of loops, and the memory of the lists that a loop fills for its gradient.
#
# forward    EmptyTensorList ──► Merge ──► Push(list, h) ──► NextIteration        32 times: 32 h are alive
# backward   ──► Merge ──► Pop(list)                                              as often as was pushed


def trips_of(
    order: Iterable[Node], frames: Mapping[Node, Frame], number: Callable[[Value], int] = lambda value: 0
) -> dict[Frame, int]:
    """Return how often loops run: those that count to a known number, and those that take elements which these put.

    Args:
        number: gives the number in a value that is no constant; 0 where it is not known.
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
    """Return how often the nodes of a frame run, as far as trip counts are known."""
    count = 1
    for depth in range(1, len(frame) + 1):
        count *= trips.get(frame[:depth], 1)
    return count


def held_in_lists(
    state: Propagation, frames: Mapping[Node, Frame], trips: Mapping[Frame, int], sizes: Sizes
) -> dict[Node, int]:
    """Return the most bytes that each list holds, by its maker; a value in two lists counts in the first."""
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
    """Return the node that made the list that a node reads."""
    return traced_back(node.inputs[0], _HANDS_ON_LIST).node


def _origin(value: Value) -> Value:
    """Return the value whose memory a value shares; a loop state shares that of the iteration before."""
    value = _viewed(value)
    back = [one.node for one in value.node.inputs if one.node.op == "NextIteration"] if value.node.op == "Merge" else ()
    return _viewed(back[0].inputs[0]) if back else value


def _viewed(value: Value) -> Value:
    """Return the value that a value is a view of, in one iteration."""
    return traced_back(value, _VIEWS)


# The nodes that a step executes. Like TensorFlow, they leave out gradients that are only waited for.


def executed(order: Iterable[Node], outputs: Iterable[Value]) -> list[Node]:
    """Return the nodes that serve an update, effect or output by data; TensorFlow's dependency optimizer drops others.

    Args:
        order: the nodes that are to run, producers first.
    """
    nodes = list(order)
    effects = [node for node in nodes if is_update(node) or is_pinned(node)]
    kept = ancestors([*effects, *(value.node for value in outputs)], controls=False)
    return [node for node in nodes if node in kept or has(node.op, "orders")]


# The work of a node, and the bytes of a value, for one example: to balance stages, and for rematerialisation. Unknown
# sizes count as one.


def value_bytes(state: Propagation, value: Value) -> int:
    """Return the size of one example's part of a value."""
    fact = state.facts.get(value)
    return 0 if fact is None else static_bytes(fact)


def cost_of(state: Propagation, node: Node) -> float:
    """Return the floating-point operations of a node; for most, one for each element that it makes."""
    facts = [state.facts.get(value) for value in node.inputs]
    made = sum(static_elements(fact) for fact in state.transfers[node].outputs)
    if has(node.op, "matmuls") and facts[0] is not None:
        dims = facts[0].shape or ()
        transposed = node.attr("transpose_a", False) or node.attr("adj_x", False)
        return 2.0 * made * (_size(dims[-2 if transposed else -1]) if len(dims) >= 2 else 1)
    if node.op.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")) and len(facts) > 1 and facts[1] is not None:
        kernel = facts[1].shape or ()
        return 2.0 * made * math.prod(_size(dim) for dim in kernel[:-1])
    if node.op == "Einsum":
        sizes = [static_elements(fact) for fact in facts if fact is not None]
        # [m, k] x [k, n]: the square root of mn * mk * kn is mnk
        return 2.0 * math.sqrt(made * math.prod(sizes)) if len(sizes) == 2 else float(made)
    return float(made)


def _size(dim: Dim) -> int:
    if dim is None:
        return 1
    return dim if isinstance(dim, int) else dim.coef
