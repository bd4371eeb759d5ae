"""Workers that train on their parts of datasets: `shards.py FOLDER OUT`; FOLDER has text files, a line per example."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from tests.jobs.programs.job import Job
from tests.support.training import make_item, placeholder, variable

RATE, WIDTH, BATCH = 0.1, 3, 5
POLICY = tf.data.experimental.AutoShardPolicy
Steps = Iterable[tuple[Any, Any]]


def parsed(lines: Any) -> Any:
    """Return x and y of a batch of lines."""
    numbers = tf.strings.to_number(tf.strings.split(lines).to_tensor(shape=[None, WIDTH + 1]), tf.float64)
    return numbers[:, :WIDTH], numbers[:, WIDTH:]


def of_rows(folder: Path) -> Any:
    """Return batches of all lines, shuffled with a seed."""
    tf.random.set_seed(1)
    lines = sorted(line for path in folder.glob("*.txt") for line in path.read_text().splitlines())
    return tf.data.Dataset.from_tensor_slices(lines).shuffle(10, seed=2).batch(BATCH).map(parsed)


def of_files(folder: Path, *, count: int = 100, shuffled: int = 4) -> Any:
    """Return batches of the lines of the first files."""
    names = sorted(str(path) for path in folder.glob("*.txt"))[:count]
    lines = tf.data.Dataset.from_tensor_slices(names).interleave(tf.data.TextLineDataset, cycle_length=2)
    return lines.shuffle(shuffled, seed=3).batch(BATCH).map(parsed).prefetch(1)


def of_own(job: Job, folder: Path) -> Any:
    """Return batches of one file, which is the worker's own."""
    names = sorted(str(path) for path in folder.glob("*.txt"))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICY.OFF
    return tf.data.TextLineDataset(names[job.task]).batch(BATCH).map(parsed).with_options(options)


def of_own_padded(job: Job, folder: Path) -> Any:
    """Return batches of one file, each of another width: the numbers are followed by zeros."""
    names = sorted(str(path) for path in folder.glob("*.txt"))

    def padded(number: Any, batch: Any) -> Any:
        x, y = batch
        x = tf.concat([x, tf.zeros([tf.shape(x)[0], tf.cast(number, tf.int32)], tf.float64)], 1)
        return tf.ensure_shape(x, [None, None]), y

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICY.OFF
    data = tf.data.TextLineDataset(names[job.task]).batch(6).map(parsed)  # 6: parts of it are of one width
    return data.enumerate().map(padded).with_options(options)


def datasets(job: Job, folder: Path) -> dict[str, Any]:
    """Return this worker's parts of several datasets."""
    lines = tf.data.TextLineDataset(sorted(str(path) for path in folder.glob("*.txt"))).map(lambda line: parsed([line]))
    examples = lines.map(lambda x, y: (x[0], y[0]))
    return {
        "rows": ar.shard_dataset(of_rows(folder)),
        "rows of files": ar.shard_dataset(of_files(folder), policy="data"),
        "files": ar.shard_dataset(of_files(folder)),
        "one file": ar.shard_dataset(of_files(folder, count=1), policy="DATA"),
        "endless": ar.shard_dataset(of_files(folder).repeat(), policy=POLICY.FILE).take(9),
        "own": ar.shard_dataset(of_own(job, folder)),
        "batched here": ar.shard_dataset(examples, BATCH, policy="FILE"),
        "own, padded": ar.shard_dataset(of_own_padded(job, folder)),
        "files in a session": ar.shard_dataset(of_files(folder)),
    }


def function(job: Job, data: Steps) -> Any:
    """Train a function; return the weights."""
    weights = tf.Variable(np.zeros((WIDTH, 1)), name="w")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            error = tf.square(x[:, :WIDTH] @ weights - y)
            loss = tf.reduce_mean(error + tf.zeros_like(x))  # over what has the width of x
        weights.assign_sub(RATE * tape.gradient(loss, weights))
        return loss

    specs = tf.TensorSpec([None, None], tf.float64), tf.TensorSpec([None, 1], tf.float64)
    distributed = ar.distribute(step, job.config(), *specs)
    for x, y in data:
        distributed(x, y)
    return weights.numpy()


def session(job: Job, data: Steps) -> Any:
    """Train a graph; return the weights."""

    def forward() -> dict[str, Any]:
        x, y = placeholder("x", None, WIDTH), placeholder("y", None, 1)
        return {"loss": tf.reduce_mean(tf.square(x @ variable("w", np.zeros((WIDTH, 1))) - y))}

    item = make_item(forward, batch_inputs={"x": 0, "y": 0})
    with ar.rewrite(item, job.config()).session() as opened:
        opened.run(item.init_op)
        for x, y in data:
            opened.run([*item.outputs, *item.targets], {"x": x.numpy(), "y": y.numpy()})
        return opened.read_variable("w")


def refused(job: Job, folder: Path) -> dict[str, str]:
    """Return what is said of datasets that cannot be split."""
    cases: dict[str, Callable[[], Any]] = {
        "single examples": lambda: ar.shard_dataset(tf.data.Dataset.range(9)),
        "no files": lambda: ar.shard_dataset(tf.data.Dataset.range(9).batch(3), policy="FILE"),
        "too few files": lambda: ar.shard_dataset(of_files(folder, count=1)),
        "small batches": lambda: ar.shard_dataset(tf.data.Dataset.range(9).batch(1), policy="OFF"),
        "other sizes": lambda: ar.shard_dataset(tf.data.Dataset.range(9).batch(3 + job.task)),
        "other data": lambda: list(ar.shard_dataset(tf.data.Dataset.range(job.task, 9).batch(3))),
    }
    told = {}
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def main(folder: Path, out: Path) -> None:
    """Run all."""
    job, found = Job.here(out), {}
    for name, data in datasets(job, folder).items():
        seen = []

        def noted(data: Any = data, seen: list[Any] = seen) -> Steps:
            for x, y in data:
                seen.append((x.numpy()[:, :WIDTH], y.numpy()))
                yield x, y

        found[f"{name}: w"] = (session if "session" in name else function)(job, noted())
        for number, (x, y) in enumerate(seen):
            found[f"{name}: {number:03d}"] = np.concatenate([x, y], 1)
    for name, data in (("rows", of_rows(folder)), ("one file", of_files(folder, count=1))):
        for number, (x, y) in enumerate(data):  # what one process alone would train on
            found[f"whole {name}: {number:03d}"] = np.concatenate([x, y], 1)
    early = ar.shard_dataset(of_files(folder, shuffled=1).prefetch(1))
    for count in (1, 2, 3):  # left early, and begun again
        found[f"early: {count}"] = np.concatenate([x for _, (x, _) in zip(range(count), early, strict=False)])
    found["told"] = np.array([f"{name}: {text}" for name, text in refused(job, folder).items()])
    np.savez(out / f"worker{job.task}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
