"""A tf.Graph or GraphDef becomes an item: named or inferred train op, init op, inputs, batches and variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.inputs import check_batch
from tests.zoo import GRAPHS, ZOO

v1 = tf.compat.v1


def small(shape: Any = (None, 3), train: bool = True) -> Any:
    """Return a graph with a placeholder `x`, a variable `w`, a `loss` and an `init`."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, shape, "x")
        w = v1.get_variable("w", [3, 1], use_resource=True)
        loss = tf.reduce_mean(tf.matmul(tf.reshape(x, [-1, 3]), w), name="loss")
        if train:
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        v1.global_variables_initializer()  # named "init"
    return graph


@pytest.mark.parametrize("case", [case for case in GRAPHS if "float64" in case.dtypes], ids=lambda case: case.name)
def test_a_zoo_graph_gives_its_own_names_without_being_told(case: Any) -> None:
    built = case.build()
    named = GraphItem.from_graph(
        built.graph,
        train_op=built.train_op,
        outputs=built.outputs,
        init_op=built.init_op,
        batch_inputs=built.batch_inputs,
    )
    assert set(named.variables) == set(built.variables)
    assert {name: info.batch_axis for name, info in named.inputs.items()} == built.batch_inputs
    assert all(variable.initializer == f"{name}/Assign" for name, variable in named.variables.items())
    inferred = GraphItem.from_graph(built.graph)
    assert (inferred.targets, inferred.init_op) == (named.targets, named.init_op)
    assert inferred.variables == named.variables


def test_names_may_have_a_suffix_or_be_tensorflow_objects() -> None:
    graph = small()
    train, loss = graph.get_operation_by_name("train"), graph.get_tensor_by_name("loss:0")
    items = [
        GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init"),
        GraphItem.from_graph(graph, train_op=[train], outputs=["loss:0"], init_op=graph.get_operation_by_name("init")),
        GraphItem.from_graph(graph.as_graph_def(), train_op="train:0", outputs=[loss], init_op="init"),
    ]
    for item in items:
        assert list(item.outputs) == ["loss"]
        assert item.outputs["loss"].tensor == "loss:0"
        assert (item.targets, item.init_op) == (("train",), "init")


def test_trainability_is_known_from_collections_only() -> None:
    graph = small()
    with graph.as_default():
        v1.train.get_or_create_global_step()
    item = GraphItem.from_graph(graph, train_op="train")
    assert {name: v.trainable for name, v in item.variables.items()} == {"w": True, "global_step": False}
    bare = GraphItem.from_graph(graph.as_graph_def(), train_op="train")
    assert {v.trainable for v in bare.variables.values()} == {None}


def test_several_train_ops_are_kept_in_order() -> None:
    graph = small()
    with graph.as_default():
        w = v1.get_variable("u", [3, 1], use_resource=True)
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(w), name="second")
    assert GraphItem.from_graph(graph, train_op=["second", "train"]).targets == ("second", "train")
    assert GraphItem.from_graph(graph).targets == ("train", "second")


def test_a_group_around_the_registered_train_op_is_the_train_op() -> None:
    graph = small()
    with graph.as_default():
        tf.group(graph.get_operation_by_name("train"), tf.no_op("other"), name="both")
    assert GraphItem.from_graph(graph).targets == ("both",)


def test_a_bare_graph_def_is_searched_for_what_trains_and_not_for_what_restores() -> None:
    graph = small()
    with graph.as_default():
        v1.train.Saver()
    item = GraphItem.from_graph(graph.as_graph_def())
    assert item.targets == ("train",)
    assert item.init_op == "init"
    assert item.variables["w"].initializer == "w/Assign"


def test_what_a_program_runs_to_save_and_restore_is_kept() -> None:
    graph = small()
    with graph.as_default():
        for _ in range(2):
            v1.train.Saver(sharded=True)
    item = GraphItem.from_graph(graph)
    assert item.keep == ("save/Identity", "save/restore_all", "save_1/Identity", "save_1/restore_all")
    assert GraphItem.from_graph(small()).keep == ()


