"""A worker of an elastic job: `elastic.py MODE OUT`, where PLAN says who is lost in each generation: `1:9:SIGKILL`.

Besides signals there are CUT: the worker hears nothing any more, HEAL: it does again, and JOIN: who was lost may join.

Without AUTOGRAPH_RANK it is the undisturbed program, unrewritten. The values that training comes to are written to OUT.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.job.liveness import sockets
from tests.zoo import ZOO

RANK = int(os.environ.get("AUTOGRAPH_RANK", "-1"))
GENERATION = int(os.environ.get("AUTOGRAPH_GENERATION", "0"))
PLAN = [lost for lost in os.environ.get("PLAN", "").split(",") if lost]
CONFIG = {
    "devices": ["CPU:0"],
    "strategy": {"name": os.environ.get("STRATEGY", "AllReduce")},
    "timeout_seconds": float(os.environ.get("PATIENCE", "20")),
    "snapshot_steps": 4,
}
if CONFIG["strategy"] == {"name": "Pipeline"}:
    CONFIG["pipeline"] = {"stages": 2, "microbatches": 2}
SERVER = "ps"
ATTACH, DETACH, HEALING = 26, 27, 2.0
"""Options of a socket for its filter, and after how many seconds a network is well again."""
BATCHES = 6
"""How many there are in an epoch."""
PAUSE = float(os.environ.get("PAUSE", "0.03"))
Values = Mapping[str, Any]


def did(step: int) -> None:
    """Say that a step is done; be lost if it is time to."""
    print(f"did {step}", flush=True)
    time.sleep(PAUSE)
    for lost in PLAN[GENERATION - 1].split("+") if 0 < GENERATION <= len(PLAN) else ():
        rank, when, how = lost.split(":")
        doer = 0 if rank == SERVER else int(rank)
        if (doer, int(when)) == (RANK, step):
            print(f"lost by {how} at {time.time():.3f}", flush=True)
            if how in ("CUT", "HEAL"):
                cut_off(HEALING if how == "HEAL" else None)
            elif how == "JOIN":
                os.kill(os.getppid(), signal.SIGUSR1)
            else:
                os.kill(last_of_the_job() if rank == SERVER else os.getpid(), getattr(signal, how))


def cut_off(seconds: float | None) -> None:
    """Lose all packets that come in from now on, as behind a broken switch; until so many seconds have passed."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0), 8)  # a filter that accepts nothing
    header = struct.pack("HL", 1, ctypes.addressof(drop))

    def on_all(option: int, value: bytes) -> None:
        for found in sockets():
            with found, contextlib.suppress(OSError):
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    found.setsockopt(socket.SOL_SOCKET, option, value)

    on_all(ATTACH, header)
    if seconds is not None:
        threading.Timer(seconds, on_all, (DETACH, bytes(4))).start()


def last_of_the_job() -> int:
    """Return the process that the launcher has forked last: a parameter server, where there is one."""
    launcher = os.getppid()
    forked = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return max(int(pid) for pid in forked)


class Telling(keras.callbacks.Callback):
    """Tells of every batch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell."""
        did(BATCHES * self.epoch + batch)


def fit() -> Values:
    """Fit a model: shuffled, with dropout, metrics, a validation, and callbacks that remember something."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential([layers.Dense(5, "tanh"), layers.Dropout(0.2, seed=5), layers.Dense(3)])
    model.build((None, 4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    if RANK >= 0:
        ar.distribute(model, CONFIG)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(45, 4)), rng.integers(0, 3, 45)
    remembering = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.5)
    given = {"batch_size": 8, "shuffle": True, "verbose": 0, "validation_data": (x[:16], y[:16])}
    first = model.fit(x, y, epochs=1, **given)
    second = model.fit(x, y, epochs=4, initial_epoch=1, callbacks=[remembering, Telling()], **given)
    return {**numbered([*model.variables, *model.optimizer.variables]), **of(first, "first"), **of(second, "second")}


def numbered(variables: list[Any]) -> Values:
    """Return the values of variables."""
    return {f"variable {number}": np.asarray(variable) for number, variable in enumerate(variables)}


def of(history: Any, name: str) -> Values:
    """Return what a `fit` has told."""
    return {f"{name} {key}": np.array(values) for key, values in history.history.items()}


def function() -> Values:
    """Run a loop over a dataset, which is shuffled, and whose second iteration is left after three batches."""
    built = ZOO["custom_loop"].build(optimizer="adam")
    step = tf.function(built.step, input_signature=built.specs)
    if RANK >= 0:
        step = ar.distribute(built.step, CONFIG, *built.specs, batch_inputs=dict(built.batch_inputs))
    batches = [built.feeds(number, 8) for number in range(BATCHES)]
    columns = tuple(np.concatenate(column) for column in zip(*batches, strict=True))
    data = tf.data.Dataset.from_tensor_slices(columns).shuffle(48, seed=1).batch(8)
    has_stages, begin, drawn = "pipeline" in CONFIG, [0], 0
    if has_stages and RANK >= 0:  # whose workers all take the whole batch, so this program drops what is done by itself
        ar.on_resize(lambda done: begin.__setitem__(0, done))
    shard = ar.shard_dataset(data) if RANK >= 0 and not has_stages else data
    count = next(variable for name, variable in built.variables.items() if "iteration" in name)
    for _ in range(4):
        for batch in shard:
            drawn += 1
            if drawn > begin[0]:
                step(*batch)
                did((drawn if has_stages else int(count)) - 1)
            if (drawn if has_stages else int(count)) == 9:
                break
    return {name: np.asarray(variable) for name, variable in built.variables.items()}


def session() -> Values:
    """Train a v1 graph in a session; the program begins where it is told to."""
    built = ZOO["mlp"].build(optimizer="adam")
    item = ar.GraphItem.from_graph(
        built.graph, train_op=built.train_op, outputs=["loss"], init_op="init", batch_inputs=dict(built.batch_inputs)
    )
    begin = [0]
    ar.on_resize(lambda done: begin.__setitem__(0, done))
    with (ar.rewrite(item, CONFIG) if RANK >= 0 else item).session() as opened:
        opened.run("init")
        for number in range(begin[0], 3 * BATCHES):
            opened.run(["loss", "train"], {name: part(value) for name, value in built.feeds(number, 8).items()})
            did(number)
        return opened.read_variables()


def part(value: Any) -> Any:
    """Return this worker's part of a batch."""
    if "pipeline" in CONFIG:
        return value  # workers that hold stages are given all of it
    workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) if RANK >= 0 else 1
    return np.array_split(value, workers)[max(0, RANK)]


MODES: Mapping[str, Callable[[], Values]] = {"fit": fit, "function": function, "session": session}


def main(mode: str, out: Path) -> None:
    """Train, and write what it comes to."""
    print("memory", os.environ.get("AUTOGRAPH_ELASTIC"), flush=True)
    values = MODES[mode]()
    np.savez(out / f"{'single' if RANK < 0 else f'worker{RANK}'}.npz", **values)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
