"""Attribute values cross between bytes and Python as TensorFlow means them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.framework import attr_value_pb2, tensor_pb2

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.types import attrs, dtypes
from autograph_rewrite.ir.types.attrs import FunctionName, decode, encode
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ir.types.protos import proto

AttrValue = attr_value_pb2.AttrValue


def tensorflow_reads(raw: bytes) -> Any:
    return AttrValue.FromString(raw)


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_survive(value: int) -> None:
    raw = encode("int", value)
    assert tensorflow_reads(raw).i == value
    assert decode(raw) == value
    assert decode(AttrValue(i=value).SerializeToString()) == value


@given(st.floats(width=32, allow_nan=False))
def test_floats_survive(value: float) -> None:
    raw = encode("float", value)
    assert tensorflow_reads(raw).f == decode(raw) == value


@given(st.binary(max_size=400))
def test_strings_survive(value: bytes) -> None:
    raw = encode("string", value)
    assert tensorflow_reads(raw).s == decode(raw) == value
    assert raw == AttrValue(s=value).SerializeToString()


@given(st.none() | st.lists(st.none() | st.integers(0, 2**40), max_size=5).map(tuple))
def test_shapes_survive(value: tuple[int | None, ...] | None) -> None:
    raw = encode("shape", value)
    assert tf.TensorShape(tensorflow_reads(raw).shape) == tf.TensorShape(value) or value is None
    assert tensorflow_reads(raw).shape.unknown_rank == (value is None)
    assert decode(raw) == value


@pytest.mark.parametrize("value", [True, False])
def test_booleans_survive(value: bool) -> None:
    assert tensorflow_reads(encode("bool", value)).b is decode(encode("bool", value)) is value


@pytest.mark.parametrize("value", [1, 23, 101, 119])
def test_types_survive_references_too(value: int) -> None:
    assert tensorflow_reads(encode("type", value)).type == decode(encode("type", value)) == value


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("list(int)", (1, -2, 3)),
        ("list(float)", (0.5, -1.0)),
        ("list(bool)", (True, False)),
        ("list(string)", (b"a", b"")),
        ("list(type)", (1, 3)),
        ("list(shape)", ((2, None), None, ())),
        ("list(func)", (FunctionName("f"), FunctionName("g", (("T", b"0\x01"),)))),
        ("list(int)", ()),
    ],
)
def test_lists_survive(kind: str, values: tuple[Any, ...]) -> None:
    raw = encode(kind, values)
    assert decode(raw) == values
    assert tensorflow_reads(raw).WhichOneof("value") == "list"


def test_lists_of_tensors_survive() -> None:
    first, second = decode(encode("list(tensor)", [np.arange(3), np.float64(2.5)]))
    np.testing.assert_array_equal(first, [0, 1, 2])
    assert second == 2.5
    assert second.dtype == np.float64


def test_functions_survive_with_their_own_attributes() -> None:
    value = AttrValue()
    value.func.name = "body"
    value.func.attr["T"].type = 1
    value.func.attr["N"].i = 3
    decoded = decode(value.SerializeToString())
    assert decoded.name == "body"
    assert {key: decode(raw) for key, raw in decoded.attrs} == {"T": 1, "N": 3}
    assert tensorflow_reads(encode("func", decoded)) == value


def test_every_default_of_every_registered_op_decodes_and_encodes_to_the_same_meaning() -> None:
    from autograph_rewrite.ir.types import opdefs

    names = list(opdefs._shipped())
    assert len(names) > 1800
    count = 0
    for name in names:
        op = find_op(name)
        assert op is not None
        for attr in op.attrs.values():
            if attr.default is not None and "tensor" not in attr.kind:  # which has several encodings
                count += 1
                again = encode(attr.kind, decode(attr.default))
                assert tensorflow_reads(again) == tensorflow_reads(attr.default), (name, attr.name)
    assert count > 2000


FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
NUMPY_TYPES = [*FLOATS, *INTEGERS]
VALUE_FIELDS = {
    "float16": "half_val", "float32": "float_val", "float64": "double_val", "int64": "int64_val",
    "bool": "bool_val", "uint32": "uint32_val", "uint64": "uint64_val", "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
}  # fmt: skip


def compress(message: Any) -> Any:
    """Write a tensor as TensorFlow's own compression does: typed values, trailing repeats left out."""
    array = tf.make_ndarray(message)
    flat = array.ravel()
    keep = flat.size
    while keep > 1 and flat[keep - 1] == flat[keep - 2]:
        keep -= 1
    kept = flat[:keep]
    if array.dtype == np.float16:
        kept = kept.view(np.uint16)
    if array.dtype.kind == "c":
        kept = np.stack([kept.real, kept.imag], axis=-1).ravel()
    small = tensor_pb2.TensorProto(dtype=message.dtype, tensor_shape=message.tensor_shape)
    getattr(small, VALUE_FIELDS.get(str(array.dtype), "int_val")).extend(kept.tolist())
    return small


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("form", ["content", "values", "splat", "repeated", "zeros", "scalar", "empty"])
def test_tensors_decode_as_tensorflow_decodes_them(dtype: str, form: str) -> None:
    array: Any = (np.arange(6) - (0 if dtype[0] in "ub" else 2)).reshape(2, 3).astype(dtype)
    if form == "splat":
        array = np.full((2, 3), 1).astype(dtype)
    elif form == "repeated":
        array = np.array([3, 0, 1, 1, 1, 1]).astype(dtype)
    elif form == "zeros":
        array = np.zeros((2, 3), dtype)
    elif form == "scalar":
        array = np.asarray(1).astype(dtype)
    elif form == "empty":
        array = np.zeros((0, 3), dtype)
    message = tf.make_tensor_proto(array)
    if form == "zeros":
        message = tensor_pb2.TensorProto(dtype=message.dtype, tensor_shape=message.tensor_shape)
    elif form not in ("content", "scalar", "empty"):
        message = compress(message)

    found = decode(AttrValue(tensor=message).SerializeToString())

    np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(found, tf.make_ndarray(message))
    assert found.dtype == array.dtype
    assert found.shape == array.shape


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_arrays_encode_as_tensorflow_reads_them(dtype: str) -> None:
    for array in (
        np.arange(6).reshape(2, 3).astype(dtype),
        np.asarray(1).astype(dtype),
        np.zeros((0, 2), dtype),
    ):
        found = tf.make_ndarray(tensorflow_reads(encode("tensor", array)).tensor)
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_one_element_for_all_stays_one_as_tensorflow_reads_it(dtype: str) -> None:
    array = np.broadcast_to(np.asarray(1).astype(dtype), (300, 5))
    raw = encode("tensor", array)
    assert len(raw) < 40
    found = tf.make_ndarray(tensorflow_reads(raw).tensor)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert attrs.is_splat(decode(raw))


