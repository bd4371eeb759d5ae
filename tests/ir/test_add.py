"""`Graph.add` infers what TensorFlow's own op builders infer, and refuses what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes

FLOAT, DOUBLE, INT32, INT64, STRING = dtypes.FLOAT, dtypes.DOUBLE, dtypes.INT32, dtypes.INT64, dtypes.STRING


def const(graph: Graph, value: object = 1.0, dtype: int = FLOAT) -> Value:
    array = np.asarray(value) if dtype == STRING else np.asarray(value, dtype=dtypes.numpy_dtype(dtype))
    return graph.add("Const", name="c", attrs={"value": array, "dtype": dtype}).output()


def imports(graph: Graph) -> None:
    """TensorFlow itself accepts the graph, shapes and dtypes included."""
    with tf.Graph().as_default():
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(serde.to_bytes(graph)), name="")


def test_types_come_from_the_inputs() -> None:
    graph = Graph()
    node = graph.add("MatMul", [const(graph, [[1]], DOUBLE), const(graph, [[1]], DOUBLE)], name="m")
    assert node.attr("T") == DOUBLE
    assert node.attr("transpose_a") is False
    assert node.output_dtypes == (DOUBLE,)
    imports(graph)


def test_a_list_of_equal_types_is_counted() -> None:
    graph = Graph()
    values = [const(graph, [1.0]) for _ in range(3)]
    assert graph.add("AddN", values, name="sum").attr("N") == 3
    concat = graph.add("ConcatV2", [*values, const(graph, 0, INT32)], name="concat")
    assert (concat.attr("N"), concat.attr("T"), concat.attr("Tidx")) == (3, FLOAT, INT32)
    assert graph.add("Pack", values[:1], name="pack").attr("N") == 1
    imports(graph)


def test_a_list_of_equal_types_in_the_middle_is_counted() -> None:
    graph = Graph()
    index, value = const(graph, 0, INT32), const(graph, [1.0])
    split = graph.add("Concat", [index, value, value], name="concat")
    assert split.attr("N") == 2
    imports(graph)


def test_lists_that_share_a_count_are_counted_together() -> None:
    graph = Graph()
    indices = [const(graph, [0, 1], INT32), const(graph, [2], INT32)]
    data = [const(graph, [1.0, 2.0]), const(graph, [3.0])]
    stitch = graph.add("DynamicStitch", [*indices, *data], name="stitch")
    assert (stitch.attr("N"), stitch.attr("T")) == (2, FLOAT)
    imports(graph)


def test_lists_that_share_a_count_but_differ_in_length_are_refused() -> None:
    graph = Graph()
    with pytest.raises(GraphError, match="3 inputs do not fit DynamicStitch"):
        graph.add("DynamicStitch", [const(graph, [0], INT32), const(graph), const(graph)], name="stitch")


def test_a_list_of_mixed_types_gets_all_of_them() -> None:
    graph = Graph()
    values = [const(graph), const(graph, 1, INT64), const(graph, "s", STRING)]
    node = graph.add("IdentityN", values, name="id")
    assert node.attr("T") == (FLOAT, INT64, STRING)
    assert node.output_dtypes == (FLOAT, INT64, STRING)
    flag = const(graph, True, dtypes.BOOL)
    assert graph.add("Assert", [flag, *values], name="assert").attr("T") == (FLOAT, INT64, STRING)
    imports(graph)


def test_an_optional_list_may_be_empty() -> None:
    graph = Graph()
    keys = [const(graph, 1, INT32) for _ in range(3)]
    node = graph.add(
        "CollectiveReduceV2",
        [const(graph, [1.0]), *keys],
        name="r",
        attrs={"merge_op": "Add", "final_op": "Id"},
    )
    assert node.attr("Nordering_token") == 0
    assert node.input_dtypes == (FLOAT, INT32, INT32, INT32)
    assert node.attr("timeout_seconds") == 0.0
    imports(graph)


def test_an_empty_list_takes_no_type_from_its_neighbour() -> None:
    graph = Graph()
    with pytest.raises(GraphError, match="needs its attribute 'T'"):
        graph.add("ConcatV2", [const(graph, 0, INT32)], name="concat")


def test_several_lists_of_unknown_length_must_be_counted_by_the_caller() -> None:
    graph = Graph()
    text = const(graph, ["a"], STRING)
    with pytest.raises(GraphError, match="cannot be inferred"):
        graph.add("ParseExample", [text, text], name="parse", attrs={"dense_shapes": [], "sparse_types": []})


def test_given_attributes_win_and_are_checked() -> None:
    graph = Graph()
    x = const(graph)
    cast = graph.add("Cast", [x], name="cast", attrs={"DstT": INT32})
    assert (cast.attr("SrcT"), cast.output_dtypes) == (FLOAT, (INT32,))
    with pytest.raises(GraphError, match="needs its attribute 'DstT'"):
        graph.add("Cast", [x], name="cast")
    with pytest.raises(GraphError, match="closest names: DstT"):
        graph.add("Cast", [x], name="cast", attrs={"DsT": INT32})
    with pytest.raises(GraphError, match="attribute 'DstT' of Cast"):
        graph.add("Cast", [x], name="cast", attrs={"DstT": "no such type"})
    imports(graph)


def test_an_unknown_op_is_refused_with_a_hint() -> None:
    with pytest.raises(GraphError, match="load the library"):
        Graph().add("NoSuchOp", name="x")


def test_a_reference_input_gives_its_base_type() -> None:
    graph = Graph()
    ref = graph.add("VariableV2", name="v", attrs={"shape": (), "dtype": FLOAT}).output()
    assert dtypes.dtype_name(ref.dtype) == "float32_ref"
    assert graph.add("Neg", [ref], name="neg").output_dtypes == (FLOAT,)
    imports(graph)


def test_too_many_or_too_few_inputs_are_refused() -> None:
    graph = Graph()
    x = const(graph)
    for inputs in ([x], [x, x, x]):
        with pytest.raises(GraphError, match=f"{len(inputs)} inputs? do"):
            graph.add("AddV2", inputs, name="sum")


def test_a_signature_agrees_with_tensorflow_on_a_graph_with_everything() -> None:
    with tf.Graph().as_default() as original:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        parts = tf.split(x, 2, axis=1)
        top = tf.nn.top_k(tf.concat(parts, 1), 2)
        tf.io.parse_single_example(
            tf.constant(""), {"a": tf.io.FixedLenFeature([], tf.int64), "b": tf.io.VarLenFeature(tf.string)}
        )
        tf.unique(tf.reshape(top.indices, [-1]))
        tf.compat.v1.nn.fused_batch_norm(tf.zeros([1, 2, 2, 3]), tf.ones([3]), tf.ones([3]))
        tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * 2.0), [0, tf.constant(1.0)])
        tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
    graph = serde.from_bytes(original.as_graph_def().SerializeToString())
    for op in original.get_operations():
        node: Node = graph.node(op.name)
        assert node.input_dtypes == tuple(t.dtype.base_dtype.as_datatype_enum for t in op.inputs), op.name
        assert node.output_dtypes == tuple(t.dtype.as_datatype_enum for t in op.outputs), op.name
