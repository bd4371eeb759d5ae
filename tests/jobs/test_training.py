"""Several processes train as one does on the same data: graphs, functions and Keras models, through `launch`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.jobs.programs.fixtures import Jobs, Once, ended
from tests.jobs.programs.job import Array, Job, Results
from tests.jobs.programs.nursery import ROOT, Nursery

GRAPHS = (
    "mlp_adam_mirrored",
    "mlp_adam_shared_two_devices",
    "mlp_in_micro_batches",
    "masked_in_micro_batches",
    "language_model_in_micro_batches",
    "contrastive_in_micro_batches",
    "mlp_static_batch",
    "language_model_mirrored",
    "language_model_shared_two_devices",
    "lstm_v1_shared_two_devices",
    "masked",
    "cond_v1",
    "contrastive",
    "two_views",
    "two_views_mirrored",
    "unknown_counts",
    "noise",
    "types",
    "unseeded",
    "custom_loop",
    "custom_loop_shared_two_devices",
    "custom_loop_stated_batch",
    "function_sparse",
    "loss_scaling",
    "other_initial_values",
    "two_towers",
)
MODELS = ("fit", "callbacks", "per_worker", "resumed", "dataset", "written_files")
MORE_MODELS = ("weighted", "on_batch", "recompiled")
THREE = ("fit", "per_worker")
PIPELINES = ("iterator", "iterator_of_epochs", "iterator_static", "iterator_that_ends_late", "files")
PIPELINES_OF_THREE = ("iterator_that_ends_late", "files")
STEPS = (
    "steps_of_a_session",
    "steps_of_a_session_static",
    "steps_of_a_session_shared",
    "steps_of_a_function",
    "steps_of_a_function_shared",
)
SERVED_GRAPHS = (
    "mlp_adam_mirrored",
    "mlp_adam_shared_two_devices",
    "mlp_static_batch",
    "language_model_mirrored",
    "lstm_v1_shared_two_devices",
    "masked",
    "cond_v1",
    "contrastive",
    "two_views",
    "unknown_counts",
    "noise",
    "types",
    "unseeded",
    "custom_loop",
    "custom_loop_stated_batch",
    "function_sparse",
    "loss_scaling",
    "other_initial_values",
)
SERVED_MODELS = ("fit", "callbacks", "dataset")

PROGRAMS = (
    "clipped",
    "clipped_parallax",
    "clipped_proxies",
    "clipped_one_by_one",
    "clipped_one_by_one_proxies",
    "averaged",
    "averaged_proxies",
    "fetched_after",
    "fetched_after_proxies",
    "two_players",
    "two_players_v1",
    "accumulated",
    "accumulated_v1",
    "counted",
    "looked_up_adam",
    "looked_up_momentum",
    "with_words",
    "by_reference",
    "by_the_program",
    "in_a_branch",
    "in_a_branch_v1",
    "in_a_branch_v1_there",
    "kept_in_a_branch",
    "low_precision",
    "normalised",
    "drawn",
    "looped",
    "looped_v1",
    "checked",
    "two_sessions",
    "asynchronous",
    "stale",
    "several_shapes",
    "without_updates",
)
READS = ("read_between", "read_by_functions", "written_between", "original_between", "read_in_fit")
MORE_READS = ("read_between", "written_between")
TOGETHER = ("two_models", "keras_adagrad")
IN_PARTS = (
    "mlp_in_micro_batches",
    "language_model_in_micro_batches",
    "masked_in_micro_batches",
    "steps_of_a_session",
    "steps_of_a_function",
)
SHARDED = ("fit", "callbacks", "several_shapes", "two_models", "kept_in_a_branch", "in_a_branch_v1_there")
MORE_PROGRAMS = ("clipped_proxies", "accumulated", "looked_up_adam", "checked", "asynchronous")


class Kind(NamedTuple):
    """The processes of a job, and what they run.

    Attributes:
        workers: how many train.
        cases: what they train, one after the other.
        servers: how many parameter servers there are.
        strategy: that of all cases.
        ends_as_python_does: whether its processes tidy up when they end, which takes TensorFlow a second.
    """

    workers: int
    cases: tuple[str, ...]
    servers: int = 0
    strategy: str = "AllReduce"
    ends_as_python_does: bool = False


JOBS = {
    "graphs": Kind(2, GRAPHS),
    "models": Kind(2, MODELS),
    "three": Kind(3, THREE),
    "more_models": Kind(3, MORE_MODELS),
    "served": Kind(2, SERVED_GRAPHS, 1, "PS"),
    "served_models": Kind(2, SERVED_MODELS, 1, "PS"),
    "balanced": Kind(
        3, ("language_model_mirrored", "custom_loop", "fit", *MORE_PROGRAMS, *MORE_READS), 2, "PSLoadBalancing"
    ),
    "parallax": Kind(3, ("language_model_mirrored", "function_sparse", "two_inputs", *MORE_READS), 2, "Parallax"),
    "without_servers": Kind(2, ("language_model_mirrored", "custom_loop", *MORE_READS), 0, "PS"),
    "shards": Kind(2, ("mlp_adam_shared_two_devices", "function_sparse"), 0, "PartitionedAR"),
    "served shards": Kind(
        2, ("mlp_adam_mirrored", "language_model_mirrored", "function_sparse", "fit", *READS), 2, "PartitionedPS"
    ),
    "fsdp": Kind(2, ("mlp_adam_mirrored", "language_model_mirrored", "custom_loop", *SHARDED, *READS), 0, "FSDP"),
    "fsdp of three": Kind(3, ("clipped", "accumulated", "looped", "several_shapes", "written_between"), 0, "FSDP"),
    "fsdp in parts": Kind(2, (*IN_PARTS, "mlp_next_to_a_server", "read_late"), 0, "FSDP", ends_as_python_does=True),
    "programs": Kind(2, PROGRAMS, 1, "PS"),
    "reads": Kind(2, (*READS, *TOGETHER), 1, "PS"),
    "pipelines": Kind(2, PIPELINES),
    "steps": Kind(2, STEPS),
    "pipelines of three": Kind(3, PIPELINES_OF_THREE),
}
JOBS_IN_SHARDS = ("served shards", "fsdp", "fsdp in parts", "fsdp of three")
LEGACY = Kind(2, ("callbacks", "per_worker", "resumed", "weighted", "recompiled"))
"""Models that are built of `tf.keras`; batches of other sizes are other traces, which draw anew on one device."""
REFERENCES = {
    "graphs": (*GRAPHS, "mlp_next_to_a_server"),
    "models": ("fit", "two_inputs"),
    "models with callbacks": ("callbacks", "per_worker"),
    "models that go on": ("resumed", "dataset", "written_files"),
    "models together": TOGETHER,
    "more models": MORE_MODELS,
    "programs": PROGRAMS,
    "reads": (*READS, "read_late"),
    "pipelines": PIPELINES,
    "steps": STEPS,
}
"""What is trained alone for all jobs to be compared with: whatever their strategy is, one device computes the same."""
LIMIT = 150
EXACT, SINGLE_PRECISION = 1e-9, 1e-5
SCRIPT = "tests/jobs/programs/worker.py"

Load = Callable[[str], dict[str, dict[str, Results]]]


@pytest.fixture
def load(once: Once, nursery: Nursery) -> Load:
    """Return a function that gives the results of all processes of a job, by process and case."""

    def run(name: str) -> dict[str, dict[str, Results]]:
        job = JOBS[name]
        with ThreadPoolExecutor() as pool:  # what the job is compared with trains beside it
            done = pool.submit(once, f"job_{name}", lambda folder: fork(job, folder, nursery))
            references = [
                pool.submit(once, f"reference_{one}", lambda folder, cases=cases: train_alone(cases, folder, nursery))
                for one, cases in REFERENCES.items()
                if not set(cases).isdisjoint(job.cases)
            ]
        found: dict[str, dict[str, Results]] = {}
        for filled in (done, *references):
            for path in filled.result().glob("*.pkl"):
                found.setdefault(path.stem, {}).update(pickle.loads(path.read_bytes()))
        logs = "\n".join(path.read_text(errors="replace")[-6000:] for path in done.result().glob("*.log"))
        assert len(found) == job.workers + 2, logs
        return found

    return run


def train_alone(cases: tuple[str, ...], folder: Path, nursery: Nursery) -> None:
    """Run cases in one process, on whole batches and on the first worker's part of them."""
    single = nursery.start([str(ROOT / SCRIPT), ",".join(cases), str(folder)], folder / "single.log", {})
    assert single.wait(LIMIT) == 0, single.output[-6000:]


