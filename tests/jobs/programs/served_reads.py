"""Functions and Keras models whose variables are on servers: everything that reads or writes one between steps.

A worker takes its time before it reads, so that another may be ahead of it by then.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.passes.sharding.shard_variables import pieces_of
from autograph_rewrite.runtime.function.session_step import SessionStep
from autograph_rewrite.runtime.job.digests import ancestors
from tests.jobs.programs import models
from tests.jobs.programs.job import Array, Case, Job, Results

LATE, MUCH_LATER = 0.03, 3.0
ROWS = 9
Access = Callable[["Training"], Any]


class Training:
    """A step that looks rows up, counts, keeps slots and a moving average; its rate is a variable.

    Args:
        job: this process.
        is_traced: whether `ar.distribute` is given a tf.function, which the program can call, too.
    """

    def __init__(self, job: Job, *, is_traced: bool = False) -> None:
        self.job = job
        made: Mapping[str, Any] = {
            "w": np.linspace(-1, 1, 12).reshape(4, 3),
            "rows": np.linspace(-1, 1, 4 * ROWS).reshape(ROWS, 4),
            "b": np.zeros(3),
            "slot": np.zeros((4, 3)),
            "average": np.zeros((4, 3)),
            "rate": np.float64(0.1),
            "count": np.int64(0),
        }
        self.v = {name: tf.Variable(value, name=name) for name, value in made.items()}
        self.norm = tf.function(lambda: tf.norm(self.v["w"]) + tf.norm(self.v["average"]))
        self._is_traced = is_traced
        if is_traced:
            self.original = tf.function(self.step)
        self.run = self.original if is_traced else tf.function(self.step)
        if job.is_rewritten:
            self.run = ar.distribute(self.original if is_traced else self.step, job.config())
        self._steps = 0

    def step(self, x: Any, ids: Any) -> Any:
        """Train once."""
        v = self.v
        with tf.GradientTape() as tape:
            y = (x + tf.gather(v["rows"], ids)) @ v["w"] + v["b"]
            loss = tf.reduce_mean(tf.square(y - 1))
        w, rows, b = tape.gradient(loss, [v["w"], v["rows"], v["b"]])
        v["slot"].assign_add((w * tf.abs(w) - v["slot"]) * 0.5)
        v["w"].assign_sub(v["rate"] * v["slot"])
        v["b"].assign_sub(v["rate"] * b)
        v["rows"].scatter_sub(tf.IndexedSlices(v["rate"] * rows.values, rows.indices))
        v["average"].assign_add((v["w"] - v["average"]) * 0.5)
        v["count"].assign_add(1)
        return loss

    def train(self) -> Array:
        """Do the next step."""
        self._steps += 1
        rng = np.random.default_rng(self._steps)
        size = 4 + self._steps % 5
        x, ids = self.job.part(rng.normal(size=(size, 4))), self.job.part(rng.integers(0, ROWS, size))
        found = np.asarray(self.run(tf.constant(x), tf.constant(ids)))
        time.sleep(LATE * self.job.task)
        return found

    def once(self, x: Array) -> Array:
        """Call the program's own tf.function, which trains on one device."""
        return np.asarray(self.original(tf.constant(x), tf.constant(np.arange(len(x)) % ROWS)))

    @property
    def fetched(self) -> set[str]:
        """Which variables a step brings back; of the single process none."""
        return fetched(self.run) if self.job.is_rewritten else set()


def fetched(function: Any) -> set[str]:
    """Return which variables the step of a distributed function brings back."""
    (traced,) = function._traces
    assert isinstance(traced.step, SessionStep)
    variables = traced.step._variables
    return {name for name in variables._reads if variables._comes_back(name)}


def carried(function: Any) -> set[str]:
    """Return the variables that a step takes from a server as a whole."""
    (traced,) = function._traces
    step = traced.step
    graph, names = step._session.graph, [*step.binding.outputs, *step.item.targets]
    roots = [graph.get_operation_by_name(name.partition(":")[0]) for name in names]
    roots += [read.op for read in step._variables.fetches.values()]
    variables = step.item.variables
    named = {piece.handle: name for name, variable in variables.items() for piece in pieces_of(variable)}
    reads = [op for op in ancestors(roots) if op.type == "ReadVariableOp" and "/job:ps" in op.device]
    return {
        named[op.inputs[0].op.name]
        for op in reads
        if any("/job:ps" not in user.device for user in op.outputs[0].consumers())
    }


def saved(training: Training) -> Any:
    """Return what a checkpoint holds."""
    path = tf.train.Checkpoint(**training.v).save(str(training.job.folder / f"checkpoint_{training.job.task}"))
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE") for name in training.v}


