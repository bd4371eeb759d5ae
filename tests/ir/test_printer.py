"""The printed form says what matters in one line per node, the same in every process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.ir.format import printer, serde
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, PerInstance, Select
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.types.attrs import encode

FLOAT, INT32 = dtypes.FLOAT, dtypes.INT32


def folded() -> Graph:
    graph = Graph()
    x = graph.add("Placeholder", name="x", attrs={"dtype": FLOAT, "shape": (None, 16)}, span=EACH).output()
    w = graph.add("VarHandleOp", name="w", attrs={"dtype": FLOAT, "shape": (16, 3), "shared_name": "w"}).output()
    read = graph.add("ReadVariableOp", [w], name="w/Read", attrs={"dtype": FLOAT}).output()
    ready = graph.add("NoOp", name="ready")
    graph.current_pass = "reshard"
    product = graph.add(
        "MatMul", [x, read], name="dense/MatMul", attrs={"transpose_b": True}, controls=[ready],
        device="/device:CPU:0", span=EACH, origin=ready,
    )  # fmt: skip
    total = graph.add("AddN", [product.output()], name="sum", attrs={"N": 2}, selects={0: Select.ALL})
    graph.add("Neg", [x], name="first", selects={0: Select.FIRST})
    seed = graph.add("Const", name="seed", attrs={"value": np.int32(0), "dtype": INT32}, span=EACH)
    seed.set_raw_attr("value", PerInstance((encode("tensor", np.int32(1)), encode("tensor", np.int32(2)))))
    graph.anchors["loss"] = total.output()
    return graph


FOLDED = """\
%x: float32[?,16] = Placeholder() each
%w: resource = VarHandleOp() {dtype=float32, shape=[16,3], shared_name="w"}
%w/Read: float32 = ReadVariableOp(%w)
%ready = NoOp()
%dense/MatMul: float32 = MatMul(%x, %w/Read) {transpose_b=true} ^ready @CPU:0 each  # reshard for ready
%sum: float32 = AddN(all(%dense/MatMul))  # reshard
%first: float32 = Neg(first(%x))  # reshard
%seed: int32 = Const() {value=each(1 | 2)} each  # reshard
anchor loss = %sum
"""


def test_a_folded_graph_prints_one_line_per_node() -> None:
    assert printer.render(folded()) == FOLDED


def test_the_order_is_topological_and_a_broken_graph_prints_too() -> None:
    graph = folded()
    graph.node("x").add_control(graph.node("dense/MatMul"))
    assert "%x: float32[?,16] = Placeholder() ^dense/MatMul each" in printer.render(graph)


def test_some_nodes_print_alone_with_shapes_from_outside() -> None:
    graph = folded()
    shown = printer.render(graph, nodes={graph.node("sum")}, shapes=lambda value: (2, None))
    assert shown == "%sum: float32[2,?] = AddN(all(%dense/MatMul))  # reshard\n"
    assert printer.render(graph, nodes=set()) == ""


def test_the_same_graph_prints_the_same_text_after_a_round_trip() -> None:
    with tf.Graph().as_default() as original:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        values, indices = tf.nn.top_k(tf.nn.dropout(x, 0.5, seed=3), 2)
        tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * tf.reduce_sum(values)), [0, tf.constant(1.0)])
        tf.gather(tf.constant(np.arange(200, dtype=np.float64)), indices)
    data = original.as_graph_def().SerializeToString()
    first = printer.render(serde.from_bytes(data))
    assert first == printer.render(serde.from_bytes(serde.to_bytes(serde.from_bytes(data))))
    assert "0x" not in first
    assert "%TopKV2: (float32, int32) = TopKV2(" in first
    assert "body=@" in first
    assert "function " in first
    assert all(len(line) < 400 for line in first.splitlines())


def value_text(value: Any, dtype: int) -> str:
    graph = Graph()
    node = graph.add("Const", name="c", attrs={"value": value, "dtype": dtype})
    return printer.shown_attrs(node)["value"]


@pytest.mark.parametrize(
    ("value", "dtype", "shown"),
    [
        (np.float32(0.1), FLOAT, "0.1"),
        (np.float64(0.1), dtypes.DOUBLE, "0.1"),
        (np.array([1, -2], np.int32), INT32, "[1, -2]"),
        (np.array([[1, 2], [3, 4]], np.int64), dtypes.INT64, "[1, 2, 3, 4]"),
        (np.array([True, False]), dtypes.BOOL, "[true, false]"),
        (np.float16(0.5), dtypes.HALF, "0.5"),
        (np.array([], np.float32), FLOAT, "[]"),
        (np.complex64(1 + 2j), dtypes.COMPLEX64, "(1+2j)"),
        (b"text", dtypes.STRING, '"text"'),
        (["a", "\x00\x01"], dtypes.STRING, '["a", <2 bytes #36de2269>]'),
        (np.float32("nan"), FLOAT, "nan"),
    ],
)
def test_small_constants_print_whole(value: Any, dtype: int, shown: str) -> None:
    assert value_text(value, dtype) == shown


def test_large_constants_print_their_head_and_a_checksum() -> None:
    array = np.arange(1000, dtype=np.float32)
    shown = value_text(array, FLOAT)
    assert shown.startswith("[0.0, 1.0, 2.0, ... #")
    array[999] = 0
    assert value_text(array, FLOAT) != shown
    bfloat = tf.make_tensor_proto(tf.constant([1.5], tf.bfloat16).numpy())
    assert value_text(bfloat_message(bfloat), dtypes.BFLOAT16).startswith("<bfloat16 #")


def bfloat_message(message: Any) -> Any:
    from autograph_rewrite.ir.types.protos import proto

    return proto("TensorProto").FromString(message.SerializeToString())


def test_a_splat_of_a_billion_elements_costs_nothing_to_print() -> None:
    from autograph_rewrite.ir.types.protos import proto

    message = proto("TensorProto")(dtype=FLOAT)
    message.tensor_shape.dim.add().size = 10**9
    message.float_val.append(0.5)
    assert value_text(message, FLOAT).startswith("[#")


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("type", FLOAT, "float32"),
        ("int", -1, "-1"),
        ("bool", True, "true"),
        ("float", 0.1, "0.1"),
        ("string", "a b", '"a b"'),
        ("string", b"\xff\x00", "<2 bytes #"),
        ("string", "x" * 100, "<100 bytes #"),
        ("shape", (None, 3), "[?,3]"),
        ("shape", (), "[]"),
        ("shape", None, "[...]"),
        ("list(type)", (FLOAT, INT32), "[float32, int32]"),
        ("list(shape)", ((2,), None), "[[2], [...]]"),
        ("list(int)", (), "[]"),
        ("list(string)", ("a",), '["a"]'),
    ],
)
def test_attributes_of_every_kind_print(kind: str, value: Any, shown: str) -> None:
    assert printer.attr_text(encode(kind, value)).startswith(shown)


def test_many_instances_and_malformed_bytes_print_shortly() -> None:
    assert printer.attr_text(PerInstance((encode("int", 1),) * 9)) == "each(1 | 1 | 1 | 1 | ...)"
    assert printer.attr_text(b"\x12\xff") == "<malformed>"
    assert printer.attr_text(b"") == "unset"


def test_an_op_that_nobody_knows_prints_with_all_its_attributes() -> None:
    graph = Graph()
    node = graph.insert(Node(graph, "mine", "MyOp", "/job:ps/task:1", {"k": encode("int", 3)}, b""))
    assert printer.line(node) == "%mine: ? = MyOp() {k=3} @/job:ps/task:1"


def test_a_shape_stated_by_the_exporter_is_shown() -> None:
    graph = folded()
    node = graph.node("w/Read")
    node.set_raw_attr("_output_shapes", encode("list(shape)", ((16, 3),)))
    assert printer.line(node) == "%w/Read: float32[16,3] = ReadVariableOp(%w)"


@pytest.mark.parametrize(
    ("spec", "short"),
    [
        ("/device:CPU:0", "CPU:0"),
        ("/gpu:1", "GPU:1"),
        ("/job:worker/task:0/device:CPU:0", "/job:worker/task:0/device:CPU:0"),
        ("/device:GPU:*", "/device:GPU:*"),
        ("nonsense", "nonsense"),
        ("", ""),
    ],
)
def test_devices_print_shortly(spec: str, short: str) -> None:
    assert device_specs.short(spec) == short


@pytest.mark.parametrize("spec", ["/device:CPU", "CPU", "/job:1x", "/device:CPU:0/device:CPU:1", "/task:x", "//x"])
def test_malformed_devices_are_known_as_such(spec: str) -> None:
    assert device_specs.parse(spec) is None


def test_a_partial_device_fits_what_it_leaves_open() -> None:
    gpu = device_specs.parse("/job:worker/replica:0/task:1/device:GPU:0")
    assert gpu is not None
    for spec, fits in (
        ("/job:worker", True),
        ("/device:GPU:*", True),
        ("/task:2", False),
        ("/cpu:0", False),
        ("", True),
    ):
        parsed = device_specs.parse(spec)
        assert parsed is not None
        assert parsed.fits(gpu) is fits, spec
    assert [spec.kind for spec in device_specs.reachable(["/job:worker/task:1/device:GPU:0"])] == ["GPU", "CPU"]
