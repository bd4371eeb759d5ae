"""`random: independent`: each replica draws its own block, from a stream of its own, reproducibly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.passes.batch.random_numbers import own_bits
from tests.support.covering import covering
from tests.support.training import MODES, distributed, make_item, placeholder, train, variable

BATCH = 6
Draw = Callable[[Any], Any]


def generator(x: Any) -> Any:
    return tf.random.Generator.from_seed(3).uniform(tf.shape(x))


def seed_generator(x: Any) -> Any:
    """Draw as Keras' dropout does: the seed is a pair of numbers, one of which a variable counts up."""
    counter = variable("counter", np.int32(0))
    with tf.control_dependencies([counter.assign_add(1)]):
        seed = tf.stack([np.int32(7), counter.read_value()])
    return tf.nn.experimental.stateless_dropout(tf.ones_like(x), rate=0.5, seed=seed)


def looped(x: Any) -> Any:
    """Draw in a loop, whose constants live inside of it."""

    def body(i: Any, total: Any) -> tuple[Any, Any]:
        return i + 1, total + tf.random.stateless_uniform(tf.shape(x), [5, i], dtype=x.dtype)

    return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros_like(x)])[1]


def raw_stateless(dtype: Any) -> Draw:
    return lambda x: tf.raw_ops.StatelessRandomNormal(shape=tf.shape(x), seed=tf.constant([1, 2], dtype))


SEEDED: dict[str, Draw] = {
    "uniform": lambda x: tf.random.uniform(tf.shape(x), seed=3),
    "dropout": lambda x: tf.compat.v1.nn.dropout(tf.ones_like(x), rate=0.5, seed=4),
    "gamma": lambda x: tf.random.gamma([], alpha=tf.ones_like(x), seed=3, dtype=x.dtype),
    "categorical": lambda x: tf.random.categorical(tf.zeros_like(x), 3, seed=5),
    "stateless uniform": lambda x: tf.random.stateless_uniform(tf.shape(x), [1, 2]),
    "stateless int": lambda x: tf.random.stateless_uniform(tf.shape(x), [1, 2], 0, 1 << 30, tf.int32),
    "stateless, old, 32 bits": raw_stateless(tf.int32),
    "stateless, old, 64 bits": raw_stateless(tf.int64),
    "generator": generator,
    "seed generator": seed_generator,
    "in a loop": looped,
}


def item_of(draw: Draw) -> Any:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 40), variable("w", np.full((40, 1), 0.1))
        mask = tf.cast(draw(x), tf.float64)
        wide = tf.tile(mask, [1, 14])[:, :40]
        return {"loss": tf.reduce_sum((x * wide) @ w), "mask": mask}

    return make_item(forward)


def masks(item: Any, batch: int = BATCH) -> list[Any]:
    """Return what two steps draw."""
    return [step["mask"] for step in train(item, [{"x": np.ones((batch, 40))}] * 2).fetched]


@pytest.mark.parametrize(("name", "mode"), covering(list(SEEDED), MODES))
def test_replicas_draw_different_numbers_and_the_same_again_in_another_session(name: str, mode: str) -> None:
    item = item_of(SEEDED[name])
    for replicas in (2, 3):
        rewritten = distributed(item, mode, replicas, random="independent")
        first, again, original = masks(rewritten), masks(rewritten), masks(item, BATCH // replicas)
        np.testing.assert_array_equal(first, again)
        for step in first:
            assert not any(np.array_equal(p, q) for p, q in itertools.combinations(np.split(step, replicas), 2))
        # Replica 0 keeps the stream.
        np.testing.assert_allclose(first[0][: BATCH // replicas], original[0], rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_uneven_blocks_draw_as_many_rows_as_they_have(mode: str) -> None:
    rewritten = distributed(item_of(SEEDED["stateless uniform"]), mode, 3, random="independent")
    for batch in (5, 1):
        assert masks(rewritten, batch)[0].shape == (batch, 40)


@pytest.mark.parametrize("mode", MODES)
def test_an_op_without_seeds_draws_fresh_numbers_everywhere(mode: str) -> None:
    item = item_of(lambda x: tf.raw_ops.RandomUniform(shape=tf.shape(x), dtype=tf.float32))
    rewritten = distributed(item, mode, random="independent")
    first, again = masks(rewritten)[0], masks(rewritten)[0]
    assert not np.array_equal(first, again)
    assert not np.array_equal(first[:3], first[3:])


@pytest.mark.parametrize("name", ["uniform", "stateless uniform", "seed generator"])
@pytest.mark.parametrize("mode", MODES)
def test_exact_randomness_draws_what_one_device_draws(name: str, mode: str) -> None:
    item = item_of(SEEDED[name])
    np.testing.assert_allclose(masks(distributed(item, mode)), masks(item), rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_keras_dropout_layer_draws_its_own_mask_on_every_replica(mode: str) -> None:
    def forward() -> dict[str, Any]:
        x, w = placeholder("x", None, 40, dtype=tf.float32), variable("w", np.full((40, 1), 0.1, np.float32))
        mask = keras.random.dropout(tf.ones_like(x), 0.5, seed=9)
        return {"loss": tf.reduce_sum((x * mask) @ w), "mask": mask}

    (mask, _) = masks(distributed(make_item(forward), mode, random="independent"))
    assert mask.shape == (BATCH, 40)
    assert not np.array_equal(mask[:3], mask[3:])
    assert 0.2 < np.mean(mask == 0) < 0.8


def test_the_first_replica_keeps_its_seed_and_the_others_differ_in_many_bits() -> None:
    for width in (32, 64):
        numbers = [own_bits(r, width) for r in range(64)]
        assert numbers[0] == 0
        assert len(set(numbers)) == 64
        assert all(-(2 ** (width - 1)) <= n < 2 ** (width - 1) for n in numbers)
        assert min((n & (2**width - 1)).bit_count() for n in numbers[1:]) > width // 8