def exported(training: Training) -> Any:
    """Return what a SavedModel holds."""
    module = tf.Module()
    module.w, module.slot = training.v["w"], training.v["slot"]
    folder = str(training.job.folder / f"exported_{training.job.task}_{time.monotonic_ns()}")
    tf.saved_model.save(module, folder)
    loaded = tf.saved_model.load(folder)
    return {"w": loaded.w, "slot": loaded.slot}


def in_thread(training: Training) -> Any:
    """Return what another thread reads."""
    found = []
    reader = threading.Thread(target=lambda: found.append(training.v["slot"].numpy()))
    reader.start()
    reader.join()
    return found[0]


def sloped(training: Training) -> Any:
    """Return a gradient that is taken between steps."""
    w = training.v["w"]
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(w * w)
    return tape.gradient(value, w)


READS: dict[str, Access] = {
    "nothing": lambda t: 0,
    "numpy": lambda t: t.v["slot"].numpy(),
    "one scalar": lambda t: int(t.v["count"]),
    "value": lambda t: t.v["w"].value(),
    "read_value": lambda t: t.v["average"].read_value(),
    "array": lambda t: np.asarray(t.v["b"]),
    "tensor": lambda t: tf.convert_to_tensor(t.v["w"]),
    "arithmetic": lambda t: t.v["w"] * 2 + t.v["slot"],
    "fast path": lambda t: tf.raw_ops.MatMul(a=t.v["w"], b=t.v["slot"], transpose_b=True),
    "handle": lambda t: tf.raw_ops.ReadVariableOp(resource=t.v["w"].handle, dtype=tf.float64),
    "rows": lambda t: tf.gather(t.v["rows"], [1, 2]),
    "sparse read": lambda t: t.v["slot"].sparse_read([0, 2]),
    "slice": lambda t: t.v["slot"][1:, 0],
    "text": lambda t: np.frombuffer(repr(t.v["b"]).partition("numpy=")[2].encode()[:9], np.uint8),
    "gradient": sloped,
    "copy": lambda t: copy.deepcopy(t.v["w"]).numpy(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.v["slot"].numpy())),
    "function from before": lambda t: t.norm(),
    "new function": lambda t: tf.function(lambda: t.v["slot"] + t.v["w"])(),
    "argument of a function": lambda t: tf.function(lambda one: one * 2)(t.v["slot"]),
    "checkpoint": saved,
    "export": exported,
    "all": lambda t: [v.numpy() for v in t.v.values()],
    "thread": in_thread,
    "nothing again": lambda t: 0,
    "several at once": lambda t: tf.stack([tf.norm(t.v[name]) for name in ("w", "slot", "average", "rows")]),
}


def noted(name: str, value: Any) -> Results:
    """Return results for what may be nested."""
    flat = tf.nest.flatten(value)
    return {f"variable {name} ({at})": np.asarray(one) for at, one in enumerate(flat)}


def read_between(job: Job) -> Results:
    """Read something else after every step."""
    training, results = Training(job), Results()
    for name, read in READS.items():
        results[f"loss before {name}"] = training.train()
        results |= noted(name, read(training))
    return results | noted("at the end", list(training.v.values()))


def kept(training: Training, held: list[Any]) -> Any:
    """Make a function that lasts, call it, and have it called again after the next step."""
    if not held:
        held.append(tf.function(lambda: (training.v["slot"] + 0, training.v["w"] + 0)))
    return held[0]()


def read_by_functions(job: Job) -> Results:
    """Let a function, made between steps, read after each of several, and go; only as long it is fetched for it."""
    training, results, held = Training(job), Results(), list[Any]()
    for at in range(4):
        training.train()
        results |= noted(f"read by a function after step {at}", kept(training, held))
    if job.is_rewritten:
        assert {"w", "slot"} <= training.fetched
    held.clear()
    gc.collect()  # a traced function and its graph refer to each other
    training.train()
    if job.is_rewritten:
        assert not training.fetched
        assert not {"count", "rate", "rows"} & carried(training.run), "what only the update needs stays there"
    return results | noted("at the end", list(training.v.values()))


WRITES: dict[str, Access] = {
    "rate": lambda t: t.v["rate"].assign(0.05),
    "same rate": lambda t: t.v["rate"].assign(0.05),
    "half": lambda t: t.v["w"].assign(0.5 * t.v["w"]),
    "slot": lambda t: t.v["slot"].assign_add(tf.ones([4, 3], tf.float64)),
    "count": lambda t: t.v["count"].assign_sub(1),
    "slice": lambda t: t.v["w"][1].assign([1.0, 2.0, 3.0]),
    "scatter": lambda t: t.v["rows"].scatter_update(tf.IndexedSlices(tf.ones([2, 4], tf.float64), tf.constant([0, 5]))),
    "rows": lambda t: t.v["rows"].assign(t.v["rows"] * 0.5),
    "raw": lambda t: tf.raw_ops.AssignVariableOp(resource=t.v["b"].handle, value=tf.zeros([3], tf.float64)),
    "function": lambda t: tf.function(lambda: t.v["slot"].assign(0.5 * t.v["slot"]))(),
    "everything": lambda t: [v.assign(v * 2) for name, v in t.v.items() if name != "rate"],
    "twice": lambda t: [t.v["w"].assign_add(t.v["slot"]), t.v["slot"].assign(t.v["w"] * 0.1)],
}


