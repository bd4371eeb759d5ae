"""One Keras model, many processes: `autograph-rewrite launch -n 2 examples/job.py`, or as it is, in one.

Every worker is given the same data and the global batch size, as in a program for one device, and takes its part of
each batch. The first worker saves; after a failure the job goes on from the last epoch (`launch --restart 1`).
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import autograph_rewrite as ar

CONFIG = {"devices": ["CPU:0"], "strategy": {"name": "AllReduce"}}  # the devices of one worker
EPOCHS = max(1, int(os.environ.get("EXAMPLE_STEPS", "200")) // 40)


def build() -> keras.Model:
    model = keras.Sequential(
        [keras.layers.Dense(32, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.build((None, 2))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def main() -> None:
    keras.utils.set_random_seed(1)  # every run begins alike; without it workers adopt what the first one drew
    x = np.random.default_rng(0).uniform(-1, 1, (640, 2)).astype(np.float32)
    y = np.prod(x, axis=1, keepdims=True)
    model = ar.distribute(build(), CONFIG)
    history = model.fit(
        x, y, batch_size=64, epochs=EPOCHS, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("backup")]
    )
    for epoch, loss in enumerate(history.history.get("loss", ()), 1):
        print(f"epoch {epoch}  loss {loss:.5f}", flush=True)
    model.save("model.keras")


if __name__ == "__main__":
    main()