def test_arrays_in_any_memory_layout_encode_their_values() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    np.testing.assert_array_equal(decode(encode("tensor", array)), [[0, 3], [1, 4], [2, 5]])


@pytest.mark.parametrize("value", [b"ends in zeros\0\0", ["a", "b\0"], np.array(["x"], dtype=object), "ä"])
def test_string_tensors_encode_every_byte(value: Any) -> None:
    found = tf.make_ndarray(tensorflow_reads(encode("tensor", value)).tensor)
    expected = np.vectorize(lambda v: v.encode() if isinstance(v, str) else v, otypes=[object])(
        np.asarray(value, dtype=object)
    )
    assert found.tolist() == expected.tolist()


def test_element_types_without_numpy_form_stay_protos_and_survive() -> None:
    message = tf.make_tensor_proto(tf.constant([1.5, 2.5], tf.bfloat16).numpy())
    found = decode(AttrValue(tensor=message).SerializeToString())
    assert found.dtype == dtypes.BFLOAT16
    assert tensorflow_reads(encode("tensor", found)).tensor == message
    strings = decode(AttrValue(tensor=tf.make_tensor_proto(["a", "b"])).SerializeToString())
    assert list(strings.string_val) == [b"a", b"b"]


def test_a_decoded_tensor_cannot_be_changed_behind_the_node_s_back() -> None:
    raw = encode("tensor", np.arange(3))
    with pytest.raises(ValueError, match="read-only"):
        decode(raw)[0] = 7


def corrupt_tensor() -> bytes:
    message = proto("AttrValue")()
    message.tensor.dtype = dtypes.FLOAT
    message.tensor.tensor_shape.dim.add().size = 3
    message.tensor.tensor_content = b"12345"
    raw: bytes = message.SerializeToString()
    return raw


@pytest.mark.parametrize("raw", [b"\xff", b"\x12\xff", corrupt_tensor()])
def test_malformed_bytes_are_a_graph_error(raw: bytes) -> None:
    with pytest.raises(GraphError, match="malformed"):
        decode(raw)


def test_an_unset_value_is_none() -> None:
    assert decode(b"") is None
    assert decode(b"\x0a\x00") == ()


def test_dtype_numbers_names_and_widths_are_tensorflow_s() -> None:
    for number, name in dtypes.NAMES.items():
        if number:
            assert tf.dtypes.as_dtype(number).name == name
            numpy = dtypes.numpy_dtype(number)
            if numpy is not None:
                assert tf.dtypes.as_dtype(number).as_numpy_dtype == numpy.type
                assert dtypes.from_numpy(numpy) == number
    assert dtypes.dtype_name(101) == "float32_ref"
    assert dtypes.width(dtypes.BFLOAT16) == 2
    assert dtypes.width(dtypes.STRING) == 0
    assert attrs.Shape is not None