def fork(job: Kind, folder: Path, nursery: Nursery) -> None:
    """Run the cases of a job in processes that the nursery forks."""
    jobs = Jobs(nursery, folder)
    given = (ROOT / SCRIPT, ",".join(job.cases), folder)
    environ = {"JOB_STRATEGY": job.strategy, **({"SLOW_EXIT": "1"} if job.ends_as_python_does else {})}
    try:
        if job.servers:
            workers, servers = jobs.job_with_servers(job.workers, job.servers, *given, environ=environ)
        else:
            workers, servers = jobs.job(job.workers, *given, environ=environ), []
        codes = ended([*workers, *servers], LIMIT)
        assert set(codes) == {0}, "\n".join(process.output[-4000:] for process in (*workers, *servers))
    finally:
        jobs.end()


MODES = {
    "session": (Kind(2, ("mlp_adam_mirrored",)), EXACT),
    "function": (Kind(2, ("custom_loop",)), EXACT),
    "keras": (Kind(2, ("fit",)), SINGLE_PRECISION),
    "session with a server": (Kind(2, ("mlp_adam_mirrored",), 1, "PS"), EXACT),
    "function with shards": (Kind(2, ("custom_loop",), 0, "FSDP"), EXACT),
}
"""One small job of each mode: all others share their processes with many cases, which takes a minute."""


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_train_one_model_in_each_mode(mode: str, nursery: Nursery, tmp_path: Path) -> None:
    from tests.jobs.programs import worker

    job, tolerance = MODES[mode]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(fork, job, tmp_path, nursery)
        one = worker.run(list(job.cases), Job(folder=tmp_path / "single"))
        alone = worker.run(list(job.cases), Job(0, 2, alone=True, folder=tmp_path / "alone"))
        done.result()
    found = {path.stem: pickle.loads(path.read_bytes()) for path in tmp_path.glob("worker*.pkl")}
    assert len(found) == job.workers
    assert_trains_as_one({**found, "single": one, "alone": alone}, job.cases[0], tolerance)


