"""Programs as compiled Keras models: layers, loss and optimizer drawn, trained batch by batch or by `fit`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

import autograph_rewrite as ar
from tests.fuzz.optimizers import KERAS, keras_optimizer
from tests.fuzz.program import Program, Stretch
from tests.support.keras_floats import keras_floats

Results = dict[str, Any]


def _kind(program: Program) -> str:
    """Return the kind of the first layer."""
    kind = random.Random(f"network {program.seed}").choice(["dense", "gru", "conv", "attention"])
    return "tokens" if program.style.newest and program.seed % 5 == 0 else kind


def _model(program: Program) -> Any:
    import keras

    dice = random.Random(f"network {program.seed}")
    if program.style.newest:
        keras.utils.clear_session(free_memory=False)  # so that layers always have the same names
    keras.utils.set_random_seed(program.seed)
    layers = keras.layers
    dice.choice(["dense", "gru", "conv", "attention"])
    kind, batch = _kind(program), program.style.batch
    if kind == "tokens":
        x = keras.Input((5,), batch_size=batch, dtype="int64", name="x")
        h = layers.GRU(4)(layers.Embedding(9, 3, mask_zero=True)(x))
    else:
        x = keras.Input((4, 3), batch_size=batch, dtype="float64", name="x")
        h = x
    if kind == "dense":
        h = layers.Flatten()(layers.Dense(5, activation="tanh")(h))
    elif kind == "gru":
        h = layers.GRU(4)(h)
    elif kind == "conv":
        h = layers.GlobalAveragePooling1D()(layers.Conv1D(4, 2, activation="relu")(h))
    elif kind == "attention":
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
    loss, metrics = dice.choice(["mse", "mae", "huber"]), dice.choice([[], ["mae"]])
    if isinstance(optimizer, (keras.optimizers.Lion, keras.optimizers.Adafactor)) and loss == "mae":
        loss = "mse"  # the sign or the scale of a sum of signs: if it is zero, the rounding of that order decides
    model.compile(optimizer, loss, metrics=metrics)
    return model


def run(program: Program, config: dict[str, Any] | None, stretch: Stretch, nudge: float = 0.0) -> Results:
    """Train on one device (no configuration) or on many.

    A nudge also shuffles the examples of each batch, where no layer draws by their position: a gradient of signs, whose
    sum is zero but for rounding, depends on the order of the sum alone.
    """
    with keras_floats("float64"):
        model = _model(program)
        shuffled = np.random.default_rng(int(nudge * 2**51)) if nudge and not draws(model) else None
        if config is not None:
            model = ar.distribute(model, config)
        if stretch.source is not None:
            _restore(program, model, stretch.source, config)
        numbers = np.random.default_rng([program.seed, 1])
        data = [(_examples(program, numbers, b), numbers.normal(size=(b, 2))) for b in program.batches]
        if shuffled is not None:
            orders = [shuffled.permutation(len(y)) for _, y in data]
            data = [(x[order], y[order]) for (x, y), order in zip(data, orders, strict=True)]
        results: Results = {}
        for chunk in stretch.chunks:
            x, y = (np.concatenate(parts) for parts in zip(*(data[i] for i in chunk), strict=True))
            x = x if x.dtype.kind == "i" else x * (1 + nudge)
            if by_fit(program):
                logs = model.fit(x, y, program.batches[0], shuffle=False, verbose=0).history
                results |= {f"step {chunk[-1]} {name}": np.asarray(value) for name, value in logs.items()}
                if chunk[-1] == len(data) - 1:
                    results[f"step {chunk[-1]} predictions"] = model.predict(x, 5, verbose=0)
            else:
                results[f"step {chunk[-1]} loss"] = np.asarray(model.train_on_batch(x, y), np.float64)
        if stretch.target is not None:
            _save(program, model, stretch, config)
        for i, value in enumerate([*model.get_weights(), *map(np.asarray, model.optimizer.variables)]):
            results[f"variable {i}"] = value
        return results


def by_fit(program: Program) -> bool:
    """Return whether a model is trained by `fit`, and not batch by batch."""
    return program.style.newest and (program.choice.steps_per_run > 1 or program.seed % 3 > 0)


def _examples(program: Program, numbers: np.random.Generator, rows: int) -> Any:
    """Return examples; those of tokens are padded with zeros, which a mask leaves out."""
    if _kind(program) != "tokens":
        return numbers.normal(size=(rows, 4, 3))
    tokens, lengths = numbers.integers(1, 9, (rows, 5)), numbers.integers(1, 6, (rows, 1))
    return tokens * (np.arange(5) < lengths)


def draws(model: Any) -> bool:
    """Return whether a model has random layers."""
    return any(layer.name.startswith("dropout") for layer in model.layers)


def chunks(program: Program) -> list[list[int]]:
    """Return the steps of each call."""
    return program.chunks(program.choice.steps_per_run, is_fit=by_fit(program))


def surveyed(program: Program) -> tuple[dict[str, tuple[int, ...]], set[str], bool]:
    """Return the shapes of a model's variables, the names of those that are trained, and whether it draws."""
    with keras_floats("float64"):
        model = _model(program)
        found = {v.path: tuple(v.shape) for v in model.variables}
        return found, {v.path for v in model.trainable_variables}, draws(model)


def _save(program: Program, model: Any, stretch: Stretch, config: dict[str, Any] | None) -> None:
    assert stretch.target is not None
    if program.seed % 2:
        with ar.CheckpointManager(model, stretch.target, config=config) as manager:
            manager.save(stretch.chunks[-1][-1] + 1)
    else:
        model.save_weights(stretch.target / "model.weights.h5")


def _restore(program: Program, model: Any, source: Path, config: dict[str, Any] | None) -> None:
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if program.seed % 2:
        ar.CheckpointManager(model, source, config=config).restore()
    else:
        model.load_weights(source / "model.weights.h5")
