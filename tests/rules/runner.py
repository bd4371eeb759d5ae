"""Run one op eagerly by its type name, on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode, encode
from autograph_rewrite.ir.types.opdefs import get_op, signature
from tests.rules.sample import Elements


def number_of(dtype: np.dtype[Any]) -> int:
    """Return TensorFlow's number for an element type; objects are strings."""
    return dtypes.STRING if dtype.kind in "OSU" else dtypes.from_numpy(dtype)


def number_of_input(array: np.ndarray) -> int:
    """Return the element type of the tensor that an input stands for: a list is its handle."""
    return dtypes.VARIANT if isinstance(array, Elements) else number_of(array.dtype)


def run(op: str, inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """Return the outputs of one call; a list comes back as its stacked elements."""
    import tensorflow as tf
    from tensorflow.python.eager import context, execute

    kinds = get_op(op).attrs
    chosen = {key: decode(a.default) for key, a in kinds.items() if a.kind == "type" and a.default is not None}
    whole = {**chosen, **deciding(op, inputs), **attrs}
    raw = {key: encode(kinds[key].kind, value) for key, value in whole.items()}
    count = len(signature(op, {**_defaults(op), **raw})[1])
    values = [_handle(tf, a) if isinstance(a, Elements) else tf.constant(a) for a in inputs]
    flat = tuple(item for pair in whole.items() for item in pair)
    with tf.device("CPU:0"):
        results = execute.quick_execute(op, count, values, flat, context.context())
    dtype = whole.get("element_dtype") or next((number_of(a.dtype) for a in inputs), None)
    return [_array(tf, value, dtype) for value in results or ()]


def _defaults(op: str) -> dict[str, bytes]:
    return {key: attr.default for key, attr in get_op(op).attrs.items() if attr.default is not None}


def deciding(op: str, inputs: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the attributes that follow from the inputs: element types and counts."""
    arguments = get_op(op).inputs
    several = [bool(a.number_attr or a.type_list_attr) for a in arguments]
    each = (len(inputs) - several.count(False)) // several.count(True) if any(several) else 0
    found: dict[str, Any] = {}
    at = 0
    for argument, many in zip(arguments, several, strict=True):
        mine = inputs[at : at + (each if many else 1)]
        at += len(mine)
        if argument.number_attr:
            found[argument.number_attr] = len(mine)
        if argument.type_list_attr:
            found[argument.type_list_attr] = [number_of_input(a) for a in mine]
        elif argument.type_attr:
            found[argument.type_attr] = number_of_input(mine[0])
    return found


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


def _handle(tf: Any, stacked: np.ndarray) -> Any:
    return tf.raw_ops.TensorListFromTensor(tensor=tf.constant(np.asarray(stacked)), element_shape=-1)


def _array(tf: Any, value: Any, dtype: int | None) -> np.ndarray:
    if value.dtype != tf.variant:
        return np.asarray(value.numpy())
    stacked = tf.raw_ops.TensorListStack(input_handle=value, element_shape=-1, element_dtype=tf.as_dtype(dtype))
    return np.asarray(stacked.numpy()).view(Elements)