def launch(job: Kind, folder: Path, **environ: str) -> None:
    """Run the cases of a job in processes that the launcher starts."""
    command = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch", "-n", str(job.workers)]
    command += ["--ps", str(job.servers), SCRIPT, ",".join(job.cases), str(folder)]
    environ = {**plain_environ(), "JOB_STRATEGY": job.strategy, **environ}
    with open(folder / "job.log", "w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT, env=environ, cwd=ROOT, check=False)
    assert done.returncode == 0, (folder / "job.log").read_text()[-6000:]


def plain_environ() -> dict[str, str]:
    """Return the environment of a process that the nursery does not fork."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "1"}


def error(got: Array, expected: Array) -> float:
    """Return the largest error relative to the largest number; infinity for other shapes or types."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return np.inf
    if not np.issubdtype(got.dtype, np.inexact):
        return 0.0 if np.array_equal(got, expected) else np.inf
    if not np.array_equal(np.isfinite(got), np.isfinite(expected)):
        return np.inf
    finite = np.isfinite(expected)
    scale = np.max(np.abs(expected[finite]), initial=0.0)
    return float(np.max(np.abs(got[finite] - expected[finite]), initial=0.0) / (scale or 1.0))


def errors(got: Results, expected: Results) -> dict[str, float]:
    """Return the errors of all results but those that are a worker's own."""
    assert got.keys() == expected.keys()
    return {name: error(got[name], expected[name]) for name in expected if not name.startswith("own ")}


def assert_trains_as_one(found: dict[str, dict[str, Results]], case: str, tolerance: float) -> None:
    """Compare each worker with the single process, which must differ from what one part of the data gives."""
    expected = found["single"][case]
    workers = sorted(name for name in found if name.startswith("worker"))
    for worker in workers:
        worst = {name: e for name, e in errors(found[worker][case], expected).items() if not e <= tolerance}
        assert not worst, f"{worker} of {len(workers)}"
    alone = errors(found["alone"][case], expected)
    assert max(e for name, e in alone.items() if name.startswith("variable")) > 100 * tolerance, "it cannot fail"


@pytest.mark.parametrize("case", [case for case in GRAPHS if case != "unseeded"])
def test_two_processes_train_a_graph_or_a_function_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("graphs"), case, EXACT)


def test_what_is_drawn_without_a_seed_is_the_same_in_all_processes(load: Load) -> None:
    found = load("graphs")
    first, second = (found[worker]["unseeded"] for worker in ("worker0", "worker1"))
    assert set(errors(second, first).values()) == {0.0}
    masks = [first[f"dropped of step {step}"] != 0 for step in range(3)]
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0][0], masks[0][3])  # rows of different workers
    assert 0.35 < np.mean(masks) < 0.65
    one, two = (first[f"variable {name}"] for name in ("one", "two"))
    assert error(one, two) > 0.1
    assert error(found["single"]["unseeded"]["variable one"], one) > 0.1


