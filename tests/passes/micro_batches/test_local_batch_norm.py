"""Batch normalisation with micro-batches: each has its own statistics, and moving averages take them in turn."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.covering import covering
from tests.support.staged import assert_alike, staged_item, train, values, variable

v1 = tf.compat.v1
LAYERS, CHANNELS = 3, 4
LOCAL: dict[str, Any] = {"devices": ["CPU:0"], "semantics": {"batch_norm": "local"}}
FEEDS = [{"x": np.random.default_rng(i).normal(size=(8, 5, 5, CHANNELS)).astype(np.float32)} for i in range(3)]


def normalised(h: Any, i: int, fused: bool) -> tuple[Any, Any, Any]:
    scale, offset = variable(f"g{i}", np.ones(CHANNELS, np.float32)), variable(f"b{i}", np.zeros(CHANNELS, np.float32))
    if fused:
        return v1.nn.fused_batch_norm(h, scale, offset, epsilon=1e-3, is_training=True)
    mean, variance = tf.nn.moments(h, [0, 1, 2])
    return tf.nn.batch_normalization(h, mean, variance, offset, scale, 1e-3), mean, variance


def layers(x: Any, fused: bool) -> tuple[Any, list[str], dict[str, Any]]:
    """Return the loss, the outputs of the layers, and the statistics by the moving average that they go into."""
    h, cuts, statistics = x, [], {}
    for i in range(LAYERS):
        w = variable(f"w{i}", values(3, 3, CHANNELS, CHANNELS, seed=i).astype(np.float32))
        y, mean, variance = normalised(tf.nn.conv2d(h, w, 1, "SAME"), i, fused)
        h = tf.nn.relu(y, name=f"h{i}")
        cuts.append(h.op.name)
        statistics |= {f"mean{i}": mean, f"variance{i}": variance}
    return tf.reduce_mean(h**2 * tf.range(CHANNELS, dtype=tf.float32)), cuts, statistics


def averages(names: Any) -> dict[str, Any]:
    zeros = np.zeros(CHANNELS, np.float32)
    return {n: v1.get_variable(n, initializer=zeros, trainable=False, use_resource=True) for n in names}


def network(fused: bool, batch: int | None = None) -> tuple[Any, list[str]]:
    loss, cuts, statistics = layers(v1.placeholder(tf.float32, (batch, 5, 5, CHANNELS), name="x"), fused)
    for i, (name, average) in enumerate(averages(statistics).items()):
        if i % 2:
            update = average.assign_sub(0.1 * (average - statistics[name]))
        else:
            update = average.assign(average * 0.9 + statistics[name] * 0.1)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return loss, cuts


def in_sequence(micro: int, fused: bool) -> tuple[Any, list[str]]:
    """The same network on each micro-batch after another, written by hand."""
    x = v1.placeholder(tf.float32, (None, 5, 5, CHANNELS), name="x")
    rows, losses, steps = tf.shape(x)[0] // micro, [], []
    with v1.variable_scope("", reuse=v1.AUTO_REUSE):
        for m in range(micro):
            loss, cuts, statistics = layers(x[m * rows : (m + 1) * rows], fused)
            losses.append(loss)
            steps.append(statistics)
    last: list[Any] = []
    kept = averages(steps[0])
    for statistics in steps:
        with tf.control_dependencies(last):
            last = [kept[n].assign(kept[n].read_value() * 0.9 + s * 0.1).op for n, s in statistics.items()]
    for update in last:
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    return tf.add_n(losses) / micro, cuts


@lru_cache(maxsize=4)
def expected(micro: int, fused: bool) -> Any:
    item, _ = staged_item(lambda: in_sequence(micro, fused))
    return train(item, FEEDS)


@lru_cache(maxsize=2)
def given(fused: bool) -> Any:
    return staged_item(lambda: network(fused))


@pytest.mark.parametrize(("fused", "micro", "stages"), covering([True, False], [2, 4], [0, 2, 3]))
def test_micro_batches_are_normalised_as_if_each_was_trained_on_by_itself(fused: bool, micro: int, stages: int) -> None:
    item, cuts = given(fused)
    config: dict[str, Any] = {**LOCAL, "microbatches": micro}
    if stages:
        config = {**LOCAL, "pipeline": {"stages": stages, "microbatches": micro, "boundaries": cuts[: stages - 1]}}
    new = ar.rewrite(item, config)
    assert_alike(train(new, FEEDS), expected(micro, fused), 2e-5)


@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("fused", [True, False])
def test_a_static_batch_is_normalised_alike(fused: bool, stages: int) -> None:
    item, cuts = staged_item(lambda: network(fused, 8), batch_inputs={"x": 0})
    pipeline = {"pipeline": {"stages": stages, "microbatches": 4, "boundaries": cuts[: stages - 1]}}
    new = ar.rewrite(item, {**LOCAL, **(pipeline if stages else {"microbatches": 4})})
    assert_alike(train(new, FEEDS), expected(4, fused), 2e-5)


def test_statistics_of_the_whole_batch_are_another_matter() -> None:
    """The tests above can fail: one normalisation of the whole batch gives something else."""
    item, _ = given(True)
    together, apart = train(item, FEEDS), expected(4, True)
    assert np.abs(together[1]["w0"] - apart[1]["w0"]).max() > 1e-3
    assert np.abs(together[1]["mean0"] - apart[1]["mean0"]).max() > 1e-3


@pytest.mark.parametrize("fused", [True, False])
def test_the_whole_batch_is_normalised_at_once_unless_local_is_asked_for(fused: bool) -> None:
    item, _ = given(fused)
    config = {"devices": ["CPU:0"], "microbatches": 4}
    assert_alike(train(ar.rewrite(item, config), FEEDS), train(item, FEEDS), 2e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_an_empty_micro_batch_updates_nothing(fused: bool) -> None:
    item, _ = given(fused)
    few = [{"x": FEEDS[0]["x"][:3]}]
    oracle, _ = staged_item(lambda: in_sequence(3, fused))
    new = ar.rewrite(item, {**LOCAL, "microbatches": 4})
    assert_alike(train(new, few), train(oracle, few), 2e-5)


def test_replicas_average_their_statistics_before_each_update() -> None:
    item, _ = given(True)
    half = FEEDS[0]["x"][:4]
    twice = [{"x": np.concatenate([half, half])}]
    new = ar.rewrite(item, {**LOCAL, "devices": ["CPU:0", "CPU:1"], "microbatches": 2})
    alone = ar.rewrite(item, {**LOCAL, "microbatches": 2})
    got, one = train(new, twice), train(alone, [{"x": half}])
    for name in ("mean0", "variance2"):
        np.testing.assert_allclose(got[1][name], one[1][name], 2e-5, 2e-5)


def _trained_with_moving_mean(config: dict[str, Any], *, before_the_gradients: bool) -> dict[str, Any]:
    """Train three steps; return all variables."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float64, [None, 6], "x")
        w, u = (
            v1.get_variable(n, [6, 6], tf.float64, v1.glorot_uniform_initializer(1), use_resource=True) for n in "wu"
        )
        mean = v1.get_variable("mean", [6], tf.float64, v1.zeros_initializer(), trainable=False, use_resource=True)
        h = tf.matmul(x, w)
        of_batch, variance = tf.nn.moments(h, [0])
        h = tf.nn.relu(tf.nn.batch_normalization(h, of_batch, variance, None, None, 1e-3), name="h0")
        loss = tf.reduce_mean(tf.square(tf.matmul(h, u)))
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        update = mean.assign_sub((mean - of_batch) * 0.1)
        if before_the_gradients:
            with tf.control_dependencies([update]):
                optimizer.minimize(loss, name="train")
        else:
            tf.group(optimizer.minimize(loss), update, name="train")
        v1.group(v1.global_variables_initializer(), name="init")
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=[loss], init_op="init", batch_inputs={"x": 0})
    new = ar.rewrite(item, {"devices": ["CPU:0"], "semantics": {"batch_norm": "local"}, **config})
    rng = np.random.default_rng(0)
    with new.session() as session:
        session.run("init")
        for _ in range(3):
            session.run("train", {"x": rng.normal(size=(8, 6))})
        return session.read_variables()


@pytest.mark.parametrize(
    "config",
    [
        {"pipeline": {"stages": 2, "microbatches": 4, "boundaries": ["h0"]}},
        {"microbatches": 4, "accumulation": {"form": "loop"}},
        {"microbatches": 4},
    ],
    ids=["stages", "loop", "unrolled"],
)
def test_update_ops_as_control_dependencies_of_minimize_are_those_that_follow_it(config: dict[str, Any]) -> None:
    before, after = (_trained_with_moving_mean(config, before_the_gradients=order) for order in (True, False))

    assert before["mean"].any()
    for name, value in after.items():
        np.testing.assert_allclose(before[name], value, 1e-12, err_msg=name)
