"""TensorFlow's element types: their numbers, names and numpy equivalents, without TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

REF_OFFSET = 100
"""A type number above this is the legacy reference type of `number - REF_OFFSET`."""

FLOAT, DOUBLE, INT32, UINT8, INT16, INT8, STRING, COMPLEX64, INT64, BOOL = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
BFLOAT16, UINT16, COMPLEX128, HALF, RESOURCE, VARIANT, UINT32, UINT64 = 14, 17, 18, 19, 20, 21, 22, 23

NAMES: dict[int, str] = {
    0: "invalid", FLOAT: "float32", DOUBLE: "float64", INT32: "int32", UINT8: "uint8", INT16: "int16",
    INT8: "int8", STRING: "string", COMPLEX64: "complex64", INT64: "int64", BOOL: "bool", 11: "qint8",
    12: "quint8", 13: "qint32", BFLOAT16: "bfloat16", 15: "qint16", 16: "quint16", UINT16: "uint16",
    COMPLEX128: "complex128", HALF: "float16",
    RESOURCE: "resource", VARIANT: "variant", UINT32: "uint32", UINT64: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn", 29: "int4", 30: "uint4",
}  # fmt: skip
NUMBERS: dict[str, int] = {name: number for number, name in NAMES.items()}

FLOATING = frozenset((HALF, BFLOAT16, FLOAT, DOUBLE))
COMPLEX = frozenset((COMPLEX64, COMPLEX128))
INEXACT = FLOATING | COMPLEX
INTEGER = frozenset((INT32, INT64, UINT8, INT16, INT8, UINT16, UINT32, UINT64))

_NUMPY: dict[int, type[np.generic]] = {
    FLOAT: np.float32, DOUBLE: np.float64, INT32: np.int32, UINT8: np.uint8, INT16: np.int16, INT8: np.int8,
    COMPLEX64: np.complex64, INT64: np.int64, BOOL: np.bool_, UINT16: np.uint16, COMPLEX128: np.complex128,
    HALF: np.float16, UINT32: np.uint32, UINT64: np.uint64,
}  # fmt: skip
_WIDTH = {BFLOAT16: 2, 24: 1, 25: 1, 11: 1, 12: 1, 13: 4, 15: 2, 16: 2}


def base(dtype: int) -> int:
    """Return the element type of a possibly legacy-reference type."""
    return dtype - REF_OFFSET if dtype > REF_OFFSET else dtype


def dtype_name(dtype: int) -> str:
    """Return TensorFlow's name, with the `_ref` suffix of legacy references."""
    suffix = "_ref" if dtype > REF_OFFSET else ""
    return NAMES.get(base(dtype), f"type{dtype}") + suffix


def numpy_dtype(dtype: int) -> np.dtype[np.generic] | None:
    """Return the numpy element type, or None where numpy has none (string, bfloat16, resource...)."""
    known = _NUMPY.get(base(dtype))
    return None if known is None else np.dtype(known)


def from_numpy(dtype: np.dtype[np.generic]) -> int:
    """Return TensorFlow's number for a numpy element type; `object` stands for strings.

    Raises:
        KeyError: numpy type without an equivalent.
    """
    return STRING if dtype.kind == "O" else NUMBERS[dtype.name]


def width(dtype: int) -> int:
    """Return bytes per element; 0 for types without a fixed size."""
    known = numpy_dtype(dtype)
    return known.itemsize if known is not None else _WIDTH.get(base(dtype), 0)


def nbytes(dtype: int, shape: Iterable[int | None] | None) -> int | None:
    """Return the bytes of a tensor: 0 for a type without a fixed size, None where the shape is not known."""
    sizes = [None] if shape is None else list(shape)
    known = [size for size in sizes if size is not None]
    return math.prod(known) * width(dtype) if len(known) == len(sizes) else None


def least_bytes(dtype: int, shape: Iterable[int | None] | None) -> int:
    """Return the bytes of a tensor as far as its shape is known: an unknown dimension counts as 1."""
    return math.prod(1 if size is None else size for size in shape or ()) * width(dtype)
