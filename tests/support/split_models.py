"""Models to cut on a model axis: blocks of two matrices, with their shardings, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem

Variables = Mapping[str, tf.Variable]
WIDTH = 4
EXACT = 1e-9


def variables(hidden: int = 8, blocks: int = 2) -> Variables:
    """Return matrices and biases of residual blocks, and the slot of a momentum."""
    rng = np.random.default_rng(0)

    def made(name: str, *shape: int) -> tf.Variable:
        return tf.Variable(rng.normal(size=shape) / 2, name=name, dtype=tf.float64)

    found = {}
    for i in range(blocks):
        found |= {f"up{i}": made(f"up{i}", WIDTH, hidden), f"bias{i}": made(f"bias{i}", hidden)}
        found |= {f"down{i}": made(f"down{i}", hidden, WIDTH)}
    slot = tf.Variable(tf.zeros([WIDTH, hidden], tf.float64), name="slot", trainable=False)
    return {**found, "slot": slot}


def step_of(v: Variables) -> Callable[[Any, Any], Any]:
    """Return a training step."""
    trained = {name: one for name, one in v.items() if name != "slot"}

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in range(len(trained) // 3):
                h = h + tf.nn.relu(h @ v[f"up{i}"] + v[f"bias{i}"]) @ v[f"down{i}"]
            loss = tf.reduce_mean((h - y) ** 2)
        gradients = dict(zip(trained, tape.gradient(loss, list(trained.values())), strict=True))
        v["slot"].assign(0.9 * v["slot"] + gradients.pop("up0"))
        v["up0"].assign_sub(0.1 * v["slot"])
        for name, gradient in gradients.items():
            v[name].assign_sub(0.1 * gradient)
        return loss

    return step


def item(hidden: int = 8) -> GraphItem:
    """Return the item of a step."""
    spec = tf.TensorSpec([None, WIDTH], tf.float64)
    return GraphItem.from_function(step_of(variables(hidden)), spec, spec)


def shardings(count: int) -> list[dict[str, Any]]:
    """Return Megatron's: columns of the first matrix, rows of the second."""
    return [{"match": r"up\d", "split": [1, count]}, {"match": r"down\d", "split": [count, 1]}]


def config(data: int, model: int, stage: int = 1, **more: Any) -> dict[str, Any]:
    """Return the configuration of a mesh on virtual CPUs."""
    mesh = {"data": data, "model": model, **({"stage": stage} if stage > 1 else {})}
    own: dict[str, Any] = {
        "devices": [f"CPU:{i}" for i in range(data * model * stage)],
        "mesh": mesh,
        "sharding": shardings(model),
    }
    if stage > 1:
        own |= {"pipeline": {"stages": stage, "microbatches": 2}, "strategy": {"name": "Pipeline"}}
    return {**own, **more}


def on_two_axes(data: int, stage: int = 1, **more: Any) -> dict[str, Any]:
    """Return the configuration of a mesh whose model axis is 2 x 2: features on axis 0, hidden units on axis 1."""
    entries = [{"match": r"up\d", "axes": [0, 1]}, {"match": r"down\d", "axes": [1, 0]}]
    own = config(data, 4, stage, sharding=entries)
    return {**own, "mesh": {**own["mesh"], "model": [2, 2]}, **more}


def batch(step: int, examples: int) -> tuple[Any, Any]:
    """Return a batch."""
    rng = np.random.default_rng(step)
    return rng.normal(size=(examples, WIDTH)), rng.normal(size=(examples, WIDTH))


def assert_a_function_trains_alike(config: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Compare a function with that of one device: each step's loss, and the variables, which others write, too.

    Args:
        config: to distribute it with.
        sizes: how many examples each step has.
    """
    alone, cut = variables(), variables()
    one = tf.function(step_of(alone))
    many = ar.distribute(step_of(cut), config)
    for step, size in enumerate(sizes):
        x, y = batch(step, size)
        assert abs(float(one(x, y)) - float(many(tf.constant(x), tf.constant(y)))) <= EXACT
        if step == 1:  # somebody else writes both
            for held in (alone, cut):
                held["up0"].assign(held["up0"] * 0.5)
    for name, variable in alone.items():
        np.testing.assert_allclose(cut[name].numpy(), variable.numpy(), rtol=0, atol=EXACT)
