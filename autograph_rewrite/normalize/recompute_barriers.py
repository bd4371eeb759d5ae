"""Turn the barrier of `tf.recompute_grad` (zero added to its inputs) into a control edge from the gradient.

    before   x' = x + where(b == b, 0, nan),  b = cast(max(reshape(dy, [-1])[:1]), bool)      the first row of all
    after    x' = Identity(x) ^dy                                                             each block its gradient

The zero is there so that XLA, which ignores control edges, computes the segment late. It reads the first element of the
whole batch, for which neither a micro-batch nor a stage could wait. In graphs of TensorFlow 1, where b == b asks if
two objects are one, the condition is a constant, and nothing is waited for. Source: `recompute_grad` of
tensorflow/python/ops/custom_gradient.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes

FIRST_ELEMENT = ("Cast", "Max", "StridedSlice", "Reshape")
"""What leads from a gradient to the truth value of its first element, the last op first."""


@dataclass(frozen=True)
class Barrier:
    """What stands before a segment that is computed again.

    Attributes:
        entries: the Identities of its inputs.
        gradient: what they wait for; None where the graph does not say.
    """

    entries: tuple[Node, ...]
    gradient: Node | None


def wait_by_control_edges(graph: Graph) -> list[Barrier]:
    """Replace the additions of zero by edges, in place; return what there was."""
    found = []
    for node in [node for node in graph if node.op == "SelectV2"]:
        if not (_is_constant(node.inputs[1], 0.0) and _is_constant(node.inputs[2], np.nan)):
            continue
        gradient = _awaited(node.inputs[0])
        if gradient is None and not _is_constant(node.inputs[0], True):
            continue
        entries = []
        for add, other in _additions(node.output()):
            become(add, "Identity", [other], {"T": add.input_dtypes[0]})
            if gradient is not None:
                add.add_control(gradient.node)
            entries.append(add)
        if entries:
            found.append(Barrier(tuple(entries), None if gradient is None else gradient.node))
    return found


def _awaited(condition: Value) -> Value | None:
    """Return the gradient whose first element is compared with itself, if that is what a condition does."""
    equal = condition.node
    if equal.op != "Equal" or equal.inputs[0] is not equal.inputs[1] or equal.inputs[0].dtype != dtypes.BOOL:
        return None
    value = equal.inputs[0]
    for op in FIRST_ELEMENT:
        if value.node.op != op:
            return None
        value = value.node.inputs[0]
    return value


def _additions(zero: Value) -> Iterator[tuple[Node, Value]]:
    """Yield what adds the zero to a number, and to which."""
    for user, index in zero.uses:
        if user.op == "Cast":
            yield from _additions(user.output())
        elif user.op == "AddV2" and user.input_dtypes[0] in dtypes.INEXACT | dtypes.INTEGER:
            yield user, user.inputs[1 - index]


def _is_constant(value: Value, content: float) -> bool:
    found = value.node.attr("value") if value.node.op == "Const" else None
    return isinstance(found, np.ndarray) and found.shape == () and np.array_equal(found, content, equal_nan=True)
