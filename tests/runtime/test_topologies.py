"""A checkpoint of any topology goes on under any other: replicas, shards, servers and one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.checkpoint_targets import EagerVariables
from tests.support.keras_floats import keras_floats
from tests.support.sharded_models import worst
from tests.support.training import v1
from tests.zoo.oracle import model_variables

Array = np.ndarray[Any, Any]
TWO, THREE = (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"])
TOPOLOGIES: Mapping[str, dict[str, Any] | None] = {
    "one device": None,
    "2 replicas": {"devices": TWO, "strategy": {"variables": "mirrored"}},
    "3 replicas": {"devices": THREE, "strategy": {"variables": "mirrored"}},
    "FSDP": {"devices": TWO, "strategy": {"name": "FSDP", "variables": "mirrored"}},
    "servers": {"devices": THREE, "strategy": {"name": "PSLoadBalancing", "variables": "mirrored"}},
    "shards on servers": {"devices": TWO, "strategy": {"name": "PartitionedPS", "variables": "mirrored"}},
}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(4, 7, 6)), RNG.normal(size=(4, 7, 2))
WEIGHTS = {"w": RNG.normal(size=(6, 4)), "b": RNG.normal(size=(4,)), "head": RNG.normal(size=(4, 2))}


class Program(NamedTuple):
    """A program that trains under some topology.

    Attributes:
        target: what a checkpoint is of.
        train: makes one step on a batch.
        state: reads all variables, slots and counters.
    """

    target: Any
    train: Callable[[Array, Array], Any]
    state: Callable[[], Mapping[str, Array]]


@contextmanager
def session(config: dict[str, Any] | None) -> Iterator[Program]:
    """Open the session of a graph of TensorFlow 1 with Adam."""
    with tf.Graph().as_default() as graph:
        x, y = (v1.placeholder(tf.float64, [None, size], name) for name, size in (("x", 6), ("y", 2)))
        w, b, head = (v1.get_variable(name, initializer=value, use_resource=True) for name, value in WEIGHTS.items())
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ w + b) @ head - y), name="loss")
        v1.train.AdamOptimizer(0.1).minimize(loss, v1.train.get_or_create_global_step(), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")
    with (item if config is None else ar.rewrite(item, config)).session() as opened:
        opened.run("init")
        yield Program(opened, lambda x, y: opened.run("train", {"x": x, "y": y}), opened.read_variables)


@contextmanager
def model(config: dict[str, Any] | None) -> Iterator[Program]:
    """Make a Keras model with an average of its weights."""
    keras.utils.clear_session()
    with keras_floats("float64"):
        hidden, head = keras.layers.Dense(4, "tanh"), keras.layers.Dense(2, use_bias=False)
        made = keras.Sequential([keras.Input((6,)), hidden, head])
        made.set_weights(list(WEIGHTS.values()))
        optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=3)
        made.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    made.optimizer.build(made.trainable_variables)
    many = made if config is None else ar.distribute(made, config)

    def state() -> Mapping[str, Array]:
        return {name: value for name, value in model_variables(many).items() if not name.startswith("metric/")}

    yield Program(many, many.train_on_batch, state)


@contextmanager
def function(config: dict[str, Any] | None) -> Iterator[Program]:
    """Make a function over variables of its own, which tf.train.Checkpoint tracks."""
    weights = {name: tf.Variable(value, name=name) for name, value in WEIGHTS.items()}
    slots = {name: tf.Variable(np.zeros_like(value), trainable=False) for name, value in WEIGHTS.items()}
    count = tf.Variable(0, dtype=tf.int64)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ weights["w"] + weights["b"]) @ weights["head"] - y) ** 2)
        rate = 0.1 / (1 + tf.cast(count.assign_add(1), tf.float64))
        for name, slope in tape.gradient(loss, weights).items():
            weights[name].assign_sub(rate * slots[name].assign(0.9 * slots[name] + slope))
        return loss

    spec = [tf.TensorSpec([None, size], tf.float64) for size in (6, 2)]
    many = tf.function(step, input_signature=spec) if config is None else ar.distribute(step, config, *spec)
    tracked = tf.train.Checkpoint(weights=weights, slots=slots, count=count)

    def state() -> Mapping[str, Array]:
        found = {f"{kind}/{name}": v for kind, of in (("w", weights), ("s", slots)) for name, v in of.items()}
        return {name: variable.numpy() for name, variable in (found | {"count": count}).items()}

    yield Program(tracked, lambda x, y: many(tf.constant(x), tf.constant(y)), state)


KINDS = {"session": session, "model": model, "function": function}


def expected(kind: str, steps: int) -> Mapping[str, Array]:
    """Return what one device has after some steps."""
    with KINDS[kind](None) as program:
        for at in range(steps):
            program.train(X[at], Y[at])
        return dict(program.state())


def errors(kind: str, folder: Path) -> Mapping[tuple[str, str], tuple[float, str]]:
    """Train two steps under each topology, and from there two more under each; return how far that is from four."""
    before, after = expected(kind, 2), expected(kind, 4)
    for name, config in TOPOLOGIES.items():
        with KINDS[kind](config) as program:
            for at in (0, 1):
                program.train(X[at], Y[at])
            assert worst(program.state(), before)[0] < 1e-9, name
            with ar.CheckpointManager(program.target, folder / name) as manager:
                manager.save(2)
    found = {}
    for name, config in TOPOLOGIES.items():
        with KINDS[kind](config) as program:
            for saved in TOPOLOGIES:  # what the one before has left is what has to be overwritten
                restored = ar.CheckpointManager(program.target, folder / saved).restore()
                assert restored is not None
                assert restored.step == 2
                assert worst(program.state(), before)[0] < 1e-9, (saved, name)
                for at in (2, 3):
                    program.train(X[at], Y[at])
                found[saved, name] = worst(program.state(), after)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_under_any_topology_from_the_checkpoint_of_any(kind: str, tmp_path: Path) -> None:
    found = errors(kind, tmp_path)
    assert found.keys() == set(product(TOPOLOGIES, TOPOLOGIES))
    assert {pair: error for pair, error in found.items() if not error[0] < 1e-9} == {}


def test_a_slot_that_is_not_restored_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = EagerVariables.write

    def all_but_one(self: EagerVariables, values: Mapping[str, Any]) -> None:
        write(self, {name: value for name, value in values.items() if not name.startswith("slots/head")})

    monkeypatch.setattr(EagerVariables, "write", all_but_one)
    with pytest.raises(AssertionError, match="'one device', 'one device'"):
        errors("function", tmp_path)
