"""Integer arithmetic on constants folds, exactly what TensorFlow computes; nothing that a batch decides does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from tests.support.normal_form import imported, ops, v1

raw = tf.raw_ops


def constant(*values: int, dtype: Any = tf.int32) -> Any:
    return tf.constant(list(values) if len(values) != 1 else values[0], dtype)


EXPRESSIONS: dict[str, Callable[[], Any]] = {
    "pack": lambda: raw.Pack(values=[constant(1), constant(2)], axis=0),
    "pack last axis": lambda: raw.Pack(values=[constant(1, 2), constant(3, 4)], axis=-1),
    "concat": lambda: raw.ConcatV2(values=[constant(1, 2), constant(3, 4)], axis=constant(0)),
    "strided slice": lambda: constant(1, 2, 3, 4, 5)[1:-1:2],
    "reversed": lambda: constant(1, 2, 3)[::-1],
    "one element": lambda: constant(1, 2, 3)[-1],
    "new axis and ellipsis": lambda: tf.constant([[1, 2], [3, 4]])[tf.newaxis, ..., 0],
    "slice": lambda: raw.Slice(input=constant(1, 2, 3, 4), begin=[1], size=[-1]),
    "gather": lambda: raw.GatherV2(params=constant(5, 6, 7), indices=constant(2, 0), axis=constant(0)),
    "stitch": lambda: raw.DynamicStitch(
        indices=[constant(0, 2), constant(1, 2)], data=[constant(7, 8), constant(9, 4)]
    ),
    "inverse": lambda: raw.InvertPermutation(x=constant(2, 0, 1)),
    "reshape": lambda: raw.Reshape(tensor=constant(1, 2, 3, 4), shape=constant(2, -1)),
    "squeeze": lambda: raw.Squeeze(input=tf.constant([[3]]), axis=[0]),
    "expand": lambda: raw.ExpandDims(input=constant(3, 4), axis=constant(-1)),
    "fill": lambda: raw.Fill(dims=constant(2, 2), value=constant(7)),
    "range": lambda: raw.Range(start=constant(4), limit=constant(-3), delta=constant(-2)),
    "cast": lambda: raw.Cast(x=constant(3, 4), DstT=tf.int64),
    "floor division": lambda: raw.FloorDiv(x=constant(7, -7), y=constant(2)),
    "floor modulo": lambda: raw.FloorMod(x=constant(7, -7), y=constant(-3)),
    "truncated division": lambda: raw.TruncateDiv(x=constant(7, -7), y=constant(2)),
    "truncated modulo": lambda: raw.TruncateMod(x=constant(7, -7), y=constant(3)),
    "add": lambda: raw.AddV2(x=constant(1, 2), y=constant(3)),
    "multiply int64": lambda: raw.Mul(x=constant(3, 5, dtype=tf.int64), y=constant(2**40, 1, dtype=tf.int64)),
    "maximum": lambda: raw.Maximum(x=constant(1, 5), y=constant(3)),
    "negative": lambda: raw.Neg(x=constant(1, -5)),
    "product": lambda: raw.Prod(input=constant(2, 3, 4), axis=constant(0)),
    "product of nothing": lambda: raw.Prod(input=tf.zeros([0], tf.int32), axis=constant(0)),
    "sum kept": lambda: raw.Sum(input=tf.constant([[1, 2], [3, 4]]), axis=constant(1), keep_dims=True),
    "identity": lambda: tf.identity(constant(4, 5)),
    "chain": lambda: raw.Prod(input=constant(2, 3, 4)[1:], axis=constant(0)) // 5 + 1,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_folded_expression_has_the_value_that_tensorflow_computes(name: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        raw.Identity(input=EXPRESSIONS[name](), name="y")
    item = GraphItem.from_graph(graph, outputs=["y"])
    normal = normalise(item)
    folded = normal.graph.node("y")
    assert folded.op == "Const"
    with v1.Session(graph=imported(item)) as session:
        expected = session.run("y:0")
    np.testing.assert_array_equal(folded.attr("value"), expected)
    assert folded.attr("value").dtype == expected.dtype
    assert imported(normal).get_tensor_by_name("y:0").shape == expected.shape


@pytest.mark.parametrize(
    "build",
    [
        lambda: raw.FloorDiv(x=constant(1), y=constant(0)),
        lambda: raw.Mul(x=constant(2**30), y=constant(4)),
        lambda: raw.AddV2(x=tf.constant(1.0), y=tf.constant(2.0)),
        lambda: raw.Range(start=constant(0), limit=constant(100), delta=constant(1)),
        lambda: raw.Cast(x=constant(3), DstT=tf.float32),
        lambda: raw.GatherV2(params=constant(5, 6), indices=constant(9), axis=constant(0)),
    ],
    ids=["division by zero", "overflow", "floats", "over 64 elements", "to float", "out of range"],
)
def test_what_is_not_small_exact_and_integer_stays_an_op(build: Callable[[], Any]) -> None:
    graph = tf.Graph()
    with graph.as_default():
        op = build().op.name
        tf.identity(build(), "y")
    before = graph.get_operation_by_name(op).type
    assert normalise(GraphItem.from_graph(graph, outputs=["y"])).graph.node(op).op == before


def test_the_shape_of_a_variable_folds_and_that_of_a_static_batch_does_not() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [4, 3], "x")
        w = v1.get_variable("w", [3, 2], use_resource=True)
        raw.Shape(input=tf.matmul(x, w), name="of_batch")
        raw.Shape(input=w.read_value(), name="of_variable")
        raw.VariableShape(input=w.handle, name="of_handle")
        raw.Rank(input=w.read_value(), name="rank")
        tf.group(*map(graph.get_operation_by_name, ("of_batch", "of_variable")), name="train")
    item = GraphItem.from_graph(graph, train_op="train", batch_inputs={"x": 0})
    normal = normalise(item)
    assert normal.graph.node("of_batch").op == "Shape"
    assert normal.graph.node("of_variable").attr("value").tolist() == [3, 2]
    assert normal.graph.node("of_handle").attr("value").tolist() == [3, 2]
    assert normal.graph.node("rank").attr("value").tolist() == 2


def test_a_constant_folded_in_a_loop_stays_in_the_loop() -> None:
    v1.disable_control_flow_v2()
    try:
        graph = tf.Graph()
        with graph.as_default():
            x = v1.placeholder(tf.float32, [None], "x")

            def body(i: Any, a: Any) -> Any:
                step = raw.Prod(input=raw.Pack(values=[tf.constant(1), tf.constant(2)]), axis=0)
                return i + step, a * 2.0 * tf.cast(step, tf.float32)

            tf.identity(tf.while_loop(lambda i, _: i < 5, body, [tf.constant(0), x])[1], "y")
    finally:
        v1.enable_control_flow_v2()
    item = GraphItem.from_graph(graph, outputs=["y"])
    normal = normalise(item)
    assert "Prod" not in ops(normal)
    with v1.Session(graph=imported(normal)) as session:
        np.testing.assert_array_equal(session.run("y:0", {"x:0": [1.0]}), [64.0])


def test_two_handles_of_one_storage_become_one_and_of_two_storages_stay_two() -> None:
    graph = tf.Graph()
    with graph.as_default():
        for name, shared in (("a", "w"), ("b", "w"), ("c", "c"), ("d", "")):
            handle = raw.VarHandleOp(dtype=tf.float32, shape=[], shared_name=shared, name=name)
            value = v1.placeholder(tf.float32, [], f"x_{name}")
            raw.AssignAddVariableOp(resource=handle, value=value, name=f"add_{name}")
        tf.group(*[graph.get_operation_by_name(f"add_{n}") for n in "abcd"], name="train")
    item = GraphItem.from_graph(graph, train_op="train")
    assert list(item.variables) == ["a", "c", "d"]
    normal = normalise(item)
    assert [normal.graph.node(f"add_{n}").inputs[0].name for n in "abcd"] == ["a", "a", "c", "d"]
