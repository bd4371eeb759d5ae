"""A checkpoint is that of one device: whoever wrote it, any number of processes, or the program itself, carries on."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.jobs.programs.fixtures import Jobs, Once, ended
from tests.jobs.programs.nursery import Nursery

SCRIPT = "tests/jobs/programs/checkpoints.py"
LIMIT = 120
KINDS = {"weights": 1e-5, "whole": 1e-5, "checkpoint": 1e-9, "saver": 1e-9, "parts": 1e-5}
"""Of each kind of checkpoint, the error that single and double precision leave."""
REPLICAS = "two devices"
SERVED = "two processes whose variables live on the first"
RESUMED: Mapping[str, tuple[str, int | str]] = {
    "by the program itself": ("job", 1),
    "by one process with two devices": ("job", REPLICAS),
    "by three processes": ("job", 3),
    "of the program by two processes": ("program", 2),
    "of one process with two devices by parameter servers": (REPLICAS, SERVED),
    "of parameter servers by the program itself": (SERVED, 1),
}
"""Who carries on: whose checkpoint it is, and in how many processes."""
SAVED: Mapping[str, int | str] = {"program": 1, "job": 2, REPLICAS: REPLICAS, SERVED: SERVED}

Run = Callable[[str], list[dict[str, np.ndarray]]]


@pytest.fixture
def folder(once: Once, nursery: Nursery) -> Callable[[str], Path]:
    """Return a function that gives the folder of one run of the program: `through`, who saves, or who resumes."""

    def of(name: str) -> Path:
        if name in RESUMED:
            whose, count = RESUMED[name]
            source = of(whose)
            return once(f"checkpoints {name}", lambda out: start(nursery, "resume", source, out, count))
        action = "through" if name == "through" else "begin"
        return once(f"checkpoints {name}", lambda out: start(nursery, action, out, out, SAVED.get(name, 1)))

    return of


def start(nursery: Nursery, action: str, source: Path, out: Path, count: int | str) -> None:
    """Run the program in one process or several, and wait for it."""
    jobs = Jobs(nursery, out)
    if count == SERVED:
        workers = jobs.job(2, SCRIPT, action, source, out, environ={"JOB_STRATEGY": "PS"})
    elif isinstance(count, int) and count > 1:
        workers = jobs.job(count, SCRIPT, action, source, out)
    else:
        environ = {"REPLICAS": "2"} if count == REPLICAS else {}
        workers = [jobs.start(SCRIPT, action, source, out, environ=environ)]
    codes = ended(workers, LIMIT)
    jobs.end()
    assert set(codes) == {0}, "\n".join(worker.output[-4000:] for worker in workers)


@pytest.fixture
def results(folder: Callable[[str], Path]) -> Run:
    """Return a function that gives what the processes of one run have come to."""

    def of(name: str) -> list[dict[str, np.ndarray]]:
        return [dict(np.load(path)) for path in sorted(folder(name).glob("*.npz"))]

    return of


def of_kind(found: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Return the values of one kind of checkpoint."""
    return {name: value for name, value in found.items() if name.startswith(f"{kind}:")}


def worst(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Return the largest error relative to the largest number of a variable."""
    assert found.keys() == expected.keys()
    assert [v.shape for v in found.values()] == [v.shape for v in expected.values()]
    errors = [
        float(np.max(np.abs(found[name] - value), initial=0.0) / (np.max(np.abs(value), initial=0.0) or 1.0))
        for name, value in expected.items()
    ]
    return max(errors)


@pytest.mark.parametrize("resumed", RESUMED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_like_one_that_was_never_interrupted(results: Run, kind: str, resumed: str) -> None:
    expected = of_kind(results("through")[0], kind)
    found = results(resumed)
    count = RESUMED[resumed][1]
    assert len(found) == (count if isinstance(count, int) else 2 if count == SERVED else 1)
    for process in found:
        assert worst(of_kind(process, kind), expected) < KINDS[kind]
    halfway = of_kind(results("program")[0], kind)
    assert worst(halfway, expected) > 0.01, "three steps more make no difference: the test cannot fail"


def contents(folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the names and shapes of all arrays by file."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}

    def of_h5(file: h5py.File) -> dict[str, tuple[int, ...]]:
        names: dict[str, tuple[int, ...]] = {}
        file.visititems(lambda name, item: names.update({name: item.shape}) if isinstance(item, h5py.Dataset) else None)
        return names

    with h5py.File(folder / "model.weights.h5") as file:
        found["weights"] = of_h5(file)
    with zipfile.ZipFile(folder / "model.keras") as archive, archive.open("model.weights.h5") as inner:
        found["whole"] = of_h5(h5py.File(inner))
    for kind in ("loop-1", "graph"):
        found[kind] = {name: tuple(shape) for name, shape in tf.train.list_variables(str(folder / kind))}
    return found


@pytest.mark.parametrize("whose", ["job", REPLICAS, SERVED])
def test_files_hold_the_names_and_shapes_of_one_device(folder: Callable[[str], Path], whose: str) -> None:
    found, expected = contents(folder(whose) / "saved"), contents(folder("program") / "saved")
    assert found == expected
    assert all(len(names) > 6 for names in expected.values())
    assert "hidden_0/w/Adam" in expected["graph"]
    assert [name for name in expected["weights"] if name.startswith("optimizer/vars")]


@pytest.mark.parametrize("resumed", ["by one process with two devices", "by three processes"])
def test_residuals_of_the_chief_are_carried_on_and_others_begin_at_zero(results: Run, resumed: str) -> None:
    saved = of_kind(results("job")[0], "feedback")
    for process in results(resumed):
        found = of_kind(process, "feedback")
        for name, value in saved.items():
            if " " not in name.removeprefix("feedback: "):
                assert np.array_equal(found[name.replace(": ", ": restored ")], value), name
        residuals = {name: value for name, value in found.items() if ": kept " in name}
        assert residuals
        for name, value in residuals.items():
            before = saved[name.replace(": kept ", ": left ")] if name.endswith("replica_0") else np.zeros_like(value)
            assert np.array_equal(value, before), name
    assert any(value.any() for name, value in saved.items() if ": left " in name)


def test_a_checkpoint_without_residuals_restores_into_a_job_that_has_them(results: Run) -> None:
    first, second = (of_kind(found, "feedback") for found in results("of the program by two processes"))
    plain = of_kind(results("program")[0], "feedback")
    assert all(not value.any() for found in (first, second) for name, value in found.items() if ": kept " in name)
    for name in (name for name in plain if " " not in name.removeprefix("feedback: ")):
        assert np.array_equal(first[name.replace(": ", ": restored ")], plain[name])
        assert np.array_equal(first[name], second[name])


def test_a_checkpoint_with_residuals_restores_into_the_program_that_has_none(results: Run) -> None:
    saved = of_kind(results("job")[0], "feedback")
    (found,) = results("by the program itself")
    names = [name for name in saved if " " not in name.removeprefix("feedback: ")]
    assert names
    assert all(np.array_equal(found[name.replace(": ", ": restored ")], saved[name]) for name in names)
