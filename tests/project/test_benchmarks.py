"""The benchmarks run, on small models and without waiting for good numbers."""

from __future__ import annotations

import importlib
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import dist_link, timing
from benchmarks.child import ChildFailed, call, peak_bytes
from benchmarks.effort import Effort
from benchmarks.figure import Figure, number, show


def call_here(function: str, arguments: Mapping[str, Any], *, timeout: float, cores: int = 0) -> Any:
    """Do what `child.call` does, in this process: starting TensorFlow anew takes most of a tiny run."""
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(result))


@pytest.fixture(autouse=True)
def several_strategies_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each MirroredStrategy its own collective keys, as TensorFlow's own tests do: else they clash."""
    from benchmarks import contestants

    prepare = contestants.prepare

    def separate(how: str, *args: Any, **kwargs: Any) -> contestants.Contestant:
        if how == "strategy":
            import tensorflow as tf

            tf.distribute.MirroredStrategy._collective_key_base += 100_000
        return prepare(how, *args, **kwargs)

    monkeypatch.setattr(contestants, "prepare", separate)


def printed_by(name: str, folder: Path) -> str:
    """Run a benchmark on small models; return what it prints, and leave its figures in bench.json."""
    printed = io.StringIO()
    code = command.run([name], Effort(tiny=True), folder / "bench.json", Console(file=printed, width=200))
    assert code == 0, printed.getvalue()
    return printed.getvalue()


@pytest.mark.parametrize("name", [*command.BENCHMARKS, "mesh", "checkpoint"])
def test_a_benchmark_measures_and_prints_its_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"benchmarks.{name}.call", call_here)
    printed = printed_by(name, tmp_path)
    kept = json.loads((tmp_path / "bench.json").read_text())
    figures = kept["benchmarks"][name]["figures"]
    assert figures
    for figure in figures:
        assert math.isfinite(figure["value"]), figure["name"]
        assert figure["name"].strip()[:40] in printed
    assert kept["machine"]["python"]


