"""Make random batches that a graph can train on: types and shapes fit, labels and ids are within their limits.

The size of the batch is a prime by default, so that replicas get blocks of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ops.traits import has, operands, ops_with
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

Array = np.ndarray[Any, Any]
_PASS_FEEDS = "pass real ones: feeds=[{'x': array, ...}, ...], one dict per step"
_UNKNOWN, _UNKNOWN_PIXELS = 8, 32  # sizes of unknown dimensions other than the batch; rank 4 means images
_SCALAR = 0.1  # plausible both as a learning rate and as a dropout rate


def batch_size(item: TrainingGraph, replicas: int, wanted: int | None = None) -> int:
    """Return the number of examples: that of the inputs, or `wanted`, or the smallest prime above twice `replicas`.

    Raises:
        GraphError: the inputs have different static sizes, or another one than `wanted`.
    """
    fixed = {
        info.name: info.shape[info.batch_axis]
        for info in item.inputs.values()
        if info.batch_axis is not None and info.shape is not None and info.shape[info.batch_axis] is not None
    }
    sizes = {size for size in fixed.values() if size is not None} | ({wanted} if wanted is not None else set())
    if len(sizes) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in fixed.items())
        asked = f", but {wanted} are wanted" if wanted is not None else ""
        raise GraphError(f"the inputs fix the number of examples ({listed}){asked}", hint="leave out batch")
    return next(iter(sizes), None) or _prime_from(2 * replicas + 1)


def _prime_from(number: int) -> int:
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def random_feeds(item: TrainingGraph, *, steps: int, batch: int, seed: int) -> list[dict[str, Array]]:
    """Return one feed dict, by public input name, for each step.

    Args:
        item: in normal form, so that no use of an input is hidden in a function.
        seed: equal seeds give equal feeds.

    Raises:
        GraphError: no values can be made up for the type or rank of an input.
    """
    fed = [info for info in item.inputs.values() if _is_fed(item, info)]
    draws = _draws(item, fed, batch)
    feeds = []
    for step in range(steps):
        rng = np.random.default_rng([seed, step])
        feeds.append({name: draw(rng) for name, draw in draws.items()})
    return feeds


def _is_fed(item: TrainingGraph, info: TensorInfo) -> bool:
    """Return whether an input needs a feed: iterators and defaults that are no batches have values."""
    op = item.graph.node(info.tensor.partition(":")[0]).op
    return has(op, "placeholders") and (op != "PlaceholderWithDefault" or info.batch_axis is not None)


def _draws(item: TrainingGraph, infos: Sequence[TensorInfo], batch: int) -> Mapping[str, Any]:
    tf = tensorflow()
    graph = None
    draws = {}
    for info in infos:
        dtype = tf.as_dtype(info.dtype)
        shape = _shape(info, batch)
        limit, rows = None, False
        if (dtype.is_integer or dtype.is_floating) and shape:
            graph = graph or _import(tf, item)
            tensor = graph.get_tensor_by_name(info.tensor)
            limit = index_limit(tensor)
            rows = dtype.is_floating and is_distribution(tensor)
        if not dtype.is_numpy_compatible or dtype.name in ("resource", "variant"):
            raise GraphError(f"values of type {info.dtype} cannot be made up for input '{info.name}'", hint=_PASS_FEEDS)
        draws[info.name] = partial(_drawn, dtype, shape, limit, rows)
    return draws


def _import(tf: Any, item: TrainingGraph) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(item.graph_def, name="")
    return graph


def _shape(info: TensorInfo, batch: int) -> tuple[int, ...]:
    if info.shape is None:
        raise GraphError(f"the rank of input '{info.name}' is unknown, so no values can be made up", hint=_PASS_FEEDS)
    unknown = _UNKNOWN_PIXELS if len(info.shape) == 4 else _UNKNOWN
    return tuple(
        batch if axis == info.batch_axis else unknown if size is None else size for axis, size in enumerate(info.shape)
    )


def _drawn(dtype: Any, shape: tuple[int, ...], limit: int | None, rows: bool, rng: np.random.Generator) -> Array:
    """Return the values of an input in one step."""
    made = np.asarray(_values(dtype, shape, limit, rows, rng))
    return made if made.dtype == object else made.astype(dtype.as_numpy_dtype)


def _values(dtype: Any, shape: tuple[int, ...], limit: int | None, rows: bool, rng: np.random.Generator) -> Any:
    if dtype.is_bool:
        return rng.random(shape) < 0.75 if shape else True
    if dtype.name == "string":
        return rng.integers(0, 10, shape).astype(str).astype(object)
    if dtype.is_integer or limit is not None:
        return rng.integers(0, limit or 2, shape)
    if dtype.is_complex:
        return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    if not shape:
        return _SCALAR
    if rows:
        weights = rng.random(shape) + 0.01
        return weights / weights.sum(axis=-1, keepdims=True)
    # One number per example is often a weight or a label: positive ones suit both.
    return rng.uniform(0.1, 1.0, shape) if len(shape) == 1 else rng.standard_normal(shape)


# Valid ranges of integer inputs, found where the graph uses them as indices.
#
# ids ─► Reshape ─► ResourceGather(table of 100 rows)          0 .. 99
# labels ─► Cast ─► SparseSoftmaxCrossEntropy(10 classes)      0 .. 9


# Ops that pass values on unchanged, with the positions of those inputs (None: any input).
_HANDS_ON: dict[str, tuple[int, ...] | None] = {
    **{op: operands(op, "hands_on_elements") for op in ops_with("hands_on_elements")},
    **dict.fromkeys(ops_with("hands_on_any"), None),
}


def _last(op: Any, tf: Any) -> int | None:
    """Return the number of classes of the logits in input 0."""
    shape = op.inputs[0].shape
    return shape[-1] if shape.rank else None


def _rows(op: Any, tf: Any) -> int | None:
    """Return the size of the indexed dimension of a table."""
    table = op.inputs[0].shape
    axis = tf.get_static_value(op.inputs[2]) if len(op.inputs) > 2 else 0
    return table[int(axis)] if axis is not None and table.rank else None


def _variable_rows(op: Any, tf: Any) -> int | None:
    """Return the number of rows of a table that is a variable."""
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


# Ops that use values as indices: the position of the indices, and a function that finds their limit.
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
    """Return the bound below which all values of a tf.Tensor must be, None if no op indexes with them."""
    tf = tensorflow()
    limits: list[int] = []
    for op, position in _reached(tensor):
        if op.type in _INDEXES and _INDEXES[op.type][0] == position:
            limit = _INDEXES[op.type][1](op, tf)
            if limit:
                limits.append(limit)
    return min(limits, default=None)


def is_distribution(tensor: Any) -> bool:
    """Return whether a tf.Tensor is the labels of a softmax cross entropy, so that its rows must sum to one."""
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
