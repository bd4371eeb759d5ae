"""One Keras model in two stages: `autograph-rewrite launch -n 2 examples/stages.py`, or as it is, in one process.

Each worker holds one stage, with its weights and the state of its optimizer, and all are given the whole batch: it goes
through the stages in micro-batches, so that both work at the same time. What every worker prints is the same.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import autograph_rewrite as ar

CONFIG = {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 4}}
EPOCHS = max(1, int(os.environ.get("EXAMPLE_STEPS", "200")) // 40)


def main() -> None:
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).uniform(-1, 1, (640, 2)).astype(np.float32)
    y = np.prod(x, axis=1, keepdims=True)
    model = keras.Sequential([keras.layers.Dense(64, "tanh"), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)])
    model.build((None, 2))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model = ar.distribute(model, CONFIG)
    history = model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0, validation_data=(x[:99], y[:99]))
    for epoch, losses in enumerate(zip(history.history["loss"], history.history["val_loss"], strict=True), 1):
        print(f"epoch {epoch}  loss {losses[0]:.5f}  validation {losses[1]:.5f}", flush=True)
    model.save("model.keras")


if __name__ == "__main__":
    main()