def written_between(job: Job) -> Results:
    """Write something after every step, of what is there."""
    training, results = Training(job), Results()
    for at, write in enumerate(WRITES.values()):
        results[f"loss before write {at}"] = training.train()
        write(training)
        if at % 3 == 0:
            results |= noted(f"after write {at}", [training.v["w"].numpy(), training.v["count"].numpy()])
    results["loss at the end"] = training.train()
    return results | noted("at the end", list(training.v.values()))


def original_between(job: Job) -> Results:
    """Call the tf.function that was distributed itself, which trains on one device, by turns with its steps."""
    training, results = Training(job, is_traced=True), Results()
    x = np.random.default_rng(9).normal(size=(5, 4))
    for at in range(3):
        results[f"loss of {at}"] = training.train()
        results[f"loss of the original {at}"] = training.once(x)
        results |= noted(f"after {at}", training.v["slot"])
    training.train()
    assert not training.fetched, "what the function has captured asks for its value when it is called"
    return results | noted("at the end", list(training.v.values()))


def read_late(job: Job) -> Results:
    """Read when the programs of the others have ended: the last case of its job."""
    training, results = Training(job), Results()
    for at in range(2):
        results[f"loss of {at}"] = training.train()
    if job.is_rewritten and job.task == 0:
        time.sleep(MUCH_LATER)
    return results | noted("at the end", list(training.v.values()))


class Reads(keras.callbacks.Callback):
    """Reads and writes in between: of every batch something else."""

    def __init__(self, folder: Any, task: int) -> None:
        super().__init__()
        self.found: Results = {}
        self._folder, self._task, self._batches = folder, task, 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Read what the turn of this batch is."""
        del batch, logs
        time.sleep(LATE * self._task)
        self._batches += 1
        model, optimizer = self.model, self.model.optimizer
        reads = [
            lambda: 0,
            lambda: int(optimizer.iterations),
            model.get_weights,
            lambda: optimizer.variables[-1],
            lambda: model.predict(np.ones((3, 4), np.float32), verbose=0),
            self._saved,
            lambda: model(np.ones((2, 4), np.float32)),
            lambda: optimizer.learning_rate.assign(0.5 * optimizer.learning_rate),
        ]
        value = reads[self._batches % len(reads)]()
        self.found |= noted(f"in batch {self._batches}", value)

    def _saved(self) -> Any:
        path = str(self._folder / f"model_{self._task}.keras")
        type(self.model).save(self.model, path)
        again = keras.models.load_model(path)
        return [*again.get_weights(), *(np.asarray(v) for v in again.optimizer.variables)]


def read_in_fit(job: Job) -> Results:
    """Fit with a moving average, evaluate, set weights, fit on; callbacks read and write."""
    model = models.small("adam")
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8)
    model.compile(optimizer, model.loss, metrics=["accuracy"], jit_compile=False)
    if job.is_rewritten:
        model = ar.distribute(model, job.config())
    keras.utils.set_random_seed(3)
    x, y = models.data(job, count=40)
    size = 5 if job.alone else 10  # as many batches of half as many examples
    reads = Reads(job.folder, job.task)
    more: dict[str, Any] = {}
    for turn in range(2):
        fitted = models.history(
            model, x, y, batch_size=size, epochs=1, shuffle=False, validation_data=(x[:9], y[:9]), callbacks=[reads]
        )
        more |= {f"{name} of turn {turn}": value for name, value in fitted.items()}
        more[f"evaluated {turn}"] = model.evaluate(x[:13], y[:13], batch_size=4, verbose=0)
        model.set_weights([0.9 * weight for weight in model.get_weights()])
    more["loss on a batch"] = model.train_on_batch(x[:8], y[:8])
    if job.is_rewritten:
        assert not fetched(model.train_function.functions[0])
    weights = {f"variable {at}": np.asarray(v) for at, v in enumerate([*model.weights, *optimizer.variables])}
    return {name: np.asarray(value) for name, value in more.items()} | weights | reads.found


CASES: dict[str, Case] = {
    "read_between": read_between,
    "read_by_functions": read_by_functions,
    "written_between": written_between,
    "original_between": original_between,
    "read_in_fit": read_in_fit,
    "read_late": read_late,
}
