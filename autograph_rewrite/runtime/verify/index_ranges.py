"""Valid ranges of integer inputs, found where the graph uses them as indices.

ids ─► Reshape ─► ResourceGather(table of 100 rows)          0 .. 99
labels ─► Cast ─► SparseSoftmaxCrossEntropy(10 classes)      0 .. 9
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograph_rewrite.ops.traits import has
from autograph_rewrite.requires import tensorflow

# Ops that hand values on unchanged, by the inputs that they hand on (None: any of them).
_FIRST = """
    Cast Identity Reshape Squeeze ExpandDims Transpose StridedSlice Slice SplitV Unpack Tile Reverse ReverseV2 Unique
    UniqueV2 Gather GatherV2 GatherNd BroadcastTo EnsureShape Snapshot StopGradient PreventGradient Switch Enter Exit
    NextIteration PlaceholderWithDefault TensorListFromTensor TensorListGetItem TensorListStack
"""
_ANY = "Pack ConcatV2 Merge IdentityN SelectV2"
_HANDS_ON: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(_FIRST.split(), (0,)),
    **dict.fromkeys(_ANY.split(), None),
    "Split": (1,),
}


def _last(op: Any, tf: Any) -> int | None:
    """Classes, of the logits in input 0."""
    shape = op.inputs[0].shape
    return shape[-1] if shape.rank else None


def _rows(op: Any, tf: Any) -> int | None:
    """Size of the indexed dimension of a table."""
    table = op.inputs[0].shape
    axis = tf.get_static_value(op.inputs[2]) if len(op.inputs) > 2 else 0
    return table[int(axis)] if axis is not None and table.rank else None


def _variable_rows(op: Any, tf: Any) -> int | None:
    """Rows of a table that is a variable."""
    handle = op.inputs[0].op
    while has(handle.type, "carries") and handle.inputs:
        handle = handle.inputs[0].op
    if handle.type != "VarHandleOp":
        return None
    shape = tf.TensorShape(handle.get_attr("shape"))
    return shape[0] if shape.rank else None


def _constant(index: int) -> Callable[[Any, Any], int | None]:
    def limit(op: Any, tf: Any) -> int | None:
        value = tf.get_static_value(op.inputs[index])
        return None if value is None or value.size != 1 else int(value)

    return limit


# Ops that use values as indices: the input that holds them, and how to find their limit.
_INDEXES: dict[str, tuple[int, Callable[[Any, Any], int | None]]] = {
    "SparseSoftmaxCrossEntropyWithLogits": (1, _last),
    "InTopKV2": (1, _last),
    "InTopK": (1, _last),
    "Gather": (1, _rows),
    "GatherV2": (1, _rows),
    "ResourceGather": (1, _variable_rows),
    "OneHot": (0, _constant(1)),
    "UnsortedSegmentSum": (1, _constant(2)),
    "UnsortedSegmentMax": (1, _constant(2)),
    "UnsortedSegmentMin": (1, _constant(2)),
    "UnsortedSegmentProd": (1, _constant(2)),
}


def index_limit(tensor: Any) -> int | None:
    """Return the number that all values of a tf.Tensor must stay below, None where nothing indexes with them."""
    tf = tensorflow()
    limits: list[int] = []
    for op, position in _reached(tensor):
        if op.type in _INDEXES and _INDEXES[op.type][0] == position:
            limit = _INDEXES[op.type][1](op, tf)
            if limit:
                limits.append(limit)
    return min(limits, default=None)


def is_distribution(tensor: Any) -> bool:
    """Return whether a tf.Tensor is used as the labels of a softmax cross entropy: rows that sum to one."""
    return any(op.type == "SoftmaxCrossEntropyWithLogits" and position == 1 for op, position in _reached(tensor))


def _reached(tensor: Any) -> list[tuple[Any, int]]:
    """Return the ops that values of a tensor reach unchanged, with the position of the input that takes them."""
    found = []
    seen = {tensor.name}
    pending = [tensor]
    while pending:
        current = pending.pop()
        for op in current.consumers():
            for position, value in enumerate(op.inputs):
                if value is not current and value.name != current.name:
                    continue
                found.append((op, position))
                positions = _HANDS_ON.get(op.type, ())
                if positions is None or position in positions:
                    fresh = [output for output in op.outputs if output.name not in seen]
                    seen.update(output.name for output in fresh)
                    pending += fresh
    return found
