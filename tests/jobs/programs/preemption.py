"""A worker that is asked to end: it trains slowly, and says when it is well on its way.

python preemption.py MODE FOLDER STEPS     AUTOGRAPH_GRACE and TF_CONFIG are in the environment
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar

MODE, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
STRATEGY = os.environ.get("JOB_STRATEGY", "AllReduce")
CONFIG = {"devices": ["CPU:0"], "strategy": {"name": STRATEGY}, "timeout_seconds": 20}
UNDER_WAY = 8


def pace(done: int) -> None:
    """Be slow enough to be stopped on the way, but for a program that is to come to its end."""
    if done == UNDER_WAY:
        print("under way", flush=True)
    if STEPS > 100:
        time.sleep(0.01)


def function() -> None:
    w = tf.Variable(tf.ones([4, 4], tf.float64), name="w")
    count = tf.Variable(0, dtype=tf.int64)

    def train(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(1)
        return w.assign_sub(0.001 * tf.matmul(x, x, transpose_a=True))

    step = ar.distribute(tf.function(train), CONFIG)
    manager = ar.CheckpointManager(tf.train.Checkpoint(w=w, count=count), FOLDER / "checkpoints", config=CONFIG)
    restored = manager.restore()
    begin = restored.step if restored else 0
    assert begin == int(count)
    ar.on_preemption(lambda: print("hook", int(count), flush=True))
    for at in range(begin, STEPS):
        step(tf.ones([4, 4], tf.float64))
        if at % 3 == 2:
            manager.save(at + 1)
        pace(at)


def fit() -> None:
    import keras

    keras.utils.set_random_seed(3)
    dropped = keras.layers.Dropout(0.2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), dropped, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model = ar.distribute(model, CONFIG)
    done = [0]

    class Paced(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            done[0] += 1
            pace(done[0])

    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    callbacks = [Paced(), keras.callbacks.BackupAndRestore(str(FOLDER / "backup"))]
    model.fit(x, x.sum(1), batch_size=12, epochs=STEPS // 5, verbose=0, validation_split=0.2, callbacks=callbacks)
    print("steps", done[0], flush=True)
    np.savez(FOLDER / "weights.npz", *model.get_weights())


{"function": function, "fit": fit}[MODE]()
