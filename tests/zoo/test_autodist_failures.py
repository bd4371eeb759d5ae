"""What AutoDist gets wrong (FIELD.md, section 6) comes out right: one device's values, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.matrix.run import distributed, relative_error
from tests.support.covering import covering
from tests.zoo import ZOO, Built, Options, train
from tests.zoo.autodist import AUTODIST
from tests.zoo.data import Input
from tests.zoo.training import Step, Variables, assemble

v1 = tf.compat.v1
BATCHES = (12, 7, 2)
MODES = ("mirrored", "shared")


def config(variables: str = "shared", replicas: int = 3) -> dict[str, Any]:
    return {
        "devices": [f"CPU:{i}" for i in range(replicas)],
        "strategy": {"name": "AllReduce", "variables": variables},
        "timeout_seconds": 60,
    }


def assert_trains_like_one_device(built: Built, variables: str, batches: Sequence[int] = BATCHES) -> None:
    expected = train(built, batches)
    actual, _ = distributed(built, config(variables), batches)
    for step, outputs in enumerate(expected.outputs):
        for name, value in outputs.items():
            assert relative_error(actual.outputs[step][name], value, 1e-6) < 1e-9, f"step {step} {name}"
    for name, value in expected.variables.items():
        assert relative_error(actual.variables[name], value, 1e-6) < 1e-9, name


@pytest.mark.parametrize(
    ("name", "variables"), covering([name for name in AUTODIST if name != "linear_regression"], MODES)
)
def test_it_trains_to_the_values_of_one_device(name: str, variables: str):
    assert_trains_like_one_device(AUTODIST[name].build(optimizer="adam"), variables)


@pytest.mark.parametrize("variables", MODES)
def test_the_acceptance_case_of_autodist_gets_its_bias(variables: str):
    trace, _ = distributed(AUTODIST["linear_regression"].build(), config(variables, replicas=2), (1000,))

    assert trace.variables["b"] == pytest.approx(0.0417503, abs=5e-8)


@pytest.mark.parametrize("name", ["language_model", "lstm_v1"])
def test_an_imported_metagraph_trains_to_the_values_of_one_device(name: str, tmp_path: Path):
    built = ZOO[name].build(optimizer="adam")
    path = tmp_path / "model.meta"
    with built.graph.as_default():
        v1.train.export_meta_graph(str(path), graph=built.graph)
    imported = tf.Graph()
    with imported.as_default():
        v1.train.import_meta_graph(str(path))
    named: dict[str, Any] = {
        "train_op": built.train_op,
        "outputs": list(built.outputs),
        "init_op": built.init_op,
        "batch_inputs": dict(built.batch_inputs),
    }

    expected = train(built, BATCHES)
    for item in (ar.GraphItem.from_graph(imported, **named), ar.GraphItem.load(path, **named)):
        variables = trained(item, built)
        for variable, value in expected.variables.items():
            assert relative_error(variables[variable], value, 1e-6) < 1e-9, variable


def trained(item: ar.GraphItem, built: Built) -> dict[str, Any]:
    new = ar.rewrite(item, config())
    with new.session() as session:
        session.run(new.init_op)
        for step, batch in enumerate(BATCHES):
            session.run([built.loss, built.train_op], feed_dict=built.feeds(step, batch))
        return session.read_variables()


def test_a_list_of_train_ops_runs_all_of_them():
    built = AUTODIST["two_optimizers"].build()
    # The two halves of the group "train": FTRL's update and Adagrad's step counter.
    halves = [op.name for op in built.graph.get_operation_by_name("train").control_inputs]
    ops = halves or ["train"]
    item = ar.GraphItem.from_graph(
        built.graph,
        train_op=ops,
        outputs=list(built.outputs),
        init_op="init",
        batch_inputs=built.batch_inputs,
    )
    new = ar.rewrite(item, config())
    with new.session() as session:
        session.run(new.init_op)
        for step, batch in enumerate(BATCHES):
            session.run([built.loss, *ops], feed_dict=built.feeds(step, batch))
        variables = session.read_variables()

    for name, value in train(built, BATCHES).variables.items():
        assert relative_error(variables[name], value, 1e-6) < 1e-9, name


def on_one_device_it_still_runs(built: Built) -> None:
    train(built, (4, 4))


def wrap_and_rewrite(built: Built, **changes: Any) -> None:
    named: dict[str, Any] = {
        "train_op": built.train_op,
        "outputs": list(built.outputs),
        "init_op": built.init_op,
        "batch_inputs": dict(built.batch_inputs) or None,
        **changes,
    }
    ar.rewrite(ar.GraphItem.from_graph(built.graph, **named), config())


def body_without_batch(variables: Variables, _: dict[str, Any]) -> Step:
    weight = variables("w", (3,))
    loss = tf.reduce_sum(tf.square(weight))
    return Step(loss, v1.train.GradientDescentOptimizer(0.1).minimize(loss))


def body_without_update(variables: Variables, inputs: dict[str, Any]) -> Step:
    loss = tf.reduce_mean(inputs["x"] * variables("w", (4,)))
    return Step(loss, tf.no_op())


def body_that_updates_nothing_but_a_local(variables: Variables, inputs: dict[str, Any]) -> Step:
    loss = tf.reduce_mean(inputs["x"] * variables("w", (4,)))
    return Step(loss, tf.identity(loss * 2))


def body_that_ignores_its_batch(variables: Variables, inputs: dict[str, Any]) -> Step:
    step = body_without_batch(variables, inputs)
    return Step(step.loss, step.train, {"seen": tf.reduce_sum(inputs["x"])})


@pytest.mark.parametrize(
    ("body", "inputs", "said"),
    [
        (body_without_batch, (), "batch"),
        (body_that_ignores_its_batch, (Input("x", "float", (4,)),), "batch"),
        (body_without_update, (Input("x", "float", (4,)),), "update"),
        (body_that_updates_nothing_but_a_local, (Input("x", "float", (4,)),), "update"),
    ],
)
def test_a_graph_in_which_there_is_nothing_to_distribute_is_an_error(
    body: Callable[[Variables, dict[str, Any]], Step], inputs: tuple[Input, ...], said: str
):
    built = assemble(Options(), inputs, body)
    on_one_device_it_still_runs(built)

    with pytest.raises(ar.GraphError, match=said):
        wrap_and_rewrite(built)
