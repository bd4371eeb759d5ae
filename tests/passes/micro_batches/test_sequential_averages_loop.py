"""Moving averages where micro-batches are a loop: another loop updates them in turn, of one size for any number."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.normalize.normalize import normalise
from tests.passes.micro_batches.test_local_batch_norm import (
    CHANNELS,
    FEEDS,
    LOCAL,
    averages,
    expected,
    given,
    in_sequence,
    layers,
    network,
)
from tests.support.covering import covering
from tests.support.staged import assert_alike, staged_item, train

v1 = tf.compat.v1
HOW: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": {"form": "loop"}},
    "stages": {"pipeline": {"stages": 3, "form": "loop"}},
}


def rewritten(item: ar.GraphItem, cuts: list[str], how: str, micro: int, devices: int = 1) -> ar.GraphItem:
    config = {**LOCAL, "devices": [f"CPU:{i}" for i in range(devices)], **HOW[how]}
    if how == "stages":
        config["pipeline"] = {**config["pipeline"], "microbatches": micro, "boundaries": cuts[:2]}
    else:
        config["microbatches"] = micro
    return ar.rewrite(item, config)


@pytest.mark.parametrize(("how", "fused", "micro"), covering(list(HOW), [True, False], [2, 4]))
def test_averages_take_each_micro_batch_in_its_turn(how: str, fused: bool, micro: int) -> None:
    item, cuts = given(fused)
    assert_alike(train(rewritten(item, cuts, how, micro), FEEDS), expected(micro, fused), 2e-5)


@pytest.mark.parametrize("how", HOW)
def test_a_static_batch_is_averaged_alike(how: str) -> None:
    item, cuts = staged_item(lambda: network(True, 8), batch_inputs={"x": 0})
    assert_alike(train(rewritten(item, cuts, how, 4), FEEDS), expected(4, True), 2e-5)


@pytest.mark.parametrize("how", HOW)
def test_an_empty_micro_batch_updates_nothing(how: str) -> None:
    item, cuts = given(True)
    few = [{"x": FEEDS[0]["x"][:3]}]
    oracle, _ = staged_item(lambda: in_sequence(3, True))
    assert_alike(train(rewritten(item, cuts, how, 4), few), train(oracle, few), 2e-5)


def test_replicas_average_their_statistics_before_each_update() -> None:
    item, cuts = given(True)
    half = FEEDS[0]["x"][:4]
    twice = [{"x": np.concatenate([half, half])}]
    got, one = (
        train(rewritten(item, cuts, "accumulation", 2, devices), feeds)
        for devices, feeds in ((2, twice), (1, [{"x": half}]))
    )
    for name in ("mean0", "variance2"):
        np.testing.assert_allclose(got[1][name], one[1][name], 2e-5, 2e-5)


@pytest.mark.parametrize("how", HOW)
def test_the_graph_is_as_large_for_64_micro_batches_as_for_4(how: str) -> None:
    item, cuts = given(True)
    few, many = (len(rewritten(item, cuts, how, micro).graph) for micro in (4, 64))
    assert few == many


@pytest.mark.parametrize("how", HOW)
def test_every_average_is_written_in_one_place_and_in_every_step(how: str) -> None:
    item, cuts = given(False)
    new = rewritten(item, cuts, how, 4)
    check_expanded(new.graph_bytes, normalise(item), ("CPU:0", "CPU:1", "CPU:2"), micro=4)
    writes = [node for node in new.graph if "Assign" in node.op and node.inputs[0].node.op == "Enter"]
    assert len(writes) == 6


def branching() -> tuple[Any, list[str]]:
    """The network, whose averages are updated where a flag says so."""
    loss, cuts, statistics = layers(v1.placeholder(tf.float32, (None, 5, 5, CHANNELS), name="x"), True)
    flag = v1.placeholder_with_default(True, (), name="flag")
    for name, average in averages(statistics).items():

        def updated(average: Any = average, name: str = name) -> Any:
            return tf.identity(average.assign_sub(0.1 * (average - statistics[name]), read_value=True))

        update = tf.cond(flag, updated, lambda average=average: average.read_value())
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update.op)
    return loss, cuts


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_updates_in_a_branch_are_written_out_and_happen_only_there(how: str, flag: bool) -> None:
    item, cuts = staged_item(branching)
    got = train(rewritten(item, cuts, how, 4), [{**given, "flag": flag} for given in FEEDS])
    if flag:
        assert_alike(got, expected(4, True), 2e-5)
    else:
        np.testing.assert_array_equal(got[1]["mean0"], np.zeros(CHANNELS))


def model() -> Any:
    keras.utils.set_random_seed(3)
    layers: list[Any] = [keras.Input((6,))]
    for _ in range(2):
        layers += [keras.layers.Dense(6, activation="tanh"), keras.layers.BatchNormalization(momentum=0.8)]
    made = keras.Sequential(layers)
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


@pytest.mark.parametrize("config", [{"microbatches": 4}, {"pipeline": {"stages": 2, "microbatches": 4}}])
def test_a_fitted_model_has_the_averages_that_copies_give(config: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(22, 6)).astype(np.float32), rng.normal(size=(22, 6)).astype(np.float32)
    looped = {key: {**value, "form": "loop"} for key, value in config.items() if key == "pipeline"}
    looped = looped or {**config, "accumulation": {"form": "loop"}}
    weights = []
    for how in (config, looped):
        made = ar.distribute(model(), {**LOCAL, **how})
        made.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(made.get_weights())
    assert np.abs(weights[0][4]).max() > 1e-2
    for copies, loop in zip(*weights, strict=True):
        np.testing.assert_allclose(loop, copies, 2e-5, 2e-6)
