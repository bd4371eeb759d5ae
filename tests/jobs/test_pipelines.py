"""Workers that hold a stage each train as one process does; what goes wrong in one is named by the others."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, PlanError
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.runtime.function.session_step import stand_alone
from autograph_rewrite.runtime.job import exchanges
from tests.jobs.programs.fixtures import Jobs, Once, ended, free_ports, tf_config, until
from tests.jobs.programs.job import Results
from tests.jobs.programs.nursery import ROOT, Nursery, Worker
from tests.jobs.test_training import error
from tests.support.staged import mlp, staged_item
from tests.zoo import ZOO

SCRIPT, TROUBLE = "tests/jobs/programs/stages.py", "tests/jobs/programs/trouble.py"
GRAPHS = ("mlp", "tied", "dropout", "normalised", "recurrent", "saver", "function", "iterator")
LIMIT, PATIENCE = 150, 5
EXACT, SINGLE_PRECISION = 1e-9, 1e-5
JOBS = {
    "two": (2, (*GRAPHS, "fit", "where_it_ran")),
    "three": (3, ("mlp", "fit")),
    "two replicas of two": (4, ("mlp",)),
}
full = pytest.mark.full
Load = Callable[[str], dict[str, dict[str, Results]]]


@pytest.fixture
def load(once: Once, nursery: Nursery) -> Load:
    """Return a function that gives the results of all processes of a job, by process and case."""

    def run(name: str) -> dict[str, dict[str, Results]]:
        folder = once(f"stages_{name}", lambda folder: start(nursery, folder, *JOBS[name]))
        return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pkl")}

    return run


def start(nursery: Nursery, folder: Path, count: int, cases: tuple[str, ...]) -> None:
    """Run the cases in the processes of a job, and in one alone."""
    jobs = Jobs(nursery, folder)
    given = (SCRIPT, ",".join(cases), folder)
    try:
        single = jobs.start(*given)
        workers = jobs.job(count, *given, environ={"SLOW_EXIT": "1"})
        codes = ended([single, *workers], LIMIT)
        assert set(codes) == {0}, "\n".join(worker.output[-4000:] for worker in (single, *workers))
    finally:
        jobs.end()


def assert_trains_as_one(found: dict[str, dict[str, Results]], case: str, tolerance: float, count: int = 2) -> None:
    """Compare each worker with the single process, which must differ from what a part of the batch gives."""
    assert len(found) == count + 1
    expected = {name: value for name, value in found["single"][case].items() if not name.startswith("own ")}
    for task in range(count):
        got = found[f"worker{task}"][case]
        assert got.keys() == expected.keys()
        worst = {name: e for name, value in expected.items() if not (e := error(got[name], value)) <= tolerance}
        assert not worst, f"worker {task}"
    short = {name.removeprefix("own short "): v for name, v in found["single"][case].items() if "own short" in name}
    if short:
        assert max(error(v, expected[f"variable {name}"]) for name, v in short.items()) > 1e-3, "it cannot fail"


@pytest.mark.parametrize("case", GRAPHS)
def test_two_workers_with_a_stage_each_train_as_one_process_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("two"), case, EXACT)


def test_two_workers_with_a_stage_each_fit_a_keras_model_as_one_process_does(load: Load) -> None:
    assert_trains_as_one(load("two"), "fit", SINGLE_PRECISION)


@pytest.mark.parametrize("case", JOBS["three"][1])
def test_three_workers_with_a_stage_each_train_as_one_process_does(load: Load, case: str) -> None:
    assert_trains_as_one(load("three"), case, SINGLE_PRECISION if case == "fit" else EXACT, 3)


@pytest.mark.full
def test_four_workers_can_be_two_replicas_of_two_stages(load: Load) -> None:
    assert_trains_as_one(load("two replicas of two"), "mlp", EXACT, 4)


def test_each_stage_runs_and_is_updated_on_its_worker(load: Load) -> None:
    ran = {name.removeprefix("own "): str(v) for name, v in load("two")["worker0"]["where_it_ran"].items()}
    assert set(ran.values()) == {f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)}
    for layer in range(4):
        updates = [name for name in ran if f"update_w{layer}/ResourceApplyAdam" in name and "_S" not in name]
        matrices = [
            name for name in ran if re.fullmatch(rf"replica_0/micro_\d/matmul{f'_{layer}' * (layer > 0)}", name)
        ]
        assert updates
        assert len(matrices) == 4
        assert {ran[name][27] for name in updates + matrices} == {str(layer // 2)}


CLUSTER = {"workers": ["127.0.0.1:2222", "127.0.0.1:2223"]}


def test_variables_and_the_state_of_their_optimizer_are_placed_where_their_stage_is() -> None:
    item, cuts = staged_item(mlp)
    pipeline = {"stages": 2, "microbatches": 2, "boundaries": cuts[1:2]}
    graphs = [ar.rewrite(item, {"cluster": CLUSTER, "pipeline": pipeline}, task=task).graph for task in range(2)]
    for stage in range(2):
        for name in (f"w{2 * stage}", f"w{2 * stage}/Adam", f"b{2 * stage + 1}/Adam_1"):
            assert {graph.nodes[name].device for graph in graphs} == {
                f"/job:worker/replica:0/task:{stage}/device:CPU:0"
            }


def test_a_step_that_trains_nothing_has_no_stages_but_a_part_of_the_batch_for_each_worker() -> None:
    item, _ = staged_item(mlp)
    config = {"cluster": CLUSTER, "pipeline": {"stages": 2, "microbatches": 4}}
    graphs = [ar.rewrite(item, config, task=task, training=False) for task in range(2)]
    assert {graph.report.plan.replicas for graph in graphs} == {2}
    for task, graph in enumerate(graphs):
        assert {node.device for node in graph.graph} == {f"/job:worker/replica:0/task:{task}/device:CPU:0"}


def test_the_state_of_an_optimizer_stays_with_its_variable_though_gradients_are_scaled_by_the_norm_of_all() -> None:
    built = ZOO["custom_loop"].build(optimizer="adam")
    item = ar.GraphItem.from_function(built.step, *built.specs, batch_inputs=dict(built.batch_inputs))
    plan = ar.build_plan(stand_alone(normalise(item)), {"cluster": CLUSTER, "pipeline": {"stages": 2}})
    graph = ar.rewrite(stand_alone(normalise(item)), plan, task=0)
    tasks = {name: graph.graph.nodes[variable.handle].device[27] for name, variable in graph.variables.items()}
    trained = [name for name in tasks if f"optimizer/{name}_0_momentum" in tasks]
    assert {tasks[name] for name in trained} == {"0", "1"}
    for name in trained:
        assert {tasks[f"optimizer/{name}_0_{slot}"] for slot in ("momentum", "velocity")} == {tasks[name]}


def test_a_message_is_sent_in_pieces_that_are_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "PIECE", 10)
    texts = [b"head", b"x" * 7, b"", b"y" * 25, b"z"]
    pieces = list(exchanges.pieces(texts))
    assert [text for piece, _ in pieces for text in piece] == texts
    assert [len(piece) for piece, _ in pieces] == [1, 2, 1, 1]
    assert [is_last for _, is_last in pieces] == [False, False, False, True]
    assert list(exchanges.pieces([b"head"])) == [([b"head"], True)]


def test_verify_runs_the_stages_of_a_job_in_one_process() -> None:
    item, _ = staged_item(mlp)
    config = {"cluster": CLUSTER, "devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 2}}
    report = ar.verify(item, config, steps=2)
    assert report.ok, str(report)
    assert "the stages of 2 processes were run in one" in report.notes


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"pipeline": {"stages": 3}}, r"pipeline.stages is 3, but the 2 workers have 2 devices"),
        ({"pipeline": {"stages": 2, "devices": ["CPU:0", "CPU:1"]}}, r"CPU:0 is no device of the 2 workers"),
        (
            {"pipeline": {"stages": 2, "devices": ["/job:worker/task:1/CPU:0"] * 2}},
            r"pipeline.devices gives worker 0 no stage",
        ),
        ({"pipeline": {"stages": 2}, "input": "per_worker"}, r"input is per_worker, but stages are no replicas"),
        ({"pipeline": {"stages": 2}, "strategy": {"variables": "mirrored"}}, r"stages in a job hold one copy"),
    ],
)
def test_stages_that_do_not_fit_the_workers_are_refused(given: dict[str, object], problem: str) -> None:
    item, _ = staged_item(mlp)
    with pytest.raises(ConfigError, match=problem):
        ar.rewrite(item, {"cluster": CLUSTER, **given}, task=0)


def test_a_plan_whose_stages_leave_a_worker_out_is_refused() -> None:
    item, _ = staged_item(mlp)
    plan = ar.build_plan(item, {"cluster": CLUSTER, "pipeline": {"stages": 2, "microbatches": 2}})
    text = plan.to_yaml().replace("/job:worker/replica:0/task:1", "/job:worker/replica:0/task:2")
    with pytest.raises(PlanError, match=r"workers count from 0, and each has a stage"):
        ar.rewrite(item, ar.Plan.from_yaml(text), task=0)


ENVIRON = {"JOB_STAGES": "1", "JOB_TIMEOUT": str(PATIENCE), "SLOW_EXIT": "1"}


def run(jobs: Jobs, kind: str, mode: str, count: int = 2, patience: int = PATIENCE) -> list[Worker]:
    """Run a job in which worker 1 gets into trouble, until all others have ended."""
    environ = {**ENVIRON, "JOB_TIMEOUT": str(patience)}
    workers = jobs.job(count, TROUBLE, kind, mode, jobs.folder, environ=environ)
    others = [worker for task, worker in enumerate(workers) if task != 1]
    assert None not in ended(others, LIMIT), "\n".join(worker.output[-3000:] for worker in others)
    return workers


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param("killed", "session", marks=full),
        ("killed", "function"),
        pytest.param("killed", "keras", marks=full),
        pytest.param("stopped", "session", marks=full),
        pytest.param("stopped", "function", marks=full),
    ],
)
def test_a_worker_that_is_gone_is_named_by_worker_0(jobs: Jobs, kind: str, mode: str) -> None:
    first, _ = run(jobs, kind, mode)
    problem = (
        r"ClusterError: worker 0 waited for worker 1 \(127\.0\.0\.1:\d+\) to finish run \d of the session: no answer"
    )
    assert re.search(problem, first.output), first.output[-3000:]
    assert first.code == 1


def test_a_worker_that_is_gone_is_named_by_another_one(jobs: Jobs) -> None:
    _, _, third = run(jobs, "killed", "session", count=3)
    assert re.search(r"ClusterError: worker 2 waited for .*worker 1 \(", third.output), third.output[-3000:]
    assert third.code == 1


def test_worker_0_is_named_when_it_is_gone(jobs: Jobs) -> None:
    first, second = jobs.job(2, TROUBLE, "slow", "session", jobs.folder, environ=ENVIRON)
    until(lambda: second.log.exists() and ("did step 2" in second.output or second.code is not None), LIMIT)
    first.kill()
    assert ended([second], LIMIT) == [1], second.output[-3000:]
    assert re.search(r"ClusterError: worker 1 waited for worker 0 \(", second.output), second.output[-3000:]


# Who raises an error still answers until Python has ended, which takes seconds on a busy machine.
@pytest.mark.parametrize(("kind", "mode", "patience"), [("leaves", "function", PATIENCE), ("raises", "session", 60)])
def test_a_worker_that_stops_training_is_named_by_worker_0(jobs: Jobs, kind: str, mode: str, patience: int) -> None:
    first, _ = run(jobs, kind, mode, patience=patience)
    assert re.search(r"ClusterError: worker 0 .*worker 1 \(127\.0\.0\.1:\d+\)", first.output), first.output[-3000:]
    assert first.code == 1
    assert "did step 6" not in first.output


def test_a_worker_that_does_something_else_is_told_from_one_that_is_gone(jobs: Jobs) -> None:
    first, _ = run(jobs, "hangs", "session")
    problem = (
        f"worker 0 waited {PATIENCE} s for the other workers to finish run \\d of the session; all processes answer"
    )
    assert re.search(problem, first.output), first.output[-3000:]


def test_workers_that_feed_different_batches_are_told(jobs: Jobs) -> None:
    workers = run(jobs, "user_error", "session")
    assert ended(workers, LIMIT) == [1, 1]
    for worker in workers:
        assert re.search(r"ClusterError: worker 1 \(\S+\) does not do the same as worker 0 in run", worker.output)
        assert "'ids:0': int" in worker.output
        assert "stages are no replicas: every worker makes the same calls, and feeds the whole batch" in worker.output


@pytest.mark.parametrize("mode", ["session", pytest.param("function", marks=full)])
def test_all_workers_are_told_of_an_error_of_the_step_itself_and_can_carry_on(jobs: Jobs, mode: str) -> None:
    workers = run(jobs, "all_fail", mode)
    assert ended(workers, LIMIT) == [0, 0]
    assert all("caught" in worker.output and "did step 6" in worker.output for worker in workers)


def test_a_worker_that_never_comes_is_named(jobs: Jobs) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    environ = {**ENVIRON, "JOB_TIMEOUT": "3", "TF_CONFIG": tf_config(addresses, 0)}
    worker = jobs.start(TROUBLE, "none", "session", jobs.folder, environ=environ)
    assert ended([worker], LIMIT) == [1]
    assert f"ClusterError: worker 0 waited for worker 1 ({addresses[1]})" in worker.output, worker.output


def test_ctrl_c_ends_all_workers(jobs: Jobs) -> None:
    command = [sys.executable, "-m", "autograph_rewrite.tools.cli", "launch", "-n", "2", str(ROOT / TROUBLE)]
    log = jobs.folder / "launch.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "slow", "session", str(jobs.folder)],
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(ROOT), **ENVIRON},
        )
    try:
        until(lambda: "did step 2" in log.read_text() or process.poll() is not None, LIMIT)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    assert all(f"[worker {task}] interrupted" in log.read_text() for task in range(2))
