"""Keras' own layers, stacked as people stack them: training equals one device, whatever loops they hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import autograph_rewrite as ar
from tests.support.covering import covering

L = keras.layers
SEQUENCE = (6, 5)


STACKS: dict[str, Callable[[], list[Any]]] = {
    "two kinds of recurrent layers": lambda: [L.GRU(7, return_sequences=True), L.LSTM(5)],
    "three recurrent layers": lambda: [L.LSTM(4, return_sequences=True), L.LSTM(3, return_sequences=True), L.LSTM(2)],
    "both directions": lambda: [L.Bidirectional(L.GRU(4, return_sequences=True)), L.GRU(3)],
    "masked": lambda: [L.Masking(0.0), L.LSTM(4, return_sequences=True), L.LSTM(3)],
    "convolutional and recurrent": lambda: [L.Conv1D(4, 3, padding="same"), L.BatchNormalization(), L.GRU(3)],
    "each time step": lambda: [L.TimeDistributed(L.Dense(4, activation="relu")), L.SimpleRNN(3)],
    "separable": lambda: [L.SeparableConv1D(4, 3), L.GroupNormalization(2), L.GlobalMaxPooling1D()],
}


def trained(layers: Callable[[], list[Any]], **config: Any) -> tuple[list[Any], list[float]]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(SEQUENCE), *layers(), L.Dense(2)])
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    random = np.random.default_rng(3)
    x, y = random.normal(size=(22, *SEQUENCE)), random.normal(size=(22, 2))
    x[:, 4:] *= random.integers(0, 2, size=(22, 1, 1))
    fitter = ar.distribute(model, config) if config else model
    history = fitter.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    return [np.asarray(weight) for weight in model.weights], history["loss"]


@pytest.mark.parametrize(("name", "mode"), covering(list(STACKS), ["shared", "mirrored"]))
def test_stacks_of_layers_train_as_on_one_device(name: str, mode: str) -> None:
    weights, losses = trained(STACKS[name])
    strategy = {"name": "AllReduce", "variables": mode}
    found, found_losses = trained(STACKS[name], devices=["CPU:0", "CPU:1"], strategy=strategy)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    for one, other in zip(weights, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