@pytest.mark.parametrize("case", MODELS)
def test_two_processes_fit_a_keras_model_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("models"), case, SINGLE_PRECISION)


def test_two_processes_fit_models_of_tf_keras_as_one_does(tmp_path: Path) -> None:
    legacy = {"TF_USE_LEGACY_KERAS": "1"}
    command = [sys.executable, SCRIPT, ",".join(LEGACY.cases), str(tmp_path)]
    with subprocess.Popen(command, env={**plain_environ(), **legacy}, cwd=ROOT) as alone:
        launch(LEGACY, tmp_path, **legacy)
        assert alone.wait(LIMIT) == 0
    found = {path.stem: pickle.loads(path.read_bytes()) for path in tmp_path.glob("*.pkl")}
    assert any(name.endswith("/m/hidden/kernel") for name in found["worker0"]["callbacks"])  # named by tf_keras
    for case in LEGACY.cases:
        assert_trains_as_one(found, case, SINGLE_PRECISION)


@pytest.mark.parametrize("case", THREE)
def test_three_processes_fit_a_keras_model_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("three"), case, SINGLE_PRECISION)


@pytest.mark.parametrize("case", [case for case in SERVED_GRAPHS if case != "unseeded"])
def test_two_processes_with_a_parameter_server_train_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("served"), case, EXACT)


@pytest.mark.parametrize("case", SERVED_MODELS)
def test_two_processes_with_a_parameter_server_fit_a_keras_model_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("served_models"), case, SINGLE_PRECISION)


@pytest.mark.parametrize(
    ("job", "case"),
    [(job, case) for job in ("balanced", "parallax", "without_servers", "shards") for case in JOBS[job].cases],
)
def test_jobs_with_several_servers_or_none_train_as_one_does(load: Load, job: str, case: str) -> None:
    assert_trains_as_one(load(job), case, SINGLE_PRECISION if case in ("fit", "two_inputs") else EXACT)


@pytest.mark.parametrize(("job", "case"), [(job, case) for job in JOBS_IN_SHARDS for case in JOBS[job].cases])
def test_jobs_whose_variables_lie_in_shards_train_as_one_does(load: Load, job: str, case: str) -> None:
    models = ("fit", "callbacks", "two_models", "function_sparse", "read_in_fit")
    assert_trains_as_one(load(job), case, SINGLE_PRECISION if case in models else EXACT)


def test_what_is_drawn_without_a_seed_is_the_same_with_a_parameter_server(load: Load) -> None:
    first, second = (load("served")[worker]["unseeded"] for worker in ("worker0", "worker1"))
    assert set(errors(second, first).values()) == {0.0}


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs_that_do_more_than_fetch_the_loss_go_as_without_servers(load: Load, case: str) -> None:
    assert_trains_as_one(load("programs"), case, EXACT)


@pytest.mark.parametrize("case", READS)
def test_whatever_python_reads_or_writes_between_steps_is_what_one_process_has(load: Load, case: str) -> None:
    assert_trains_as_one(load("reads"), case, SINGLE_PRECISION if case == "read_in_fit" else EXACT)


@pytest.mark.parametrize("case", TOGETHER)
def test_models_that_share_a_job_with_servers_train_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("reads"), case, SINGLE_PRECISION)


@pytest.mark.parametrize(
    ("job", "case"), [(job, case) for job in ("pipelines", "pipelines of three") for case in JOBS[job].cases]
)
def test_processes_that_build_one_pipeline_train_on_it_as_one_does(load: Load, job: str, case: str) -> None:
    assert_trains_as_one(load(job), case, SINGLE_PRECISION if case == "files" else EXACT)


@pytest.mark.parametrize("case", STEPS)
def test_two_processes_do_several_steps_per_run_as_one_does_one_by_one(load: Load, case: str) -> None:
    assert_trains_as_one(load("steps"), case, 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_MODELS)
def test_three_processes_do_more_with_keras_models_as_one_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("more_models"), case, SINGLE_PRECISION)


def test_only_worker_0_writes_checkpoints(load: Load) -> None:
    found = load("models")
    assert [int(found[f"worker{task}"]["callbacks"]["own files"]) for task in range(2)] == [2, 0]


def test_the_list_of_cases_is_complete() -> None:
    from tests.jobs.programs import worker

    listed = {case for job in JOBS.values() for case in job.cases}
    assert listed == set(worker.cases())
    assert sorted(case for cases in REFERENCES.values() for case in cases) == sorted(listed)
