"""Programs as compiled Keras models: layers, loss and optimizer drawn, trained on two batches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import autograph_rewrite as ar
from tests.fuzz.optimizers import KERAS, keras_optimizer
from tests.fuzz.program import Program
from tests.support.keras_floats import keras_floats

Results = dict[str, Any]


def _model(program: Program) -> Any:
    import keras

    dice = random.Random(f"network {program.seed}")
    keras.utils.set_random_seed(program.seed)
    layers = keras.layers
    x = keras.Input((4, 3), batch_size=program.style.batch, dtype="float64", name="x")
    h = x
    kind = dice.choice(["dense", "gru", "conv", "attention"])
    if kind == "dense":
        h = layers.Flatten()(layers.Dense(5, activation="tanh")(h))
    elif kind == "gru":
        h = layers.GRU(4)(h)
    elif kind == "conv":
        h = layers.GlobalAveragePooling1D()(layers.Conv1D(4, 2, activation="relu")(h))
    else:
        h = layers.Flatten()(layers.MultiHeadAttention(2, 2)(h, h))
    for _ in range(dice.choice([0, 1, 2])):
        way = dice.choice(["batch", "layer", "dropout", "dense"])
        made = {
            "batch": lambda: layers.BatchNormalization(),
            "layer": lambda: layers.LayerNormalization(),
            "dropout": lambda: layers.Dropout(0.3, seed=3),
            "dense": lambda: layers.Dense(4, activation="gelu", kernel_regularizer="l2"),
        }
        h = made[way]()(h)
    model = keras.Model(x, layers.Dense(2)(h))
    optimizer = keras_optimizer(dice.choice(KERAS), dice)
    model.compile(optimizer, dice.choice(["mse", "mae", "huber"]), metrics=dice.choice([[], ["mae"]]))
    return model


def run(program: Program, config: dict[str, Any] | None, nudge: float = 0.0) -> Results:
    """Train on one device (no configuration) or on many.

    A nudge also turns the examples round, where no layer draws by their position: a gradient of signs, whose sum is
    zero but for rounding, depends on the order of the sum alone.
    """
    with keras_floats("float64"):
        model = _model(program)
        turn = 1 if nudge and not any(layer.name.startswith("dropout") for layer in model.layers) else 0
        if config is not None:
            model = ar.distribute(model, config)
        numbers = np.random.default_rng([program.seed, 1])
        results: Results = {}
        for i, batch in enumerate(program.batches):
            x, y = numbers.normal(size=(batch, 4, 3)) * (1 + nudge), numbers.normal(size=(batch, 2))
            x, y = np.roll(x, turn, 0), np.roll(y, turn, 0)
            results[f"step {i} loss"] = np.asarray(model.train_on_batch(x, y), np.float64)
        for i, value in enumerate([*model.get_weights(), *map(np.asarray, model.optimizer.variables)]):
            results[f"variable {i}"] = value
        return results
