"""`ar.verify` agrees with right rewrites, finds wrong ones, and never hangs or touches the user's variables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.check.random_feeds import random_feeds
from autograph_rewrite.check.report import VerifyReport
from autograph_rewrite.check.side_by_side import Tolerance, Training
from autograph_rewrite.check.verify import compare
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.item import GraphItem
from autograph_rewrite.runtime.function.session_step import unbind
from autograph_rewrite.tools import cli
from tests.support.covering import covering
from tests.zoo import ZOO, Options

v1 = tf.compat.v1
TWO = ["CPU:0", "CPU:1"]
MODES = ("shared", "mirrored")


def config(mode: str = "shared", **more: Any) -> dict[str, Any]:
    strategy = {"name": "AllReduce", "variables": mode}
    return {"devices": TWO, "strategy": strategy, "timeout_seconds": 20, **more}


def zoo_item(name: str, **options: Any) -> GraphItem:
    case = ZOO[name]
    built = case.build(Options(**options))
    if case.kind == "graph":
        return ar.GraphItem.from_graph(
            built.graph, train_op=built.train_op, outputs=list(built.outputs), init_op=built.init_op
        )
    if case.kind == "function":
        return ar.GraphItem.from_function(built.step, *built.specs)
    x, y = tf.nest.map_structure(lambda v: tf.TensorSpec([None, *v.shape[1:]], v.dtype), built.feeds(0, 4))
    return ar.GraphItem.from_keras(built.model, x, y)


def v1_item(build: Callable[[], tuple[Any, dict[str, Any]]]) -> GraphItem:
    """Make an item of a graph whose loss and outputs `build` gives; trained by Adam, which amplifies rounding."""
    graph = tf.Graph()
    with graph.as_default():
        loss, outputs = build()
        tf.identity(loss, name="loss")
        for name, tensor in outputs.items():
            tf.identity(tensor, name=name)
        v1.train.AdamOptimizer(0.1).minimize(loss, name="train")
        v1.global_variables_initializer()
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss", *outputs], init_op="init")


def weight(name: str, shape: list[int], *, seed: int | None = 3) -> Any:
    return v1.get_variable(name, shape, initializer=v1.random_normal_initializer(stddev=0.5, seed=seed))


def regression() -> tuple[Any, dict[str, Any]]:
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    return tf.reduce_mean(tf.square(tf.matmul(x, weight("w", [3, 2])))), {}


def break_graph(item: GraphItem, mode: str, edit: Callable[[Graph], None]) -> GraphItem:
    new = ar.rewrite(item, config(mode))
    graph = serde.from_bytes(new.graph_bytes)
    edit(graph)
    return replace(new, source=graph)


def check_broken(item: GraphItem, broken: GraphItem, steps: int = 3) -> VerifyReport:
    training = Training(random_feeds(item, steps=steps, batch=5, seed=0), steps)
    return compare(item, broken, training, Tolerance())


@pytest.mark.parametrize(("name", "mode"), covering(["mlp", "language_model", "custom_loop", "keras_cnn"], MODES))
def test_a_right_rewrite_is_confirmed(name: str, mode: str) -> None:
    report = ar.verify(zoo_item(name, optimizer="adam", dtype="float32"), config(mode))
    assert report.ok, str(report)
    assert 0 < report.max_error < 1e-5
    assert report.batch == 5
    assert str(report).startswith("ok: ")


def test_in_double_precision_the_errors_are_those_of_double_precision() -> None:
    report = ar.verify(zoo_item("cnn", optimizer="momentum", dtype="float64"), config(), rtol=1e-9)
    assert report.ok, str(report)
    assert report.max_error < 1e-12


def twice_the_first_replica(graph: Graph) -> None:
    (update,) = (node for node in graph if node.op == "ResourceApplyAdam")
    reduction = update.inputs[9].node
    while reduction.op != "AddN":
        reduction = reduction.inputs[0].node
    assert [value.node.name[:10] for value in reduction.inputs] == ["replica_0/", "replica_1/"]
    reduction.set_input(1, reduction.inputs[0])


def test_a_gradient_of_one_replica_only_is_found() -> None:
    item = v1_item(regression)
    report = check_broken(item, break_graph(item, "shared", twice_the_first_replica))
    assert not report.ok
    assert report.max_error > 0.01
    assert "w" in {row.name for row in report.wrong}
    assert "DIFFERS" in str(report)
    assert str(report).startswith("MISMATCH")


@pytest.mark.parametrize("name", ["custom_loop", "loss_scaling"])
def test_every_single_reduction_that_is_wrong_is_found_in_half_precision_too(name: str) -> None:
    item, values = unbind(zoo_item(name, optimizer="adam", dtype="float32"))
    new = ar.rewrite(item, config())
    feeds = random_feeds(item, steps=2, batch=5, seed=0)
    graph = serde.from_bytes(new.graph_bytes)
    sums = [node.name for node in graph if node.op == "AddN" and node.name.endswith("/add_n")]
    assert len(sums) >= 3
    for name_of_sum in sums:
        broken = serde.from_bytes(new.graph_bytes)
        node = broken.node(name_of_sum)
        node.set_input(1, node.inputs[0])
        report = compare(item, replace(new, source=broken), Training(feeds, 2, values), Tolerance())
        assert not report.ok, name_of_sum


def test_the_same_comparison_agrees_when_nothing_is_broken() -> None:
    item = v1_item(regression)
    assert check_broken(item, break_graph(item, "shared", lambda graph: None)).ok


def test_a_mirror_that_goes_its_own_way_is_found_though_the_first_copy_is_right() -> None:
    def edit(graph: Graph) -> None:
        (update,) = (n for n in graph if n.op == "ResourceApplyAdam" and n.name.startswith("replica_1/"))
        rate = graph.add("Const", name="wrong", attrs={"value": np.float32(0.2), "dtype": 1}, device=update.device)
        update.set_input(5, rate.output())

    item = v1_item(regression)
    report = check_broken(item, break_graph(item, "mirrored", edit), steps=1)
    assert [row.name for row in report.wrong] == ["w"]
    assert "replica 1" in report.wrong[0].where


def test_a_wrong_initial_value_is_found() -> None:
    def edit(graph: Graph) -> None:
        (node,) = (n for n in graph if n.op == "RandomStandardNormal")
        node.set_raw_attr("seed2", encode("int", 99))

    item = v1_item(regression)
    report = check_broken(item, break_graph(item, "shared", edit))
    assert [(row.name, "at the start" in row.where) for row in report.wrong] == [("w", True)]


def test_a_rewritten_graph_that_fails_is_a_mismatch_and_no_exception() -> None:
    def edit(graph: Graph) -> None:
        node = next(n for n in graph if n.op == "MatMul" and n.name.startswith("replica_1/"))
        node.set_attr("transpose_a", not node.attr("transpose_a"))

    item = v1_item(regression)
    report = check_broken(item, break_graph(item, "shared", edit))
    assert not report.ok
    assert report.rows[0].where.startswith("step 1: InvalidArgumentError: ")
    assert json.loads(json.dumps(report.data()))["max_error"] == "inf"


def test_a_rewritten_graph_that_tensorflow_does_not_take_is_a_mismatch_and_no_exception() -> None:
    def edit(graph: Graph) -> None:
        node = next(n for n in graph if n.op == "MatMul" and n.name.startswith("replica_1/"))
        axis = graph.add(
            "Const", name="vector", attrs={"value": np.zeros(3, np.float32), "dtype": 1}, device=node.device
        )
        node.set_input(0, axis.output())

    item = v1_item(regression)
    report = check_broken(item, break_graph(item, "shared", edit))
    assert [row.ok for row in report.rows] == [False]
    assert report.rows[0].where.startswith("import: TensorFlow cannot import the rewritten graph: Shape must be")


def test_a_graph_that_hangs_is_an_error_within_its_time_limit() -> None:
    def edit(graph: Graph) -> None:
        node = next(n for n in graph if n.op.startswith("CollectiveReduce") and n.name.startswith("replica_1/"))
        for use in node.output().uses:
            use.node.set_input(use.index, node.inputs[0])

    item = v1_item(regression)
    new = ar.rewrite(item, config("mirrored", timeout_seconds=2))
    graph = serde.from_bytes(new.graph_bytes)
    edit(graph)
    with pytest.raises(ar.ClusterError, match="did not finish"):
        check_broken(item, replace(new, source=graph))


@pytest.mark.parametrize("mode", MODES)
def test_unseeded_dropout_and_initialisers_are_seeded_in_both_graphs(mode: str) -> None:
    def build() -> tuple[Any, dict[str, Any]]:
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        hidden = tf.nn.dropout(tf.nn.relu(tf.matmul(x, weight("w1", [6, 8], seed=None))), rate=0.5)
        return tf.reduce_mean(tf.square(tf.matmul(hidden, weight("w2", [8, 1], seed=None)))), {"hidden": hidden}

    report = ar.verify(v1_item(build), config(mode))
    assert report.ok, str(report)
    assert any("3 random ops without a seed" in note for note in report.notes)
    assert any(row.name == "hidden" and row.max_abs > 0 for row in report.rows)


def test_unseeded_dropout_in_a_function_is_seeded_too() -> None:
    tf.random.set_seed(None)  # another test of this process may have set one
    w = tf.Variable(tf.ones([6, 2]), name="w")

    @tf.function
    def forward(x: Any) -> Any:
        return tf.nn.dropout(x @ w, rate=0.5)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return {"loss": loss}

    report = ar.verify(ar.GraphItem.from_function(step, tf.TensorSpec([None, 6])), config())
    assert report.ok, str(report)
    assert any("functions inlined" in note for note in report.notes)


@pytest.mark.parametrize("draw", [tf.random.normal, tf.random.truncated_normal, tf.random.uniform])
@pytest.mark.parametrize("sized", [tf.zeros_like, tf.ones_like, lambda x: tf.zeros(tf.shape(x))])
def test_a_metric_may_ask_how_many_rows_were_drawn(draw: Callable[..., Any], sized: Callable[[Any], Any]) -> None:
    """As the accuracy of a discriminator on examples that a generator makes of noise."""
    w, count = tf.Variable(tf.ones([3, 1])), tf.Variable(0.0)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            made = (x * draw(tf.shape(x))) @ w
            loss = tf.reduce_mean(made**2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        count.assign_add(tf.reduce_sum(sized(made)))
        return loss

    assert ar.verify(GraphItem.from_function(step, tf.TensorSpec([None, 3])), config()).ok


def test_the_variables_of_the_user_do_not_change() -> None:
    built = ZOO["custom_loop"].build(Options(dtype="float32"))
    before = {name: variable.numpy() for name, variable in built.variables.items()}
    assert ar.verify(ar.GraphItem.from_function(built.step, *built.specs), config()).ok
    for name, variable in built.variables.items():
        np.testing.assert_array_equal(before[name], variable.numpy())


def test_an_item_saved_and_loaded_keeps_the_values_of_its_variables(tmp_path: Path) -> None:
    zoo_item("function_sparse", dtype="float32").save(tmp_path / "step.ar")
    report = ar.verify(ar.GraphItem.load(tmp_path / "step.ar"), config())
    assert report.ok, str(report)
    assert not report.notes


def test_noise_that_adam_blows_up_is_told_from_an_error() -> None:
    """A bias before batch normalisation has no gradient but rounding, of which Adam makes whole steps."""

    def build() -> tuple[Any, dict[str, Any]]:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        hidden = tf.matmul(x, weight("w1", [4, 32])) + weight("bias", [32])
        mean, variance = tf.nn.moments(hidden, [0])
        normal = tf.tanh((hidden - mean) * tf.math.rsqrt(variance + 1e-3))
        return tf.reduce_mean(tf.square(tf.matmul(normal, weight("w2", [32, 1])) - 1.0)), {}

    report = ar.verify(v1_item(build), config(), batch=13)
    assert report.ok, str(report)
    noisy = {row.name for row in report.rows if row.error > 1e-5}
    assert "bias" in noisy
    assert any("explained by rounding" in note for note in report.notes)
    assert re.search(r"of them within rounding, .*; worst error \d.\de-\d+, allowed", str(report))


@pytest.mark.parametrize("name", ["masked", "keras_cnn"])
def test_a_plan_is_taken_as_well_as_a_config(name: str, tmp_path: Path) -> None:
    item = zoo_item(name, dtype="float32")
    ar.build_plan(item, config("mirrored")).save(tmp_path / "plan.yaml")
    report = ar.verify(item, ar.Plan.load(tmp_path / "plan.yaml"))
    assert report.ok, str(report)
    assert report.config["mode"] == "mirrored"


def test_what_differs_by_design_is_said() -> None:
    report = ar.verify(zoo_item("cnn_fused", dtype="float32"), config(semantics={"batch_norm": "local"}))
    assert not report.ok
    assert any("batch_norm is local" in note for note in report.notes)


def test_variables_that_nothing_initialises_get_values() -> None:
    item = v1_item(regression)
    variables = {name: replace(variable, initializer=None) for name, variable in item.variables.items()}
    bare = replace(item, init_op=None, variables=variables)
    report = ar.verify(bare, config())
    assert report.ok, str(report)
    assert any("without an initial value" in note for note in report.notes)


def test_the_worst_comes_first_and_the_report_becomes_json() -> None:
    report = ar.verify(v1_item(regression), config())
    errors = [row.error for row in report.rows]
    assert errors == sorted(errors, reverse=True)
    assert {row.kind for row in report.rows} == {"variable", "slot", "output"}
    data = json.loads(json.dumps(report.data()))
    assert data["ok"] is True
    assert data["config"]["devices"] == ["/device:CPU:0", "/device:CPU:1"]


def test_the_command_line_exits_with_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v1_item(regression).save(tmp_path / "item.ar")
    (tmp_path / "config.yaml").write_text("devices: [CPU:0, CPU:1]\n")
    arguments = ["verify", str(tmp_path / "item.ar"), "--config", str(tmp_path / "config.yaml"), "--steps", "2"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    assert cli.main([*arguments, "--rtol", "1e-30"]) in (0, 1)
    capsys.readouterr()
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
