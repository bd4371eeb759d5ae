"""Turn the barrier of `tf.recompute_grad` (zero added to its inputs) into a control edge from the gradient.

    before   x' = x + where(b == b, 0, nan),  b = cast(max(reshape(dy, [-1])[:1]), bool)      the first row of all
    after    x' = Identity(x) ^dy                                                             each block its gradient

The zero is there so that XLA, which ignores control edges, computes the segment late. It reads the first element of the
whole batch, for which neither a micro-batch nor a stage could wait. Source: `recompute_grad` of
tensorflow/python/ops/custom_gradient.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes

FIRST_ELEMENT = ("Cast", "Max", "StridedSlice", "Reshape")
"""What leads from a gradient to the truth value of its first element, the last op first."""


def wait_by_control_edges(graph: Graph) -> int:
    """Replace the additions of zero by edges, in place; return how many there were."""
    count = 0
    for node in [node for node in graph if node.op == "SelectV2"]:
        gradient = _awaited(node)
        if gradient is None:
            continue
        for add, other in _additions(node.output()):
            if add.input_dtypes[0] not in dtypes.INEXACT:
                continue
            become(add, "Identity", [other], {"T": add.input_dtypes[0]})
            add.add_control(gradient.node)
            count += 1
    return count


def _awaited(select: Node) -> Value | None:
    """Return the gradient whose first element decides between zero and no number, if that is what it is."""
    condition, zero, fault = select.inputs
    equal = condition.node
    if equal.op != "Equal" or equal.inputs[0] is not equal.inputs[1] or equal.inputs[0].dtype != dtypes.BOOL:
        return None
    if not (_is_constant(zero, 0.0) and _is_constant(fault, np.nan)):
        return None
    value = equal.inputs[0]
    for op in FIRST_ELEMENT:
        if value.node.op != op:
            return None
        value = value.node.inputs[0]
    return value


def _additions(zero: Value) -> Iterator[tuple[Node, Value]]:
    """Yield what adds the zero to something, and to what."""
    for user, index in zero.uses:
        if user.op == "Cast":
            yield from _additions(user.output())
        elif user.op == "AddV2":
            yield user, user.inputs[1 - index]


def _is_constant(value: Value, content: float) -> bool:
    found = value.node.attr("value") if value.node.op == "Const" else None
    return isinstance(found, np.ndarray) and found.shape == () and np.array_equal(found, content, equal_nan=True)
