"""Shapes that are worked out from a bare graph are those that TensorFlow has inferred."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.facts.symbolic_dims import common_symbol
from autograph_rewrite.ops.rules.inference import Shapes, differ, shape_text
from tests.zoo import GRAPHS, Case

v1 = tf.compat.v1


def bare(graph: tf.Graph) -> Graph:
    """Return the graph as processes get it: without the shapes that TensorFlow has inferred."""
    return serde.from_bytes(graph.as_graph_def().SerializeToString())


@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.name)
@pytest.mark.parametrize("batch", [None, 6])
def test_what_is_known_agrees_with_tensorflow(case: Case, batch: int | None) -> None:
    built = case.build(dtype=case.dtypes[0], batch=batch)
    graph, shapes = bare(built.graph), Shapes()
    known = 0
    for node in graph:
        for tensor in built.graph.get_operation_by_name(node.name).outputs:
            shape = shapes(node.output(tensor.value_index))
            if isinstance(shape, str) or tensor.shape.rank is None:
                continue
            assert len(shape) == tensor.shape.rank, tensor
            pairs = zip(shape, tensor.shape.as_list(), strict=True)
            wrong = [(mine, theirs) for mine, theirs in pairs if isinstance(mine, int) and theirs not in (mine, None)]
            assert wrong == [], tensor
            known += 1
    assert known > 50


def value(build: object) -> Value:
    """Return the one tensor that nothing reads, of the graph that `build` makes."""
    graph = tf.Graph()
    with graph.as_default():
        tensor = build()  # type: ignore[operator]
    return bare(graph).value(tensor.name)


def spelt(shape: Shape | str) -> object:
    """Return a shape with the names of its open dimensions."""
    return (
        shape
        if isinstance(shape, str)
        else tuple(d if isinstance(d, int) else f"{d!r}".replace("T:", "") for d in shape)
    )


def x(*shape: int | None) -> tf.Tensor:
    return v1.placeholder(tf.float32, shape, name="x")


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: tf.reshape(x(None, 4), [-1, 2]), ("2*x.0", 2)),
        (lambda: tf.reshape(x(6, 4), [-1, 3]), (8, 3)),
        (lambda: tf.matmul(x(None, 4), tf.zeros([4, 3])), ("x.0", 3)),
        (lambda: tf.matmul(x(None, 4), x(None, 3), transpose_a=True), (4, 3)),
        (lambda: x(None, 4)[1:3], ("strided_slice.0", 4)),
        (lambda: x(6, 4)[1:3], (2, 4)),
        (lambda: x(6, 4)[:, 0], (6,)),
        (lambda: x(None, 4) + tf.zeros([4]), ("x.0", 4)),
        (lambda: x(1, 4) * x(5, 1), (5, 4)),
        (lambda: tf.concat([x(None, 4), x(2, 4)], 0), ("concat.0", 4)),
        (lambda: tf.concat([x(3, 4), x(2, 4)], 0), (5, 4)),
        (lambda: tf.stack([x(3), x(3)], 1), (3, 2)),
        (lambda: tf.reduce_sum(x(None, 4), 0), (4,)),
        (lambda: tf.reduce_sum(x(None, 4), [0, 1], keepdims=True), (1, 1)),
        (lambda: tf.transpose(x(None, 4, 5), [2, 0, 1]), (5, "x.0", 4)),
        (lambda: tf.pad(x(3, 4), [[1, 0], [0, 2]]), (4, 6)),
        (lambda: tf.squeeze(tf.expand_dims(x(None, 4), 1), 1), ("x.0", 4)),
        (lambda: tf.gather(tf.zeros([9, 5]), v1.placeholder(tf.int32, [None], name="i")), ("i.0", 5)),
        (lambda: tf.math.unsorted_segment_sum(x(None, 4), v1.placeholder(tf.int32, [None]), 7), (7, 4)),
        (lambda: tf.shape(x(None, 4)), (2,)),
        (lambda: tf.argmax(x(None, 4), 1), ("x.0",)),
        (lambda: tf.py_function(lambda a: a, [x(3)], tf.float32), "EagerPyFunc EagerPyFunc"),
    ],
)
def test_rules_on_small_graphs(build: object, shape: object) -> None:
    assert spelt(Shapes()(value(build))) == shape


def test_a_gathered_value_is_as_long_as_all_parts() -> None:
    graph = Graph()

    def const(name: str, content: object, dtype: int) -> Value:
        array = np.asarray(content, dtypes.numpy_dtype(dtype))
        return graph.add("Const", name=name, attrs={"value": array, "dtype": dtype}).output()

    keys = [const(f"key_{i}", number, dtypes.INT32) for i, number in enumerate((3, 1, 2))]
    sent = const("sent", np.zeros((2, 5)), dtypes.FLOAT)
    gathered = graph.add("CollectiveGatherV2", [sent, *keys], name="gather").output()
    assert Shapes()(gathered) == (6, 5)


def test_copies_of_a_value_on_other_replicas_have_its_shape() -> None:
    graph = Graph()
    made = [graph.add("Placeholder", name=f"replica_{r}/x", attrs={"dtype": dtypes.FLOAT}).output() for r in (0, 1)]
    assert Shapes()(made[0]) == Shapes()(made[1])


def test_shapes_differ_only_where_numbers_do() -> None:
    x0 = common_symbol("x.0")
    assert differ((3, 4), (3, 5))
    assert differ((3, 4), (3, 4, 1))
    assert not differ((3, x0), (3, 5))
    assert not differ("x", (3, 5))
    assert shape_text((3, x0)) == "[3,?]"
    assert shape_text("x") == "[...]"


def test_a_chain_as_deep_as_backpropagation_needs_no_recursion() -> None:
    graph = Graph()
    last = graph.add("Placeholder", name="x", attrs={"dtype": dtypes.FLOAT, "shape": (None, 3)}).output()
    for i in range(5000):
        last = graph.add("Neg", [last], name=f"n{i}").output()
    assert spelt(Shapes()(last)) == ("x.0", 3)