def test_what_the_init_op_restores_belongs_to_it() -> None:
    graph = tf.Graph()
    with graph.as_default():
        (value,) = tf.raw_ops.RestoreV2(prefix="file", tensor_names=["w"], shape_and_slices=[""], dtypes=[tf.float32])
        w = v1.get_variable("w", initializer=tf.reshape(value, [1]), use_resource=True)
        tf.group(w.assign_add(v1.placeholder(tf.float32, [None], "x")), name="train")
        v1.global_variables_initializer()
    assert GraphItem.from_graph(graph, train_op="train", init_op="init").keep == ()


def test_a_graph_that_trains_nothing_has_no_targets() -> None:
    assert GraphItem.from_graph(small(train=False), outputs=["loss"]).targets == ()


def test_only_what_the_step_reads_is_an_input_and_only_it_is_a_batch() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 2], "x")
        rate = v1.placeholder(tf.float32, [], "rate")
        v1.placeholder(tf.float32, [None], "unused")
        start = v1.placeholder(tf.float32, [None], "start")
        training = v1.placeholder_with_default(True, [], "training")
        w = v1.get_variable("w", initializer=start, validate_shape=False, use_resource=True)
        y = tf.reduce_sum(x) * rate * tf.cast(training, tf.float32)
        tf.group(w.assign_add([y]), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(graph, train_op="train", init_op="init")
    axes = {name: info.batch_axis for name, info in item.inputs.items()}
    assert axes == {"x": 0, "rate": None, "start": None, "training": None}


def test_batches_are_as_named_and_nothing_else_is_one() -> None:
    graph = tf.Graph()
    with graph.as_default():
        a = v1.placeholder(tf.float32, [4, 8], "a")
        b = v1.placeholder(tf.float32, [None, 8], "b")
        queue = tf.queue.FIFOQueue(2, [tf.float32], shapes=[[2, 8]])
        c = tf.identity(queue.dequeue(name="c"), "copy")
        tf.add_n([tf.reduce_sum(t) for t in (a, b, c)], name="y")
    item = GraphItem.from_graph(graph, outputs=["y"], batch_inputs={"a:0": -1, "c": 0})
    assert {name: info.batch_axis for name, info in item.inputs.items()} == {"a": 1, "b": None, "c": 0}


def test_an_iterator_gives_inputs() -> None:
    graph = tf.Graph()
    with graph.as_default():
        data = tf.data.Dataset.from_tensor_slices(([[1.0, 2.0]] * 6, [0] * 6)).batch(2)
        x, y = v1.data.make_one_shot_iterator(data).get_next()
        tf.identity(tf.reduce_sum(x) + tf.cast(tf.reduce_sum(y), tf.float32), "loss")
    item = GraphItem.from_graph(graph, outputs=["loss"])
    found = {name: (info.tensor, info.shape, info.batch_axis) for name, info in item.inputs.items()}
    assert found == {
        "IteratorGetNext": ("IteratorGetNext:0", (None, 2), 0),
        "IteratorGetNext:1": ("IteratorGetNext:1", (None,), 0),
    }


def test_the_graph_is_kept_whole() -> None:
    graph = small()
    item = GraphItem.from_graph(graph, outputs=["loss"])
    assert set(item.graph.nodes) == {op.name for op in graph.get_operations()}


def test_table_initialisers_are_kept_beside_the_step() -> None:
    graph = small()
    with graph.as_default():
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
        v1.tables_initializer()
    (initialiser,) = graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS)
    assert GraphItem.from_graph(graph).keep == (initialiser.name,)
    del table


BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "unknown output": (lambda: GraphItem.from_graph(small(), outputs=["los"]), "output 'los'", "loss"),
    "unknown train op": (lambda: GraphItem.from_graph(small(), train_op="trian"), "train_op 'trian'", "train"),
    "unknown init op": (lambda: GraphItem.from_graph(small(), init_op="initt"), "init_op 'initt'", "init"),
    "unknown batch": (lambda: GraphItem.from_graph(small(), batch_inputs={"q": 0}), "batch input 'q'", "inputs: x"),
    "no such output": (lambda: GraphItem.from_graph(small(), outputs=["loss:3"]), "loss:3", ""),
    "op as output": (lambda: GraphItem.from_graph(small(), outputs=["train"]), "gives 0 output", "train_op"),
    "no such axis": (lambda: GraphItem.from_graph(small(), batch_inputs={"x": 2}), "no axis 2", ""),
    "batch of unknown rank": (
        lambda: GraphItem.from_graph(small(None), batch_inputs={"x": 0}), "unknown rank", "give its placeholder a shape"
    ),
    "only a vague batch": (lambda: check_batch(GraphItem.from_graph(small(None))), "rank of 'x' is unknown", "None"),
    "no batch": (lambda: check_batch(GraphItem.from_graph(small((4, 3)))), "no input of the step is a batch", "axis"),
    "not a graph": (lambda: GraphItem.from_graph(len), "expected a tf.Graph", "from_function"),
    "empty": (lambda: GraphItem.from_graph(tf.Graph()), "empty", ""),
    "not a reference": (lambda: GraphItem.from_graph(small(), outputs=[3]), "3 is not an op or tensor", "name"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_graph_error_that_names_the_culprit(name: str) -> None:
    call, problem, hint = BAD[name]
    with pytest.raises(GraphError) as caught:
        call()
    assert problem in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda message: setattr(message.node[-1], "op", "NoSuchOp"), "unknown op 'NoSuchOp'"),
        (lambda message: message.library.ClearField("function"), "which the function library does not have"),
        (lambda message: message.node.append(message.node[0]), "two nodes are named"),
        (lambda message: message.node[-1].input.append("ghost"), "reads 'ghost', which the graph does not have"),
    ],
    ids=["unknown op", "missing function", "duplicate", "dangling"],
)
def test_a_malformed_graph_is_refused_at_once(change: Callable[[Any], None], problem: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None], "x")
        tf.identity(tf.function(lambda a: a * 2.0)(x), "y")
    message = graph.as_graph_def()
    change(message)
    with pytest.raises(GraphError, match=problem):
        GraphItem.from_graph(message)


def test_loading_a_graph_leaves_it_as_it_was() -> None:
    built = ZOO["mlp"].build()
    before = built.graph.as_graph_def().SerializeToString(deterministic=True)
    GraphItem.from_graph(built.graph, train_op=built.train_op, outputs=built.outputs)
    assert built.graph.as_graph_def().SerializeToString(deterministic=True) == before


def test_parts_of_sparse_and_ragged_placeholders_are_no_batches() -> None:
    with tf.Graph().as_default() as graph:
        ids = v1.sparse_placeholder(tf.int64, name="ids")
        rows = v1.ragged.placeholder(tf.float32, 1, name="rows")
        x = v1.placeholder(tf.float32, [None, 1], "x")
        y = v1.placeholder(tf.float32, [None, 1], "y")
        total = tf.reduce_sum(x + y) + tf.sparse.reduce_sum(tf.cast(ids, tf.float32)) + tf.reduce_sum(rows)
        tf.identity(total, "total")
    item = GraphItem.from_graph(graph, outputs=["total"])
    assert {name for name, info in item.inputs.items() if info.batch_axis is not None} == {"x", "y"}
    named = GraphItem.from_graph(graph, outputs=["total"], batch_inputs={"ids/indices": None, "y": None})
    assert {name for name, info in named.inputs.items() if info.batch_axis is not None} == {"x"}


def test_results_that_nobody_declares_are_named() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        w = v1.get_variable("w", [3, 1], use_resource=True)
        y = x @ w
        loss = tf.reduce_mean(y * y, name="loss")
        tf.reduce_mean(tf.cast(y > 0, tf.float32), name="accuracy")
        v1.train.AdamOptimizer().minimize(loss, name="train")
        v1.train.Saver()
    assert [name for name, _, text in GraphItem.from_graph(graph, train_op="train").notes] == ["loss", "accuracy"]
    new = ar.rewrite(GraphItem.from_graph(graph, train_op="train"), {"devices": ["CPU:0", "CPU:1"]})
    assert "note: Mean 'loss': no output is declared" in str(new.report)
    assert GraphItem.from_graph(graph, train_op="train", outputs=["loss"]).notes == ()
