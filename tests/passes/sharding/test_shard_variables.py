"""Variables in shards train to the values of whole ones; readers, checkpoints and sessions see them whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes.sharding.unroll import Unroll
from autograph_rewrite.plan import verify
from tests.matrix.run import compare, distributed, truth
from tests.support.covering import covering
from tests.support.training import control_flow, make_item, placeholder, train, v1, variable
from tests.zoo import GRAPH_OPTIMIZERS, ZOO, Options

SIZES = (12, 7, 12, 5, 12)
RNG = np.random.default_rng(0)


def cut(match: str, axis: int = 0, shards: int = 2) -> dict[str, Any]:
    return {"match": match, "partition": {"axis": axis, "shards": shards}}


def config(*variables: Mapping[str, Any], mode: str = "shared", replicas: int = 1) -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return {"devices": devices, "strategy": {"variables": mode}, "variables": list(variables), "timeout_seconds": 20}


def worst(name: str, optimizer: str, settings: Mapping[str, Any]) -> float:
    options = Options(optimizer=optimizer)
    trace, _ = distributed(ZOO[name].build(options), settings, SIZES)
    return max(error for _, error in compare(trace, truth(name, options, SIZES), 1e-6))


@pytest.mark.parametrize(
    ("name", "optimizer", "axis"), covering(("mlp", "language_model"), list(GRAPH_OPTIMIZERS), (0, 1))
)
def test_elementwise_optimizers_train_bit_for_bit_as_on_whole_variables(name: str, optimizer: str, axis: int):
    # Kernels of the others fuse a multiplication with an addition in whole packets only, which may end with a shard.
    error = worst(name, optimizer, config(cut(".*(w|words|topics)", axis, 3 - axis)))
    assert error == 0 if optimizer in ("sgd", "adam", "adagrad") else error < 1e-15


@pytest.mark.parametrize("mode", ["shared", "mirrored"])
@pytest.mark.parametrize("name", ["mlp", "language_model"])
def test_replicas_of_partitioned_variables_train_as_one_device(name: str, mode: str):
    assert worst(name, "adam", config(cut(".*(w|words|topics)", 0, 3), mode=mode, replicas=2)) < 1e-12


@pytest.mark.parametrize("options", [{"ref_variables": True}, {"batch": 12}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "language_model"])
def test_legacy_variables_and_static_batches_make_no_difference(name: str, options: dict[str, Any]):
    given = Options(optimizer="adam", **options)
    settings = config(cut(".*(w|words|topics)", 0, 3), mode="mirrored", replicas=2)
    trace, _ = distributed(ZOO[name].build(given), settings, (12, 12))

    assert max(error for _, error in compare(trace, truth(name, given, (12, 12)), 1e-6)) < 1e-12


def test_each_shard_is_reduced_by_itself_and_each_replica_looks_up_its_own_rows():
    built = ZOO["language_model"].build(optimizer="adam")
    item = GraphItem.from_graph(built.graph, train_op="train", outputs=["loss:0"], init_op="init")
    plan = ar.build_plan(item, config(cut("words|hidden/w", 0, 3), mode="mirrored", replicas=2))

    owners = [edge.owner for edge in plan.edges if edge.lowering == "collective_reduce"]
    assert [owners.count(f"{name}/part_{k}") for name in ("words", "hidden/w") for k in range(3)] == [1] * 6
    assert not [edge.value for edge in plan.edges if edge.lowering == "collective_gather" and "part_" in edge.value]


def gathering(ids: Any, rows: int, dtype: Any, *, axis: int = 0, shards: int = 4) -> tuple[GraphItem, dict[str, Any]]:
    """Return a step that adds one to every row that it looks up, and what to feed."""
    graph = tf.Graph()
    with graph.as_default():
        table = variable("table", np.arange(rows * 4.0).reshape(rows, 4))
        looked_up = placeholder("ids", None, *np.shape(ids)[1:], dtype=dtype)
        found = tf.raw_ops.ResourceGather(resource=table.handle, indices=looked_up, dtype=tf.float64)
        tf.identity(found, name="found")
        with tf.control_dependencies([found]):
            flat = tf.reshape(looked_up, [-1])
            update = table.scatter_add(tf.IndexedSlices(tf.ones([tf.size(flat), 4], tf.float64), flat))
        tf.group(update, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["found"], init_op="init", batch_inputs={"ids": 0})
    return item, config(cut("table", axis, shards))


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize(
    "ids",
    [
        [0, 2, 3, 5, 6, 8, 9, 10],  # the edges of every shard
        [9, 1, 9, 9, 0, 1],
        [4, 4, 4],  # all in one shard
        [[[0], [10]], [[7], [3]]],
        np.zeros([0, 3]),
    ],
)
@pytest.mark.parametrize(("axis", "rows"), [(0, 11), (0, 12), (1, 11)])
def test_rows_are_looked_up_and_updated_in_their_shards(ids: Any, dtype: Any, axis: int, rows: int):
    item, settings = gathering(ids, rows, dtype, axis=axis, shards=4)
    feed = {"ids": np.asarray(ids, dtype.as_numpy_dtype)}
    results = []
    for one in (item, ar.rewrite(item, settings)):
        with one.session() as session:
            session.run("init")
            found = [session.run(["found", "train"], feed)[0] for _ in range(2)]
            results.append((*found, session.read_variable("table")))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("bad", [-1, 11])
def test_an_id_out_of_range_is_refused_as_by_the_whole_table(bad: int):
    item, settings = gathering([0, bad], 11, tf.int64)
    with ar.rewrite(item, settings).session() as session:
        session.run("init")
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run("found", {"ids": [0, bad]})


def trained_by(update: Callable[[Any, Any], Any]) -> GraphItem:
    """Return a regression whose variable is updated by a function of it and its gradient."""
    graph = tf.Graph()
    with graph.as_default():
        w = variable("w", RNG.normal(size=(10, 3)))
        loss = tf.reduce_mean(tf.square(tf.matmul(placeholder("x", None, 10), w) - 1.0), name="loss")
        tf.group(update(w, v1.gradients(loss, w)[0]), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def lamb(w: Any, g: Any) -> Any:
    """Scale the step by the norms of the whole variable and of the whole step."""
    m = variable("m", np.zeros([10, 3]))
    with tf.control_dependencies([m.assign(0.9 * m + 0.1 * g)]):
        step = m.read_value() + 0.01 * w
    return w.assign_sub(0.1 * tf.norm(w) / tf.norm(step) * step)


def factored(w: Any, g: Any) -> Any:
    """Divide by what the means of rows and of columns give, as Adafactor does."""
    square = tf.square(g) + 1e-3
    rows, columns = tf.reduce_mean(square, 1, keepdims=True), tf.reduce_mean(square, 0, keepdims=True)
    return w.assign_sub(0.1 * g / tf.sqrt(rows * columns / tf.reduce_mean(square)))


def extremes(w: Any, g: Any) -> Any:
    """Clip by the largest entry, and stop where one is not finite."""
    finite = tf.reduce_all(tf.math.is_finite(g))
    return w.assign_sub(tf.where(finite, g / tf.reduce_max(tf.abs(g)), tf.zeros_like(g)) * (1 + tf.reduce_min(w)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("update", [lamb, factored, extremes])
def test_what_is_taken_over_the_whole_variable_is_taken_over_all_shards(update: Callable[..., Any], axis: int):
    item = trained_by(update)
    feeds = [{"x": RNG.normal(size=(6, 10))} for _ in range(4)]
    settings = config(cut("w", axis, 3), mode="mirrored", replicas=2)
    new = ar.rewrite(item, settings)

    expected, actual = train(item, feeds), train(new, feeds)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[name], value, rtol=1e-12, err_msg=name)
    reads = [node for node in new.graph if node.op == "ConcatV2" and node.name.startswith(("w/", "replica_1/w/", "m/"))]
    assert not [use.node.name for node in reads for use in node.output().uses if "norm" in use.node.name]


def test_a_gradient_that_is_not_cut_makes_the_comparison_fail(monkeypatch: pytest.MonkeyPatch):
    item = trained_by(lambda w, g: w.assign_sub(g))
    feeds = [{"x": RNG.normal(size=(6, 10))}]
    split = Unroll._split

    def the_first_only(self: Unroll, value: Any, made: Any) -> Sequence[Any]:
        return (split(self, value, made)[0],) * self.count

    expected = train(item, feeds).variables["w"]
    np.testing.assert_array_equal(train(ar.rewrite(item, config(cut("w"))), feeds).variables["w"], expected)
    monkeypatch.setattr(Unroll, "_split", the_first_only)
    wrong = train(ar.rewrite(item, config(cut("w"))), feeds).variables["w"]
    assert np.abs(wrong - expected).max() > 0.1


def test_a_checkpoint_holds_the_whole_and_goes_both_ways(tmp_path: Path):
    built = ZOO["mlp"].builder(Options(optimizer="adam"))  # one of our own, as the Saver adds nodes to it
    with built.graph.as_default():
        v1.train.Saver(v1.global_variables())
    item = GraphItem.from_graph(built.graph, train_op="train", outputs=["loss:0"], init_op="init")
    new = ar.rewrite(item, config(cut("hidden_0/w", 1, 3), cut(".*/w", 0, 2)))
    state = {}
    for one, path in ((item, tmp_path / "whole"), (new, tmp_path / "shards")):
        with one.session() as session:
            session.run("init")
            for step in range(2):
                session.run("train", built.feeds(step, 6))
            session.tf_session.run("save/control_dependency:0", {"save/Const:0": str(path)})
            state[path.name] = session.read_variables()
    assert tf.train.list_variables(str(tmp_path / "whole")) == tf.train.list_variables(str(tmp_path / "shards"))
    for one, name in ((item, "shards"), (new, "whole")):
        with one.session() as session:
            session.tf_session.run("save/restore_all", {"save/Const:0": str(tmp_path / name)})
            for variable_name, value in state[name].items():
                np.testing.assert_array_equal(session.read_variable(variable_name), value)


def test_a_random_initial_value_is_drawn_once_and_cut():
    def forward() -> dict[str, Any]:
        w = v1.get_variable("w", (10, 3), tf.float64, v1.random_normal_initializer(seed=3), use_resource=True)
        return {"loss": tf.reduce_sum(tf.matmul(placeholder("x", None, 10), w))}

    item = make_item(forward)
    expected = train(item, []).variables["w"]
    np.testing.assert_array_equal(train(ar.rewrite(item, config(cut("w", 0, 4))), []).variables["w"], expected)


def test_a_session_reads_writes_and_fetches_the_whole():
    item = trained_by(lambda w, g: w.assign_sub(g))
    new = ar.rewrite(item, config(cut("w", 0, 4), mode="mirrored", replicas=2))
    value = RNG.normal(size=(10, 3))
    with new.session() as session:
        session.run("init")
        session.write_variable("w", value)
        np.testing.assert_array_equal(session.read_variable("w"), value)
        np.testing.assert_array_equal(session.run("MatMul/ReadVariableOp:0"), value)
        assert new.variables["w"].shards is not None
        assert new.variables["w"].shards.sizes == (3, 3, 2, 2)


def test_a_saved_item_keeps_its_shards(tmp_path: Path):
    new = ar.rewrite(trained_by(lambda w, g: w.assign_sub(g)), config(cut("w")))
    new.save(tmp_path / "new.ar")

    assert GraphItem.load(tmp_path / "new.ar").variables == new.variables


@pytest.mark.parametrize("version", [1, 2])
def test_a_variable_that_a_loop_writes_is_cut_and_each_iteration_writes_its_shards(version: int):
    def forward() -> dict[str, Any]:
        w, x = variable("inner", np.eye(3)), placeholder("x", None, 3)

        def body(i: Any, y: Any) -> Any:
            with tf.control_dependencies([w.assign_add(tf.ones([3, 3], w.dtype), read_value=False)]):
                return i + 1, tf.matmul(y, w.read_value())

        y = tf.while_loop(lambda i, y: i < 3, body, [0, x])[1]
        return {"loss": tf.reduce_sum(y)}

    with control_flow(version):
        item = make_item(forward, version=version)
    assert ar.rewrite(item, config(cut("inner"))).variables["inner"].shards is not None
    report = ar.verify(item, config(cut("inner")))
    assert report.ok, report


def test_verify_compares_whole_variables():
    report = ar.verify(trained_by(lamb), config(cut("w", 0, 3), mode="mirrored", replicas=2))

    assert report.ok
    assert report.max_error < 1e-5


def test_the_plan_with_shards_round_trips_and_is_taken_again():
    item = trained_by(lamb)
    plan = ar.build_plan(item, config(cut("w"), mode="mirrored", replicas=2))
    again = ar.Plan.from_yaml(plan.to_yaml())

    assert again == plan
    assert not [problem for problem in verify.check(again, normalise(item)) if "part_" in problem.message]
    assert ar.rewrite(item, again).graph_bytes == ar.rewrite(item, plan).graph_bytes
