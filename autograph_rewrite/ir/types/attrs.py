r"""Converts attribute values between wire bytes and Python values, decoding only when asked.

    b"0\x01" ◄─encode(kind="type")── 1 ──decode──► 1

Kinds are those of OpDef: type, int, float, bool, string, shape, tensor, func, and `list(...)` of each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.protos import Message, proto
from autograph_rewrite.ir.types.wire import varint

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class FunctionName:
    """A function-valued attribute: the function's name and the raw values of the function's attributes."""

    name: str
    attrs: tuple[tuple[str, bytes], ...] = ()


_NEGATIVE = 1 << 64
_MOST_KEPT = 2**16
"""Largest array, in bytes, that is decoded once and shared by all nodes that have it."""
_MOST_FILLED = 2**29
"""Largest array, in bytes, of which a file states the first elements only; the last of them fills the rest."""


def decode(raw: bytes) -> Any:  # the value's type depends on the attribute's kind
    """Return the Python value of a raw AttrValue.

    type, int -> int; string -> bytes; shape -> tuple of int or None (None when the rank is unknown);
    tensor -> numpy array, or the TensorProto where numpy has no such element type; list -> tuple.
    """
    if len(raw) > 256:
        return _decode(raw)
    try:
        return _decode_small(raw)
    except _LargeError:
        return _decode(raw)


class _LargeError(Exception):
    """A few bytes encode an array that is too large to cache."""


def _decode(raw: bytes) -> Any:
    try:
        value = proto("AttrValue").FromString(raw)
        which = value.WhichOneof("value")
        return None if which is None else _python(which, getattr(value, which))
    except (DecodeError, ValueError, OverflowError) as error:
        raise GraphError(f"an attribute is malformed ({error})") from None


@lru_cache(maxsize=65536)
def _decode_small(raw: bytes) -> Any:
    value = _decode(raw)
    if isinstance(value, np.ndarray):
        if value.nbytes > _MOST_KEPT and not is_splat(value):
            raise _LargeError
        value.setflags(write=False)  # shared by every node with the same bytes
    return value


def _python(which: str, value: Any) -> Any:
    if which == "list":
        for field, items in value.ListFields():
            return tuple(_python(field.name, item) for item in items)
        return ()
    return _READ[which](value) if which in _READ else value


def _function(value: Message) -> FunctionName:
    attrs = ((key, item.SerializeToString(deterministic=True)) for key, item in value.attr.items())  # type: ignore[attr-defined]
    return FunctionName(value.name, tuple(sorted(attrs)))  # type: ignore[attr-defined]


def decode_shape(shape: Any) -> Shape | None:
    """Return a TensorShapeProto as a tuple, None for unknown dimensions, or None for an unknown rank."""
    if shape.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in shape.dim)


_VALUE_FIELDS = {
    dtypes.FLOAT: "float_val", dtypes.DOUBLE: "double_val", dtypes.INT32: "int_val", dtypes.UINT8: "int_val",
    dtypes.INT16: "int_val", dtypes.INT8: "int_val", dtypes.UINT16: "int_val", dtypes.INT64: "int64_val",
    dtypes.BOOL: "bool_val", dtypes.UINT32: "uint32_val", dtypes.UINT64: "uint64_val",
}  # fmt: skip


def decode_tensor(tensor: Any) -> Any:
    """Return a TensorProto as a numpy array, or unchanged where its element type has no simple numpy form."""
    dtype = dtypes.numpy_dtype(tensor.dtype)
    if dtype is None:
        return tensor
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    size = int(np.prod(shape, dtype=np.int64))
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype=dtype).reshape(shape).copy()
    values: Any  # an array whose element type is known at run time only
    if tensor.dtype == dtypes.HALF:
        values = np.array(tensor.half_val, dtype=np.uint16).view(np.float16)
    elif tensor.dtype == dtypes.COMPLEX64:
        values = np.array(tensor.scomplex_val, dtype=np.float32).view(np.complex64)
    elif tensor.dtype == dtypes.COMPLEX128:
        values = np.array(tensor.dcomplex_val, dtype=np.float64).view(np.complex128)
    elif tensor.dtype in _VALUE_FIELDS:
        values = np.array(getattr(tensor, _VALUE_FIELDS[tensor.dtype]), dtype=dtype)
    else:
        return tensor
    if values.size == size:
        return values.reshape(shape)
    # TensorFlow leaves out trailing repeats of the last value, and everything when all are zero.
    fill = values[-1] if values.size else dtype.type(0)
    if values.size <= 1:
        return np.broadcast_to(fill, shape)  # a gigabyte of zeros takes a few bytes, here as in the file
    if size * dtype.itemsize > _MOST_FILLED:
        raise ValueError(f"a tensor of {size:,} elements states {values.size:,} of them")
    whole = np.full(size, fill, dtype=dtype)
    whole[: values.size] = values
    return whole.reshape(shape)


_READ: dict[str, Callable[[Any], Any]] = {"shape": decode_shape, "tensor": decode_tensor, "func": _function}


def is_splat(array: Any) -> bool:
    """Return whether one number in memory stands for all elements of an array of several."""
    return bool(array.size > 1 and not any(array.strides))


def splat_element(array: Any) -> Any:
    """Return the number that stands for all elements, without an array of them."""
    return array[(0,) * array.ndim]


def encode(kind: str, value: Any) -> bytes:
    """Return the raw AttrValue for a Python value of an OpDef attribute kind.

    Raises:
        TypeError: the value cannot be of that kind.
    """
    if kind == "type":
        return b"0" + varint(int(value))
    if kind == "int":
        return b"\x18" + varint(int(value) % _NEGATIVE)
    if kind == "bool":
        return b"(\x01" if value else b"(\x00"
    if kind == "float":
        return b"%" + struct.pack("<f", value)
    if kind == "string":
        text = value.encode() if isinstance(value, str) else bytes(value)
        return b"\x12" + varint(len(text)) + text
    message = proto("AttrValue")()
    if kind in _PUT:
        _PUT[kind](getattr(message, kind), value)
    elif kind.startswith("list("):
        _put_list(message.list, kind[5:-1], value)
    else:
        raise TypeError(f"unknown attribute kind '{kind}'")
    raw: bytes = message.SerializeToString(deterministic=True)
    return raw


def _put_shape(message: Any, shape: Sequence[int | None] | None) -> None:
    message.SetInParent()
    if shape is None:
        message.unknown_rank = True
        return
    for dim in shape:
        message.dim.add().size = -1 if dim is None else int(dim)


def _put_tensor(message: Any, value: Any) -> None:
    if isinstance(value, Message):
        message.CopyFrom(value)
        return
    array = np.asarray(value)
    if array.dtype.kind in "SU" or array.dtype == object:
        array = np.asarray(value, dtype=object)  # numpy's fixed-width strings lose trailing zero bytes
        message.dtype = dtypes.STRING
        message.string_val.extend(v.encode() if isinstance(v, str) else bytes(v) for v in array.ravel())
    else:
        message.dtype = dtypes.from_numpy(array.dtype)
        if not is_splat(array) or not _put_element(message, splat_element(array)):
            message.tensor_content = array.astype(array.dtype.newbyteorder("="), copy=False).tobytes()
    _put_shape(message.tensor_shape, array.shape)


def _put_element(message: Any, element: Any) -> bool:
    """Write one element that stands for the whole tensor; return whether its type has a field for that."""
    if message.dtype == dtypes.HALF:
        message.half_val.append(int(element.view(np.uint16)))
    elif message.dtype == dtypes.COMPLEX64:
        message.scomplex_val.extend((element.real, element.imag))
    elif message.dtype == dtypes.COMPLEX128:
        message.dcomplex_val.extend((element.real, element.imag))
    elif message.dtype in _VALUE_FIELDS:
        getattr(message, _VALUE_FIELDS[message.dtype]).append(element.item())
    else:
        return False
    return True


def _put_function(message: Any, value: FunctionName) -> None:
    message.name = value.name
    for key, raw in value.attrs:
        message.attr[key].CopyFrom(proto("AttrValue").FromString(raw))


_PUT: dict[str, Callable[[Any, Any], None]] = {"shape": _put_shape, "tensor": _put_tensor, "func": _put_function}
_LIST_FIELDS = {"type": "type", "int": "i", "bool": "b", "float": "f", "string": "s"}


def _put_list(message: Any, kind: str, values: Sequence[Any]) -> None:
    message.SetInParent()
    if kind in _LIST_FIELDS:
        items = [v.encode() if isinstance(v, str) else v for v in values]
        getattr(message, _LIST_FIELDS[kind]).extend(items)
        return
    for value in values:
        _PUT[kind](getattr(message, kind).add(), value)
