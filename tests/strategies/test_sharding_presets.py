"""The shipped configurations for a model axis cut what they say of real Keras models, which train as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.config import presets

LAYERS = keras.layers
WORDS, LENGTH, WIDTH, HEADS = 16, 6, 8, 4
FLOAT = {"dtype": "float64"}


def language_model() -> Any:
    """A decoder with attention, feed-forward layers, positions and a head over the vocabulary."""
    ids = LAYERS.Input((LENGTH,), dtype="int32")
    table = LAYERS.Embedding(WORDS, WIDTH, name="token_embedding", **FLOAT)
    positions = LAYERS.Embedding(LENGTH, WIDTH, name="position_embedding", **FLOAT)
    x = table(ids) + positions(keras.ops.arange(LENGTH))
    a = LAYERS.LayerNormalization(name="norm_a", **FLOAT)(x)
    attend = LAYERS.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False, name="attention_0", **FLOAT)
    x = LAYERS.Add(**FLOAT)([x, attend(a, a, use_causal_mask=True)])
    h = LAYERS.LayerNormalization(name="norm_f", **FLOAT)(x)
    h = LAYERS.Dense(32, activation="gelu", name="feedforward_intermediate_dense_0", **FLOAT)(h)
    x = LAYERS.Add(**FLOAT)([x, LAYERS.Dense(WIDTH, name="feedforward_output_dense_0", **FLOAT)(h)])
    return keras.Model(ids, LAYERS.Dense(WORDS, name="lm_head", **FLOAT)(x))


class Experts(LAYERS.Layer):  # type: ignore[misc]
    """A mixture of experts, of which each token has the two best."""

    def __init__(self, experts: int, inner: int) -> None:
        super().__init__(name="experts", **FLOAT)
        self.count, self.inner = experts, inner

    def build(self, shape: Any) -> None:
        width = shape[-1]
        self.route = self.add_weight(shape=(width, self.count), name="route")
        self.up = self.add_weight(shape=(self.count, width, self.inner), name="up")
        self.bias = self.add_weight(shape=(self.count, self.inner), name="bias")
        self.down = self.add_weight(shape=(self.count, self.inner, width), name="down")

    def call(self, x: Any) -> Any:
        gates = tf.nn.softmax(tf.einsum("btd,de->bte", x, self.route))
        best = tf.math.top_k(gates, 2)[0][..., 1:]
        gates = tf.where(gates >= best, gates, tf.zeros_like(gates))
        hidden = tf.nn.relu(tf.einsum("btd,edf->ebtf", x, self.up) + self.bias[:, None, None])
        return x + tf.einsum("bte,ebtd->btd", gates, tf.einsum("ebtf,efd->ebtd", hidden, self.down))


def mixture() -> Any:
    """A language model with experts."""
    ids = LAYERS.Input((LENGTH,), dtype="int32")
    x = Experts(4, 12)(LAYERS.Embedding(WORDS, WIDTH, name="words", **FLOAT)(ids))
    return keras.Model(ids, LAYERS.Dense(WORDS, name="out", **FLOAT)(x))


def image_classifier() -> Any:
    """A residual network with batch normalisation."""
    images = LAYERS.Input((8, 8, 2), **FLOAT)
    x = LAYERS.Conv2D(4, 3, padding="same", name="stem", **FLOAT)(images)
    for i in range(2):
        h = LAYERS.BatchNormalization(name=f"norm_{i}", **FLOAT)(x)
        h = LAYERS.Conv2D(4, 3, padding="same", activation="relu", name=f"conv_{i}", **FLOAT)(h)
        x = LAYERS.Add(**FLOAT)([x, h])
    x = LAYERS.GlobalAveragePooling2D(**FLOAT)(LAYERS.MaxPooling2D(2, **FLOAT)(x))
    return keras.Model(images, LAYERS.Dense(WORDS, name="out", **FLOAT)(x))


def compiled(build: Any) -> Any:
    """Return a model with initial weights that depend on nothing else."""
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def data(model: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    if len(model.input_shape) == 4:
        return rng.normal(size=(8, *model.input_shape[1:])), rng.integers(0, WORDS, 8)
    return rng.integers(0, WORDS, (8, LENGTH)), rng.integers(0, WORDS, (8, LENGTH))


def item_of(build: Any) -> ar.GraphItem:
    """Return the item of a model's training step."""
    model = compiled(build)
    x, y = data(model)
    specs = [tf.TensorSpec([None, *part.shape[1:]], tf.as_dtype(part.dtype)) for part in (x, y)]
    return ar.GraphItem.from_keras(model, *specs)


CASES: dict[str, tuple[Any, set[str]]] = {
    "megatron": (
        language_model,
        {
            *(f"attention_0/{one}/kernel" for one in ("query", "key", "value", "attention_output")),
            *(f"feedforward_{one}_dense_0/kernel" for one in ("intermediate", "output")),
        },
    ),
    "vocabulary_parallel": (language_model, {"token_embedding/embeddings", "lm_head/kernel", "lm_head/bias"}),
    "expert_parallel": (mixture, {"experts/up", "experts/bias", "experts/down"}),
    "spatial": (image_classifier, set()),
    "gspmd_2d": (
        language_model,
        {
            "token_embedding/embeddings",
            *(f"attention_0/{one}/kernel" for one in ("query", "key", "value", "attention_output")),
            *(f"feedforward_{one}_dense_0/kernel" for one in ("intermediate", "output")),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_preset_cuts_what_it_says_and_gathers_nothing_silently(name: str) -> None:
    build, expected = CASES[name]
    new = ar.rewrite(item_of(build), name)
    cut = {variable.name for variable in new.variables.values() if variable.shards is not None}
    assert expected <= cut
    assert name == "gspmd_2d" or "position_embedding/embeddings" not in cut
    assert [edge for edge in new.report.plan.model_edges if edge.lowering != "concat"]


@pytest.mark.parametrize("name", CASES)
def test_a_keras_model_fits_with_a_preset_as_on_one_device(name: str) -> None:
    build, _ = CASES[name]
    alone, cut = compiled(build), compiled(build)
    x, y = data(alone)
    cut = ar.distribute(cut, name)
    losses = [model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history["loss"] for model in (alone, cut)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)  # Keras adds losses up in single precision
    for one, other in zip(alone.trainable_variables, cut.trainable_variables, strict=True):
        np.testing.assert_allclose(
            other.numpy(), one.numpy(), rtol=0, atol=1e-6, err_msg=one.path
        )  # Adam divides by sizes


def test_presets_are_found_by_name() -> None:
    assert set(CASES) <= set(presets.names())
