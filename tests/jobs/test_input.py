"""Each worker's part of a dataset that all build alike: together they are the batches, and train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, GraphError
from tests.jobs.programs.fixtures import Jobs, Once, ended
from tests.jobs.programs.nursery import Nursery

LIMIT = 240
WIDTH, BATCH, RATE = 3, 5, 0.1
LENGTHS = (7, 1, 4, 9)
COUNTS = (2, 3)
KINDS = (
    "rows",
    "rows of files",
    "files",
    "one file",
    "endless",
    "own",
    "own, padded",
    "batched here",
    "files in a session",
)
TOLD = {
    "single examples": ("GraphError", "the dataset gives single examples", "dataset.batch(global_batch_size)"),
    "no files": ("GraphError", "the dataset reads no files", "the policy DATA splits any dataset"),
    "too few files": ("GraphError", "there are fewer files than the", "policy='DATA'"),
    "small batches": ("GraphError", "batches of 1, of which", "at least one example for each worker"),
    "other sizes": ("ClusterError", "datasets of different batch sizes", "the global batch size in every worker"),
    "other data": ("", "ClusterError: the workers' datasets do not begin with the same batch", "shuffle with a seed"),
}

Array = np.ndarray
Run = Callable[[int], list[dict[str, Array]]]


@pytest.fixture
def run(once: Once, nursery: Nursery) -> Run:
    """Return a function that gives what each of several workers was given, and came to."""

    def of(count: int) -> list[dict[str, Array]]:
        def start(folder: Path) -> None:
            write_files(folder)
            jobs = Jobs(nursery, folder)
            workers = jobs.job(count, "tests/jobs/programs/shards.py", folder, folder)
            codes = ended(workers, LIMIT)
            jobs.end()
            assert set(codes) == {0}, "\n".join(worker.output[-4000:] for worker in workers)

        folder = once(f"shards {count}", start)
        return [dict(np.load(folder / f"worker{task}.npz")) for task in range(count)]

    return of


def write_files(folder: Path) -> None:
    """Write a few examples into files; the first number of each tells them apart."""
    rng = np.random.default_rng(0)
    for file, length in enumerate(LENGTHS):
        x = np.concatenate([np.arange(length)[:, None] / 10 + file, rng.normal(size=(length, WIDTH - 1))], 1) / 4
        lines = [" ".join(map(repr, map(float, (*row, row.sum())))) for row in x]
        (folder / f"{file}.txt").write_text("\n".join(lines))


def rows_of(folder_rows: list[Array]) -> list[tuple[float, ...]]:
    """Return rows as tuples, sorted."""
    return sorted(tuple(row) for batch in folder_rows for row in batch)


def batches(found: dict[str, Array], kind: str) -> list[Array]:
    """Return the batches of one worker."""
    return [found[name] for name in sorted(found) if name.startswith(f"{kind}: ") and name[-1].isdigit()]


def together(workers: list[dict[str, Array]], kind: str) -> list[Array]:
    """Return the batches of all workers, joined in their order."""
    parts = [batches(found, kind) for found in workers]
    assert len({len(each) for each in parts}) == 1, "they end at different times"
    return [np.concatenate(step) for step in zip(*parts, strict=True)]


def trained(steps: list[Array]) -> Array:
    """Return the weights that gradient descent on whole batches gives."""
    w = np.zeros((WIDTH, 1))
    for batch in steps:
        x, y = batch[:, :WIDTH], batch[:, WIDTH:]
        w = w - RATE * 2 * x.T @ (x @ w - y) / len(x)
    return w


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_train_on_what_they_hold_together(run: Run, kind: str, count: int) -> None:
    workers = run(count)
    steps = together(workers, kind)
    assert len(steps) > 1
    expected = trained(steps)
    for found in workers:
        np.testing.assert_allclose(found[f"{kind}: w"], expected, 1e-9, 1e-12)
        assert np.abs(trained([b for b in batches(found, kind) if len(b)]) - expected).max() > 1e-3, "it cannot fail"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("kind", "sizes"), [("rows", [5, 5, 5, 5, 1]), ("one file", [5, 2])])
def test_rows_of_each_batch_make_the_batches_of_one_process(run: Run, kind: str, sizes: list[int], count: int) -> None:
    workers = run(count)
    whole = batches(workers[0], f"whole {kind}")
    assert [len(batch) for batch in whole] == sizes
    for got, expected in zip_longest(together(workers, kind), whole):
        assert np.array_equal(got, expected)
    for task, found in enumerate(workers):
        expected_sizes = [size // count + (task < size % count) for size in sizes]
        assert [len(batch) for batch in batches(found, kind)] == expected_sizes


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["files", "batched here", "files in a session"])
def test_every_worker_reads_its_own_files_once(run: Run, kind: str, count: int) -> None:
    workers = run(count)
    read = [{int(row[0] * 4) for batch in batches(found, kind) for row in batch} for found in workers]
    assert [sorted(files) for files in read] == {2: [[0, 2], [1, 3]], 3: [[0, 3], [1], [2]]}[count]
    every = together(workers, "rows")
    assert rows_of(together(workers, kind)) == rows_of(every)
    part = {2: [3, 2], 3: [2, 2, 1]}[count]
    for size, found in zip(part, workers, strict=True):
        lengths = [len(batch) for batch in batches(found, kind)]
        full = sum(lengths) // size
        assert lengths[:full] == [size] * full
        assert sum(lengths[full + 1 :]) == 0, "only empty batches follow"


@pytest.mark.parametrize("count", COUNTS)
def test_with_the_policy_off_the_data_are_each_worker_s_own(run: Run, count: int) -> None:
    for task, found in enumerate(run(count)):
        rows = [row for batch in batches(found, "own") for row in batch]
        assert [int(row[0] * 4) for row in rows] == [task] * LENGTHS[task]


def test_an_iteration_may_be_left_early_and_begun_again(run: Run) -> None:
    for found in run(2):
        first, second, third = (found[f"early: {count}"] for count in (1, 2, 3))
        assert len(first) < len(second) < len(third)
        assert np.array_equal(third[: len(second)], second)
        assert np.array_equal(second[: len(first)], first)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("case", TOLD)
def test_a_dataset_that_cannot_be_split_is_told_to_all(run: Run, case: str, count: int) -> None:
    for found in run(count):
        (text,) = (text for text in found["told"] if text.startswith(f"{case}: "))
        assert all(part in text for part in TOLD[case]), text


def test_one_process_alone_keeps_the_dataset() -> None:
    data = tf.data.Dataset.range(4).batch(2)
    assert ar.shard_dataset(data) is data
    assert [batch.numpy().tolist() for batch in ar.shard_dataset(tf.data.Dataset.range(3), 2)] == [[0, 1], [2]]
    with pytest.raises(ConfigError, match="there is no policy 'rows' to split a dataset by"):
        ar.shard_dataset(data, policy="rows")
    assert issubclass(GraphError, ar.RewriteError)