@pytest.mark.full
def test_two_processes_are_measured_as_one_job(tmp_path: Path) -> None:
    printed_by("dist", tmp_path)
    slow = json.loads((tmp_path / "bench.json").read_text())["benchmarks"]["dist"]["details"]["slow"]
    for kind, found in slow.items():
        assert found["passed"] == pytest.approx(found["planned"], rel=0.1), kind


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("dist_dense", ["step of two processes: ours / theirs"]),
        ("hierarchy", ["added up there first / one ring"]),
        ("one_shot", ["one-shot / ring", "two-shot / ring"]),
        ("dist_servers", ["a step: function / session"]),
        ("dist_embedding", ["the better of all-reduce and parallax", "what Auto chose"]),
        pytest.param(
            "dist_link",
            ["step / max(computing, bytes / bandwidth)"],
            marks=pytest.mark.skipif(not dist_link.has_hosts(), reason="network namespaces"),
        ),
        pytest.param(
            "bucket_order",
            ["order measured / from the graph"],
            marks=pytest.mark.skipif(not dist_link.has_hosts(), reason="network namespaces"),
        ),
        ("pipeline", ["2 micro-batches: one process / two stages"]),
    ],
)
def test_jobs_take_turns_with_what_they_are_measured_beside(name: str, figures: list[str], tmp_path: Path) -> None:
    printed = printed_by(name, tmp_path)
    for figure in figures:
        assert figure in printed


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "transformer", "deep", "sixty", "large", "small"])
def test_every_program_learns_its_batch(name: str) -> None:
    from benchmarks import programs

    program = programs.build(name, tiny=True)
    step = programs.single_step(program)
    losses = [float(step(program.x, program.y)) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_all_contestants_compute_the_same_losses() -> None:
    from benchmarks import contestants

    contestants.split_cpu(2)
    losses = {}
    for how in contestants.HOW:
        step = contestants.prepare(how, "mlp", 2, tiny=True).start()
        losses[how] = [float(step()) for _ in range(4)]
    assert losses["single"][-1] < losses["single"][0]
    for how in contestants.HOW:
        assert losses[how] == pytest.approx(losses["single"], rel=1e-4), how


def test_the_bytes_of_shared_variables_do_not_grow_with_the_replicas() -> None:
    from benchmarks import contestants, memory

    contestants.split_cpu(2)
    before = memory.variable_bytes()
    contestant = contestants.prepare("shared", "large", 2, tiny=True)
    made = memory.variable_bytes() - before
    step = contestant.start()
    step()
    assert memory.variable_bytes() - before == made > 0


def test_a_process_returns_its_result_and_its_peak_memory() -> None:
    assert call("benchmarks.child:peak_bytes", {}, timeout=60) > 2**20
    assert peak_bytes() > 2**20


@pytest.mark.parametrize(
    ("function", "arguments", "timeout", "message"),
    [
        ("json:loads", {"s": "{"}, 60, "ended with code 1\\n.*JSONDecodeError"),
        ("signal:pause", {}, 1, "did not end within 1 s"),
    ],
)
def test_a_process_that_fails_or_hangs_is_an_error(
    function: str, arguments: dict[str, Any], timeout: float, message: str
) -> None:
    with pytest.raises(ChildFailed, match=f"(?s){message}"):
        call(function, arguments, timeout=timeout)


def test_a_failed_benchmark_is_reported_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ChildFailed("it is broken")

    monkeypatch.setattr("benchmarks.overhead.call", fail)
    monkeypatch.setattr("benchmarks.start_up.call", lambda *_, **__: 1.0)
    printed = io.StringIO()
    code = command.run(["overhead", "start_up"], Effort(), tmp_path / "bench.json", Console(file=printed, width=200))
    assert code == 1
    assert "overhead failed: it is broken" in printed.getvalue()
    assert list(json.loads((tmp_path / "bench.json").read_text())["benchmarks"]) == ["start_up"]


def test_results_of_other_benchmarks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.start_up.call", lambda *_, **__: 1.0)
    results = tmp_path / "bench.json"
    results.write_text(json.dumps({"benchmarks": {"memory": {"seconds": 1}}}))
    command.run(["start_up"], Effort(), results, Console(file=io.StringIO()))
    assert set(json.loads(results.read_text())["benchmarks"]) == {"memory", "start_up"}


def test_an_unknown_name_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["speed"])
    assert "throughput" in capsys.readouterr().err


def test_contestants_take_turns_and_change_who_begins() -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    times = timing.interleaved({name: noted(name) for name in "ab"}, rounds=3, warm_up=0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in times["wall"].values()] == [3, 3]
    assert [len(values) for values in times["processor"].values()] == [3, 3]


def test_a_ratio_compares_within_rounds() -> None:
    assert timing.ratio([1.0, 10.0, 100.0], [2.0, 20.0, 50.0]) == 0.5
    assert timing.spread([1.0]) == 0.0
    assert timing.spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


def test_a_fit_finds_the_line_and_the_exponent() -> None:
    line = timing.fit([1, 2, 4], [3.0, 5.0, 9.0])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2.0, 1.0, 1.0))
    assert timing.fit([1, 2, 4], [5.0, 20.0, 80.0]).exponent == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("figure", "met", "target"),
    [
        (Figure("a", 0.9, at_most=1.0), True, "<= 1"),
        (Figure("a", 1.1, at_most=1.0), False, "<= 1"),
        (Figure("a", 149_999, at_least=150_000), False, ">= 150,000"),
        (Figure("a", 5.0), None, ""),
    ],
)
def test_a_figure_knows_whether_it_meets_its_target(figure: Figure, met: bool | None, target: str) -> None:
    assert figure.met is met
    assert figure.target == target
    printed = io.StringIO()
    show(Console(file=printed, width=120), "title", [figure])
    assert {True: "yes", False: "NO", None: ""}[met] in printed.getvalue()


def test_numbers_are_printed_with_as_many_digits_as_they_are_good_for() -> None:
    assert [number(value) for value in (0.5004, 12.34, 123456.7)] == ["0.5", "12.3", "123,457"]
