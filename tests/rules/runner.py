"""Run one op eagerly by its type name, on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.opdefs import get_op
from tests.rules.sample import Elements


def number_of(dtype: np.dtype) -> int:
    """Return TensorFlow's number for an element type; objects are strings."""
    return dtypes.STRING if dtype.kind in "OSU" else dtypes.from_numpy(dtype)


def list_dtype() -> int:
    """Return the element type of a tensor list's handle."""
    return dtypes.VARIANT


def run(op: str, inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the outputs of one call; a list comes back as its stacked elements."""
    import tensorflow as tf

    element = next((a for a in inputs if isinstance(a, Elements)), None)
    values = [_handle(tf, a) if isinstance(a, Elements) else tf.constant(a) for a in inputs]
    arguments = dict(zip([a.name for a in get_op(op).inputs], _grouped(op, values), strict=True))
    with tf.device("CPU:0"):
        result = getattr(tf.raw_ops, op)(**arguments, **_typed(tf, attrs))
    flat = [] if result is None else tf.nest.flatten(result)
    return [_array(tf, value, element, inputs, attrs) for value in flat]


_KEPT: dict[Any, list[np.ndarray]] = {}


def run_once(op: str, inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """Like `run`, but a call with the same contents as an earlier one is not repeated."""
    contents = tuple((a.shape, a.dtype.str, a.tobytes() if a.dtype != object else repr(a)) for a in inputs)
    key = op, repr(attrs), contents
    if key not in _KEPT:
        if len(_KEPT) > 4096:
            _KEPT.clear()
        _KEPT[key] = run(op, inputs, attrs)
    return _KEPT[key]


def _typed(tf: Any, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Element types are numbers in an Op, and types for TensorFlow."""
    kinds = ("T", "dtype", "type", "Type")
    return {
        key: tf.as_dtype(value) if key.endswith(kinds) and isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in attrs.items()
    }


def _grouped(op: str, values: list[Any]) -> list[Any]:
    """Gather the inputs of each argument that takes several."""
    arguments = get_op(op).inputs
    several = [bool(a.number_attr or a.type_list_attr) for a in arguments]
    if not any(several):
        return values
    each = (len(values) - several.count(False)) // several.count(True)
    grouped: list[Any] = []
    at = 0
    for many in several:
        grouped.append(values[at : at + each] if many else values[at])
        at += each if many else 1
    return grouped


def _handle(tf: Any, stacked: np.ndarray) -> Any:
    return tf.raw_ops.TensorListFromTensor(tensor=tf.constant(np.asarray(stacked)), element_shape=-1)


def _array(tf: Any, value: Any, element: Any, inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> np.ndarray:
    if value.dtype != tf.variant:
        return np.asarray(value.numpy())
    dtype = attrs.get("element_dtype") or tf.as_dtype((element if element is not None else inputs[0]).dtype)
    stacked = tf.raw_ops.TensorListStack(input_handle=value, element_shape=-1, element_dtype=tf.as_dtype(dtype))
    return np.asarray(stacked.numpy()).view(Elements)
