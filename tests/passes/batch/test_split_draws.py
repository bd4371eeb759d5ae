"""What is drawn whole is cut where it is drawn: a generator that begins with noise is divided like everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.passes.batch import random_numbers

Draw = Callable[[tf.Tensor], tf.Tensor]
CONFIGS: dict[str, dict[str, Any]] = {
    "shared": {"strategy": {"name": "AllReduce", "variables": "shared"}},
    "mirrored": {"strategy": {"name": "AllReduce", "variables": "mirrored"}},
    "micro": {"strategy": {"name": "AllReduce"}, "microbatches": 2},
    "independent": {"strategy": {"name": "AllReduce"}, "semantics": {"random": "independent"}},
}
SEED = tf.constant([3, 4])
GENERATOR = tf.random.Generator.from_seed(1)
ROWS = 5


DRAWS: dict[str, Draw] = {
    "normal": lambda x: tf.random.normal([tf.shape(x)[0], 6], seed=1),
    "of a generator": lambda x: GENERATOR.normal([tf.shape(x)[0], 6]),
    "uniform by number": lambda x: tf.random.stateless_uniform([tf.shape(x)[0], 6], SEED),
    "several rows for each example": lambda x: tf.reshape(
        tf.random.stateless_normal([3 * tf.shape(x)[0], 2], SEED), [-1, 6]
    ),
    "gamma of one parameter for each": lambda x: tf.random.stateless_gamma([tf.shape(x)[0], 6], SEED, tf.ones([6])),
    "classes": lambda x: tf.one_hot(tf.random.stateless_uniform([tf.shape(x)[0]], SEED, 0, 6, tf.int32), 6),
    "for two batches": lambda x: tf.split(
        tf.random.stateless_normal(tf.shape(tf.concat([x, 2 * x], 0)), SEED) * tf.concat([x, x + 1], 0), 2
    )[0],
}


def made(draw: Draw) -> tuple[Any, tf.Variable]:
    """Return a step of a generator, whose noise is judged against real rows."""
    w = tf.Variable(np.linspace(-1, 1, 36).reshape(6, 6), dtype=tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 6])])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.tanh(draw(x) @ w) @ w) - x))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return step, w


def config(kind: str) -> dict[str, Any]:
    return {"devices": ["CPU:0", "CPU:1"], **CONFIGS[kind]}


def batch(rows: int = ROWS) -> tf.Tensor:
    return tf.constant(np.random.default_rng(rows).normal(size=(rows, 6)), tf.float32)


def share(draw: Draw, kind: str = "shared") -> float:
    item = ar.GraphItem.from_function(made(draw)[0])
    return ar.rewrite(item, config(kind), batch=64).report.covered.share


def test_without_the_cut_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_numbers, "split_draws", lambda state: state)
    assert share(DRAWS["normal"]) < 0.5


ALIKE = [(name, kind) for name in DRAWS for kind in CONFIGS if name not in ("normal", "of a generator")]
ALIKE = [(name, kind) for name, kind in ALIKE if kind != "independent"]
"""What one device draws, too: the others draw from where the generator is, or for each replica by itself."""


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in DRAWS for k in CONFIGS if (n, k) not in ALIKE])
def test_what_follows_from_noise_is_divided(name: str, kind: str) -> None:
    assert share(DRAWS[name], kind) > 0.9


@pytest.mark.parametrize(("name", "kind"), ALIKE)
def test_it_is_the_noise_of_one_device_and_what_follows_from_it_is_divided(name: str, kind: str) -> None:
    step, w = made(DRAWS[name])
    before = w.numpy()
    expected = [step(batch(rows)) for rows in (ROWS, 1, 8)], w.numpy()
    w.assign(before)
    new = ar.distribute(step, config(kind))
    found = [new(batch(rows)) for rows in (ROWS, 1, 8)], w.numpy()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    if (name, kind) != ("for two batches", "micro"):  # micro-batches have no segments
        assert new.items[0].report.covered.at(64).share > 0.9
