"""Compressors: what is applied and what is kept back are together what there was, in every mode and runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from tests.support.compressing import (
    COMPRESSORS,
    HALVES,
    MODES,
    WITH_FEEDBACK,
    Net,
    Sums,
    config,
    graph_item,
    residuals_of,
    sums_item,
    train_function,
    train_graph,
)
from tests.support.covering import covering

STEPS = 24
SHARDS = {"variables": [{"match": "w1", "partition": {"axis": 0, "shards": 2}}]}


@pytest.mark.parametrize(("compressor", "mode"), covering(COMPRESSORS, MODES))
def test_a_graph_learns_and_nothing_is_lost(mode: str, compressor: str):
    new = ar.rewrite(graph_item(), config(mode, compressor))
    account, residuals = train_graph(new, STEPS)

    assert np.mean(account.losses[-4:]) < 0.5 * np.mean(account.losses[:4])
    if compressor in WITH_FEEDBACK:
        assert account.error(residuals) < 1e-5
        assert max(np.abs(rest).max() for rest in residuals.values()) > 0
    else:
        assert not residuals
        assert 1e-6 < account.error({}) < 1e-2


@pytest.mark.parametrize(("compressor", "mode"), covering(COMPRESSORS, MODES[::-1]))
def test_a_function_learns_and_nothing_is_lost(mode: str, compressor: str):
    net = Net()
    step = ar.distribute(net.step, config(mode, compressor))
    account, residuals = train_function(net, step, STEPS)

    assert np.mean(account.losses[-4:]) < 0.5 * np.mean(account.losses[:4])
    assert account.error(residuals) < (1e-5 if compressor in WITH_FEEDBACK else 1e-2)


@pytest.mark.parametrize(
    ("compressor", "variables", "form"),
    covering(["fp16", "fp16_ef", "int8_ef", "topk", "powersgd"], [{}, SHARDS], ["unrolled", "loop"]),
)
def test_a_replica_sends_the_sum_of_its_micro_batches(compressor: str, variables: dict[str, Any], form: str):
    applied = []
    for micro in ({}, {"microbatches": 2, "accumulation": {"form": form}}):
        net = Net()
        step = ar.distribute(net.step, {**config("shared", compressor), **variables, **micro})
        account, residuals = train_function(net, step, 3)
        assert account.error(residuals) < (1e-5 if compressor in WITH_FEEDBACK else 1e-2)
        assert {name: value.shape[0] for name, value in residuals.items()} == dict.fromkeys(residuals, 2), "replicas"
        applied.append(account.losses)
    # Sums in another order round otherwise, and so may what is sent of them.
    np.testing.assert_allclose(*applied, rtol=1e-3)


@pytest.mark.parametrize("compressor", WITH_FEEDBACK)
def test_both_modes_and_both_runtimes_compute_the_same(compressor: str):
    results = []
    for mode in MODES:
        results.append(train_graph(ar.rewrite(graph_item(), config(mode, compressor)), 6))
        net = Net()
        results.append(train_function(net, ar.distribute(net.step, config(mode, compressor)), 6))
    first, kept = results[0]
    for account, residuals in results[1:]:
        np.testing.assert_allclose(account.losses, first.losses, rtol=1e-5)
        assert residuals.keys() == kept.keys()
        for name, value in kept.items():
            np.testing.assert_allclose(residuals[name], value, atol=1e-5, err_msg=name)


def test_a_keras_model_learns_and_keeps_residuals():
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 6)).astype(np.float32)
    ar.distribute(model, config("mirrored", "topk"))
    history = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=16, epochs=6, verbose=0).history["loss"]

    assert history[-1] < 0.5 * history[0]
    assert len(model.train_function.state.variables) == 2 * 3  # the bias of one unit is sent as it is
    assert model.evaluate(x, x.sum(axis=1, keepdims=True), verbose=0) < history[0]


@pytest.mark.parametrize("mode", MODES)
def test_error_feedback_keeps_a_small_gradient_from_drifting(mode: str):
    """4,096 steps of a constant gradient that lies between two numbers of fp16, added up in float64."""
    steps, gradient = 4096, 1.00024416e-4
    rows = np.full((2, 8), gradient / 2, np.float32)
    exact = steps * rows.astype(np.float64).sum(axis=0)
    drift = {"fp16": np.inf}
    for compressor in ("fp16", "fp16_ef") if mode == MODES[0] else ("fp16_ef",):  # without feedback modes are alike
        with Sums(sums_item(), config(mode, compressor)) as sums:
            drift[compressor] = np.abs(sums.many(rows, steps) - exact).max()

    assert drift["fp16_ef"] < 6e-8
    assert drift["fp16"] > 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_error_feedback_does_not_drift_where_replicas_contribute_unevenly(mode: str, replicas: int):
    rows = np.linspace(1.0001e-4, 2.0003e-4, replicas * 8, dtype=np.float32).reshape(replicas, 8)
    with Sums(sums_item(), config(mode, "bf16_ef", replicas)) as sums:
        total = sums.many(rows, 300)
        kept = sums.residual().astype(np.float64).sum(axis=0)

    np.testing.assert_allclose(total + kept, 300 * rows.astype(np.float64).sum(axis=0), rtol=2e-6)
    assert np.abs(kept).max() < replicas * 2e-6


def test_beyond_three_replicas_halves_are_added_as_halves_and_sent_in_full():
    new = ar.rewrite(graph_item(), config("mirrored", "fp16_ef", 4))
    account, residuals = train_graph(new, STEPS)

    assert {edge.lowering for edge in new.report.edges if edge.compressor == "fp16_ef"} == {"collective_reduce"}
    assert account.error(residuals) < 2e-3
    assert np.mean(account.losses[-4:]) < 0.5 * np.mean(account.losses[:4])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compressor", HALVES)
def test_without_feedback_the_sum_is_that_of_the_rounded_numbers(mode: str, compressor: str):
    rows = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    kind = np.float16 if compressor == "fp16" else tf.bfloat16.as_numpy_dtype
    with Sums(sums_item(), config(mode, compressor)) as sums:
        applied = sums.step(rows)

    assert np.array_equal(applied, rows.astype(kind).sum(axis=0, dtype=kind).astype(np.float32))


@pytest.mark.parametrize(
    ("compressor", "dtype", "mode"), covering(COMPRESSORS, [tf.float64, tf.float16, tf.bfloat16], MODES)
)
def test_gradients_of_every_float_type_are_compressed(mode: str, dtype: Any, compressor: str):
    rows = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(dtype.as_numpy_dtype)
    exact = rows.astype(np.float64).sum(axis=0)
    with Sums(sums_item(shape=(8, 16), dtype=dtype), config(mode, compressor)) as sums:
        applied = sums.step(rows)
        assert applied.dtype == dtype.as_numpy_dtype
        kept = sums.residual().sum(axis=0) if compressor in WITH_FEEDBACK else 0.0
    accuracy = 1e-9 if dtype is tf.float64 and compressor in WITH_FEEDBACK else 2e-2
    np.testing.assert_allclose(applied.astype(np.float64) + kept, exact, atol=accuracy)


def test_traces_of_one_function_share_their_residuals():
    net = Net()

    def train(x: Any, y: Any, scale: Any = None) -> dict[str, Any]:
        return net.step(x if scale is None else x * scale, y)

    step = ar.distribute(train, config("shared", "topk"))
    x, y = np.ones((6, 6), np.float32), np.ones((6, 4), np.float32)
    step(x, y)
    first = residuals_of(step)
    step(x, y, tf.constant(2.0))

    assert len(step.items) == 2
    assert residuals_of(step).keys() == first.keys()
    assert any(np.any(value != first[name]) for name, value in residuals_of(step).items())


def test_one_replica_sends_nothing_so_nothing_is_compressed():
    new = ar.rewrite(graph_item(), config("shared", "topk", 1))

    assert not new.state
    assert {edge.compressor for edge in new.report.edges} == {"none"}
