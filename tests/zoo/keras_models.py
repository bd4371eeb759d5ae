"""Compiled Keras 3 models: a CNN with batch norm, dropout, clipping and metrics; one with two inputs.

Everything takes its dtype explicitly; Keras' default is changed only while a model is compiled, because losses and
metrics that Keras makes itself take their dtype from nowhere else.
"""

from __future__ import annotations

from typing import Any

import keras

from tests.support.keras_floats import keras_floats

from .case import BuiltModel, Case, Options
from .data import Input, initial, integers, samples
from .optimizers import KERAS_OPTIMIZERS

_REDUCTIONS = {"mean": "sum_over_batch_size", "sum": "sum"}
_IMAGES = {"tiny": (6, 3, 5, 3), "large": (28, 32, 64, 10)}  # image size, filters, units, classes
_PAIRS = {"tiny": (4, 7, 3, 5), "large": (64, 20000, 64, 256)}  # features, vocabulary, width, units


def _seed_weights(model: Any, options: Options) -> None:
    """Give every weight the value that its name says; Keras draws them from a global counter otherwise."""
    for weight in model.trainable_variables:
        offset = 1.0 if weight.path.endswith("gamma") else 0.0
        weight.assign(initial(options.seed, weight.path, weight.shape, 0.3, offset, options.dtype))


def build_cnn(options: Options) -> BuiltModel:
    """Build an image classifier."""
    size, filters, units, classes = _IMAGES[options.size]
    dtype = options.dtype
    layers = keras.layers
    with keras_floats(dtype):
        model = keras.Sequential(
            [
                keras.Input((size, size, 1), batch_size=options.batch, dtype=dtype),
                layers.Conv2D(filters, 3, use_bias=False, dtype=dtype, name="conv"),
                layers.BatchNormalization(dtype=dtype, name="norm"),
                layers.Activation("relu", dtype=dtype, name="relu"),
                layers.MaxPooling2D(2, dtype=dtype, name="pool"),
                layers.Flatten(dtype=dtype, name="flatten"),
                layers.Dropout(0.25, seed=options.seed, dtype=dtype, name="dropout"),
                layers.Dense(units, activation="tanh", dtype=dtype, name="hidden"),
                layers.Dense(classes, dtype=dtype, name="logits"),
            ],
            name="cnn",
        )
        _seed_weights(model, options)
        model.compile(
            optimizer=KERAS_OPTIMIZERS[options.optimizer](clipnorm=0.5),
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=_REDUCTIONS[options.reduction], dtype=dtype
            ),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy", dtype=dtype)],
            jit_compile=False,
        )
    inputs = (Input("x", "float", (size, size, 1)), Input("y", "int64", (), integers(classes)))
    return BuiltModel(model=model, feeds=lambda at, batch: samples(inputs, options.dtype, options.seed, at, batch))


def build_two_inputs(options: Options) -> BuiltModel:
    """Build a functional model over a dict of a dense input and token ids, with a weight penalty."""
    features, vocabulary, width, units = _PAIRS[options.size]
    dtype = options.dtype
    layers = keras.layers
    with keras_floats(dtype):
        dense_in = keras.Input((features,), batch_size=options.batch, dtype=dtype, name="dense")
        ids_in = keras.Input((3,), batch_size=options.batch, dtype="int32", name="ids")
        bag = layers.GlobalAveragePooling1D(dtype=dtype, name="bag")(
            layers.Embedding(vocabulary, width, dtype=dtype, name="table")(ids_in)
        )
        joined = layers.Concatenate(dtype=dtype, name="joined")([dense_in, bag])
        hidden = layers.Dense(
            units, "gelu", kernel_regularizer=keras.regularizers.L2(1e-2), dtype=dtype, name="hidden"
        )(layers.LayerNormalization(dtype=dtype, name="norm")(joined))
        model = keras.Model([dense_in, ids_in], layers.Dense(1, dtype=dtype, name="out")(hidden), name="two")
        _seed_weights(model, options)
        model.compile(
            optimizer=KERAS_OPTIMIZERS[options.optimizer](),
            loss=keras.losses.MeanSquaredError(reduction=_REDUCTIONS[options.reduction], dtype=dtype),
            metrics=[keras.metrics.MeanAbsoluteError(name="mae", dtype=dtype)],
            jit_compile=False,
        )
    inputs = (
        Input("dense", "float", (features,)),
        Input("ids", "int32", (3,), integers(vocabulary)),
        Input("y", "float", (1,)),
    )

    def feeds(at: int, batch: int) -> tuple[Any, Any]:
        dense, ids, y = samples(inputs, options.dtype, options.seed, at, batch)
        return {"dense": dense, "ids": ids}, y

    return BuiltModel(model=model, feeds=feeds)


CASES = (
    Case(name="keras_cnn", kind="keras", family="conv", builder=build_cnn),
    Case(name="keras_two_inputs", kind="keras", family="sparse", builder=build_two_inputs),
)
