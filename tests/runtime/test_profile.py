"""`ar.profile`: the steps of a function, a session and a Keras model, by their original nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.runtime.engine.step_observers import PROFILE
from tests.support.linear_step import Linear, batch, config
from tests.support.small_items import regression

MIRRORED = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}


def origins(found: Any) -> set[str]:
    return {row["node"] for row in found.figures()["nodes"]}


def test_a_function_is_profiled_by_its_original_nodes_beside_the_prediction() -> None:
    step = ar.distribute(Linear().step, config("mirrored", 2))
    found = ar.profile(step, *batch(6), steps=3)
    figures = found.figures()
    original = {node.name for node in step.traces[0].original.graph}
    assert {name for name in origins(found) if not name.startswith("autograph_batch/")} <= original
    assert "MatMul" in {row["op"].removeprefix("_Mkl") for row in figures["nodes"]}
    assert any("CollectiveReduceV2" in row["exchange"] for row in figures["exchanges"])
    assert [row["device"] for row in figures["devices"]] == ["CPU:0", "CPU:1"]
    assert all(row["predicted"]["compute"] > 0 for row in figures["devices"])
    assert (figures["steps"], figures["examples"]) == (3, 6)
    assert figures["flops_per_second"] > 0
    assert figures["attributed"]["share"] + figures["attributed"]["other"] <= 1
    for row in figures["devices"]:
        assert row["compute"] + row["communication"] + row["idle"] == pytest.approx(found.step_seconds)
    assert step.observer is None


def test_a_session_is_profiled_and_its_step_predicted_from_the_original() -> None:
    item = regression()
    new = ar.rewrite(item, MIRRORED)
    with new.session() as session:
        session.run(new.init_op)
        feeds = {"x": np.ones((8, 3), np.float32)}
        found = ar.profile(session, ["train", "loss"], feeds, steps=2, original=item)
    assert {"y", "gradient", "update"} <= origins(found)
    assert found.examples == 8
    assert found.predicted is not None
    assert found.predicted["batch"] == 8


def test_a_run_of_several_steps_counts_the_examples_of_all_and_is_not_predicted() -> None:
    several = {"devices": ["CPU:0", "CPU:0"], "strategy": {"name": "AllReduce"}, "steps_per_run": 4}
    w = tf.Variable([[1.0], [2.0]], name="w")

    def step(x: Any) -> Any:
        loss = tf.reduce_sum(x @ w)
        w.assign_sub(tf.linalg.matmul(x, tf.ones_like(x @ w), transpose_a=True) * 0.01)
        return loss

    distributed = ar.distribute(step, several, tf.TensorSpec([None, 2]))
    found = ar.profile(distributed, tf.ones([3, 6, 2]), steps=1)
    assert found.examples == 18
    assert found.predicted is None
    assert "steps_per_run" in found.notes[0]
    assert any(row["runs"] == 6 for row in found.figures()["nodes"])  # three steps on two replicas


def test_a_keras_model_is_profiled_on_batches() -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ar.distribute(model, config("mirrored", 2))
    found = ar.profile(model, np.ones((8, 4), np.float32), np.ones((8, 1), np.float32), steps=2)
    assert found.examples == 8
    assert any("MatMul" in name for name in origins(found))


@pytest.mark.parametrize("batches", [7, 4])
def test_a_callback_logs_some_batches_of_fit_to_tensorboard(tmp_path: Path, batches: int) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ar.distribute(model, config("mirrored", 2))
    callback = ar.ProfileCallback(tmp_path, skip=2, steps=3)
    x = np.ones((8 * batches, 4), np.float32)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[callback])
    assert callback.profile is not None
    assert len(callback.profile.ranks[0].steps) == min(3, batches - 2)
    assert Profile.load(tmp_path / "profile.json") == callback.profile
    (file,) = tmp_path.glob("events.out.*")
    logged = {
        value.tag: tf.make_ndarray(value.tensor)
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    figures = {"step_seconds", "examples_per_second", "flops_per_second", "exposed_communication_seconds"}
    places = {f"rank_0/CPU:{n}/compute{also}" for n in (0, 1) for also in ("", "_predicted")}
    assert {f"profile/{name}" for name in figures | places} | {"profile"} <= set(logged)
    assert float(logged["profile/step_seconds"]) == pytest.approx(callback.profile.step_seconds)


def test_a_callback_refuses_a_model_that_is_not_distributed(tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ar.GraphError, match="is not distributed"):
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[ar.ProfileCallback(tmp_path, skip=1)])


def test_a_function_of_ones_own_is_profiled_by_the_names_of_its_kernels() -> None:
    found = ar.profile(tf.function(lambda x: tf.linalg.matmul(x, x, name="square")), tf.ones([4, 4]), steps=1)
    assert any("square" in name for name in origins(found))
    assert found.predicted is None


def test_nothing_to_profile_is_an_error_that_says_so() -> None:
    with pytest.raises(ar.GraphError, match="runs no step"):
        ar.profile(regression())
    with pytest.raises(ar.GraphError, match="nothing to profile in 0 steps"):
        ar.profile(len, [], steps=0)


def test_a_step_that_fails_leaves_no_profiler_behind() -> None:
    def fails(count: list[int]) -> None:
        count.append(1)
        if len(count) > 1:
            raise ValueError("the step's own")

    with pytest.raises(ValueError, match="the step's own"):
        ar.profile(fails, [], warmup=1)
    assert ar.profile(tf.function(lambda x: x + 1.0), tf.ones([2]), steps=1).ranks


def test_two_profiles_at_once_are_refused(tmp_path: Path) -> None:
    tf.profiler.experimental.start(str(tmp_path))
    try:
        with pytest.raises(ar.GraphError, match="running already"):
            ar.profile(tf.function(lambda x: x + 1.0), tf.ones([2]), steps=1)
    finally:
        tf.profiler.experimental.stop(save=False)


def test_the_environment_asks_for_a_profile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"folder": str(tmp_path), "skip": 1, "steps": 2}
    monkeypatch.setenv(PROFILE, json.dumps(request))
    first = ar.distribute(Linear().step, config("shared", 2))
    second = ar.distribute(Linear().step, config("shared", 2))
    for _ in range(4):
        first(*batch(6))
        second(*batch(6))
    (file,) = tmp_path.iterdir()
    said = json.loads(file.read_text())
    assert len(said["trace"]["steps"]) == 2
    assert said["predicted"]["batch"] == 6
