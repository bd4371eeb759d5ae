"""Keras models whose variables two, three and four replicas divide, and optimizers that update under conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import keras
import numpy as np

import autograph_rewrite as ar
from tests.support.keras_floats import keras_floats
from tests.zoo.oracle import model_variables

Array = np.ndarray[Any, Any]
SIZES = (7,) * 4
ROWS, WIDTH, INNER = 24, 12, 24
SHAPES: Mapping[str, tuple[int, ...]] = {"transformer": (6, WIDTH), "cnn": (6, 6, 1), "embedding": (6,)}
HUGE = 1e307
"""A target of which the gradient overflows in float64, so that a scaled step is skipped."""


def transformer() -> Any:
    """Return a post-norm block; without biases of attention, as the gradient of a key's is zero but for rounding."""
    layers, x = keras.layers, keras.Input(SHAPES["transformer"])
    h = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 6, use_bias=False)(x, x))
    h = layers.LayerNormalization()(h + layers.Dense(WIDTH)(layers.Dense(INNER, "gelu")(h)))
    return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(h)))


def cnn() -> Any:
    """Return two convolutions with batch normalisation, whose moving averages are not trained."""
    layers = keras.layers
    convolutions = [layers.Conv2D(WIDTH, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
    head = [layers.Conv2D(INNER, 3), layers.Flatten(), layers.Dense(WIDTH, "tanh"), layers.Dense(1)]
    return keras.Sequential([keras.Input(SHAPES["cnn"]), *convolutions, *head])


def embedding() -> Any:
    """Return a bag of rows of a table."""
    layers = keras.layers
    bag = [layers.Embedding(ROWS, WIDTH), layers.GlobalAveragePooling1D()]
    return keras.Sequential(
        [keras.Input(SHAPES["embedding"], dtype="int32"), *bag, layers.Dense(INNER, "tanh"), layers.Dense(1)]
    )


MODELS: Mapping[str, Callable[[], Any]] = {"transformer": transformer, "cnn": cnn, "embedding": embedding}


def _scaled(inner: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=2)


OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "scaled": lambda: _scaled(keras.optimizers.SGD(0.01, momentum=0.9)),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled and accumulated": lambda: _scaled(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "averaged": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "factored": lambda: keras.optimizers.Adafactor(0.05),
}


def compiled(model: str, optimizer: str, policy: str = "float64") -> Any:
    """Return a compiled model, the same every time; `policy`: of its layers."""
    keras.utils.clear_session()
    with keras_floats(policy if policy == "float64" else "float32"):
        keras.mixed_precision.set_global_policy(policy)
        keras.utils.set_random_seed(3)
        made = MODELS[model]()
        made.compile(OPTIMIZERS[optimizer](), keras.losses.MeanSquaredError(), jit_compile=False)
    return made


def batches(model: str, *, overflow: bool, dtype: str = "float64") -> Iterator[tuple[Array, Array]]:
    """Yield batches that no number of replicas divides; with `overflow`, the second makes no finite gradient."""
    rng, shape = np.random.default_rng(1), SHAPES[model]
    for at, size in enumerate(SIZES):
        x = (
            rng.integers(0, ROWS, (size, *shape)).astype("int32")
            if len(shape) == 1
            else rng.normal(size=(size, *shape))
        )
        y = rng.normal(size=(size, 1)).astype(dtype)
        if overflow and at == 1:
            y[-1] = HUGE
        yield x, y


def trained(model: str, optimizer: str, config: Mapping[str, Any] | None = None) -> dict[str, Array]:
    """Return the losses of a few steps in float64, and the weights and slots after them."""
    made = compiled(model, optimizer)
    many = made if config is None else ar.distribute(made, dict(config))
    given = batches(model, overflow=optimizer.startswith("scaled"))
    losses = [many.train_on_batch(x, y) for x, y in given]
    found = {name: value for name, value in model_variables(many).items() if not name.startswith("metric/")}
    return {"loss": np.array([float(loss) for loss in losses]), **found}


@cache
def on_one_device(model: str, optimizer: str) -> Mapping[str, Array]:
    """Return what `trained` returns without a configuration, once for all tests of a process."""
    return trained(model, optimizer)


def over_data(stage: int | str, replicas: int) -> dict[str, Any]:
    """Return the configuration of a stage, or of the strategy FSDP."""
    devices = {"devices": [f"CPU:{i}" for i in range(replicas)]}
    if stage == "FSDP":
        return {**devices, "strategy": {"name": "FSDP", "variables": "mirrored"}}
    rule = {"match": ".*", "partition": {"over": "data", "stage": stage}}
    return {**devices, "strategy": {"variables": "mirrored"}, "variables": [rule]}


def worst(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> tuple[float, str]:
    """Return the largest error of all values, relative to the largest number of each, and where it is."""
    assert actual.keys() == expected.keys()
    return max((_error(actual[name], value), name) for name, value in expected.items())


def _error(actual: Array, expected: Array) -> float:
    if actual.shape != expected.shape or not np.array_equal(np.isfinite(actual), np.isfinite(expected)):
        return np.inf
    is_finite = np.isfinite(expected)
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(actual, expected) else np.inf
    most = np.abs(expected[is_finite]).max(initial=0.0)
    return float(np.abs(actual[is_finite] - expected[is_finite]).max(initial=0.0) / (most + 1e-9))
