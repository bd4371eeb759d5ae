"""`opt`: passes chosen by name, printed around, timed; and what a pass that breaks leaves behind."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.compile import request
from autograph_rewrite.errors import PassError, RewriteError, VerifyError
from autograph_rewrite.inspect.pass_states import optimize, placements_of, text_of
from autograph_rewrite.load.files import from_printed
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.pass_manager import Pass, always, select
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.pass_pipeline import ANALYSIS, PIPELINE
from autograph_rewrite.passes.sharding.residence import Residences
from autograph_rewrite.tools import cli
from tests.support import text_cases

GRAPH = """\
# output loss = %loss
# target %train
%x: float32[?,3] = Placeholder()
%w: resource = VarHandleOp() {dtype=float32, shape=[3,1], shared_name="w"}
%w/read: float32[3,1] = ReadVariableOp(%w)
%h = MatMul(%x, %w/read)
%axes: int32[2] = Const() {value=[0, 1]}
%loss = Sum(%h, %axes)
%dw = MatMul(%x, %h) {transpose_a=true}
%rate: float32 = Const() {value=0.1}
%train = ResourceApplyGradientDescent(%w, %rate, %dw)
%unused = Neg(%h)
"""
NEEDED = (
    "eliminate-dead-code", "propagate", "resolve-plan", "assign-spans", "measure-blocks", "insert-reshards",
    "lower-reshards", "find-averages", "assign-devices",
)  # fmt: skip
Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)
    Path("graph.txt").write_text(GRAPH)
    Path("config.yaml").write_text("devices: [CPU:0, CPU:1]\n")

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(shlex.split(line))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_passes_run_in_the_order_in_which_they_are_named(call: Call) -> None:
    code, out, _ = call("opt graph.txt --config config.yaml --passes propagate,place-reductions")
    assert code == 0
    assert "%x: float32[?,3] @ replicated -> split(0) = Placeholder()" in out
    assert "%dw: float32 @ partial(sum) -> replicated = MatMul(" in out
    assert "%unused" in out


def test_a_pipeline_stops_after_the_pass_that_is_named(call: Call) -> None:
    _, out, _ = call("opt graph.txt --config config.yaml --stop-after eliminate-dead-code")
    assert "%unused" not in out
    assert "partial" not in out


def test_without_a_choice_the_folded_graph_is_printed(call: Call) -> None:
    _, out, _ = call("opt graph.txt --config config.yaml")
    assert "%dw/add_n: float32 = AddN(all(%dw)) @CPU:0" in out


@pytest.mark.parametrize("one", [one.name for one in PIPELINE])
def test_each_pass_can_be_stopped_after_and_skipped_or_says_who_needs_it(call: Call, one: str) -> None:
    code, _, err = call(f"opt graph.txt --config config.yaml --stop-after {one}")
    assert code == 0, err
    code, _, err = call(f"opt graph.txt --config config.yaml --skip {one}")
    assert code == (2 if one in NEEDED else 0)
    assert one not in NEEDED or re.search(rf"the pass '[\w-]+' needs the \w+ that '{one}' finds", err)


def test_the_graph_is_printed_around_passes(call: Call) -> None:
    _, out, _ = call(
        "opt graph.txt --config config.yaml --print-before place-reductions --print-after eliminate-dead-code"
    )
    assert out.index("# after eliminate-dead-code\n") < out.index("# before place-reductions\n")


def test_what_each_pass_takes_is_told_on_standard_error(call: Call) -> None:
    _, out, err = call("opt graph.txt --config config.yaml --time-passes")
    assert re.search(r"^insert-reshards +[\d.]+ +\d+ +0$", err, re.MULTILINE)
    assert "ms" not in out


def test_passes_and_text_are_there_for_programs(call: Call) -> None:
    code, out, _ = call("opt graph.txt --json --config config.yaml --stop-after propagate")
    found = json.loads(out)
    assert code == 0
    assert [one["name"] for one in found["passes"]] == ["eliminate-dead-code", "propagate"]
    assert "%dw" in found["text"]


def test_all_passes_are_listed_with_what_they_do(call: Call) -> None:
    _, out, _ = call("opt --list")
    assert all(one.name in out and one.summary.endswith(".") for one in PIPELINE)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--passes propagat", "there is no pass 'propagat'\n  hint did you mean 'propagate'?"),
        ("--passes decompose", "the pass 'decompose' needs the Propagation that 'propagate' finds"),
        ("--passes propagate --stop-after expand", "'expand' is not among the passes to run"),
        ("--skip propagate", "the pass 'train-alone' needs the Propagation that 'propagate' finds"),
        ("--print-after nothing", "there is no pass 'nothing'"),
    ],
)
def test_a_wrong_choice_says_what_is_wrong(call: Call, options: str, problem: str) -> None:
    code, _, err = call(f"opt graph.txt --config config.yaml {options}")
    assert code == 2
    assert problem in err


def test_a_folded_graph_is_refused(call: Call) -> None:
    call("opt graph.txt --config config.yaml --full -o folded.txt")
    code, _, err = call("opt folded.txt --config config.yaml")
    assert code == 2
    assert "this graph is folded" in err


def test_dump_and_opt_read_what_dump_writes(call: Call) -> None:
    _, once, _ = call("dump graph.txt --full")
    Path("again.txt").write_text(once)
    _, twice, _ = call("dump again.txt --full")
    assert once == twice
    line = "opt {} --config config.yaml --stop-after insert-reshards"
    assert call(line.format("graph.txt")) == call(line.format("again.txt"))


def stating(line: str, placement: str) -> str:
    """Return the graph with something stated of one of its results."""
    assert f"%{line} = " in GRAPH
    return GRAPH.replace(f"%{line} = ", f"%{line}: float32 @ {placement} = ")


def test_a_text_with_placements_can_be_read_again(call: Call) -> None:
    line = "opt {} --config config.yaml --stop-after place-reductions {} -o {}"
    call(line.format("graph.txt", "", "placed.txt"))
    call(line.format("placed.txt", "", "again.txt"))
    placed = Path("placed.txt").read_text()
    assert "%dw: float32 @ partial(sum) -> replicated = MatMul(" in placed
    assert Path("again.txt").read_text() == placed
    call(line.format("placed.txt", "--full --skip propagate", "full.txt"))
    assert "%rate: float32[] @ replicated = Const()" in Path("full.txt").read_text()
    line = "opt full.txt --config config.yaml --full --stop-after resolve-plan --skip eliminate-dead-code,propagate"
    assert call(line)[1] == Path("full.txt").read_text()


def test_a_placement_that_propagation_does_not_find_is_refused_at_its_line(call: Call) -> None:
    Path("graph.txt").write_text(stating("dw", "split(0)"))
    code, _, err = call("opt graph.txt --config config.yaml")
    assert code == 2
    assert "'%dw' is stated to be split(0), and propagation finds partial(sum)\n  at   graph.txt:9\n" in err


def test_every_verb_compares_what_a_text_states(call: Call) -> None:
    Path("graph.txt").write_text(stating("dw", "split(0)"))
    for verb in ("rewrite graph.txt --config config.yaml -o new.ar", "plan graph.txt --config config.yaml"):
        code, _, err = call(verb)
        assert code == 2
        assert "at   graph.txt:9" in err


def test_passes_behind_propagate_take_placements_as_given(call: Call) -> None:
    Path("graph.txt").write_text(stating("dw", "local"))
    code, out, err = call("opt graph.txt --config config.yaml --passes place-reductions,resolve-plan")
    assert code == 0, err
    assert "%dw: float32 @ local = MatMul(" in out
    assert "%loss: float32 @ partial(sum) -> replicated = Sum(" in out


@pytest.mark.parametrize("stated", ["split(0)", "split(1)", "partial(max)", "replicated"])
def test_what_reads_a_given_value_follows_from_it(call: Call, stated: str) -> None:
    graph = stating("h", stated).replace("%dw = ", "%square = Mul(%h, %h)\n%dw = ").replace("%unused = Neg(%h)", "")
    Path("graph.txt").write_text(graph)
    code, out, err = call("opt graph.txt --config config.yaml --passes split-draws --full")
    assert code == 0, err
    assert f"%h: float32 @ {stated} = " in out
    square = "replicated" if stated.startswith("partial") else stated  # a product of sums is no sum of products
    assert f"%square: float32 @ {square} = " in out


def test_a_given_dimension_has_to_be_there(call: Call) -> None:
    Path("graph.txt").write_text(stating("h", "split(2)"))
    code, _, err = call("opt graph.txt --config config.yaml --passes split-draws")
    assert code == 2
    assert "'%h' has 2 dimensions, so it cannot be split(2)\n  at   graph.txt:6" in err


def test_a_word_that_is_no_placement_is_refused_where_it_stands(call: Call) -> None:
    Path("graph.txt").write_text(stating("dw", "partial(summ)"))
    code, _, err = call("opt graph.txt --config config.yaml")
    assert code == 2
    assert "'summ' combines no contributions\n  at   graph.txt:9:24\n  hint did you mean 'sum'?" in err


def test_an_expanded_graph_is_refused(call: Call) -> None:
    call("rewrite graph.txt --config config.yaml -o new.ar")
    call("dump new.ar --full -o expanded.txt")
    code, _, err = call("opt expanded.txt --config config.yaml")
    assert code == 2
    assert "this graph is expanded" in err


@pytest.mark.parametrize("path", text_cases.cases(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_an_analysis_leaves_is_found_again_and_may_be_given(path: Path) -> None:
    """The full text behind each analysis states what `propagate` finds in it, and what follows if nobody propagates."""
    given, _ = text_cases.parts(path)
    propagate = next(one for one in PIPELINE if one.name == "propagate")
    reading = Pass("read", lambda rewrite: None, needs=(Propagation,))
    for name in (ANALYSIS[0].name, ANALYSIS[-1].name):  # what each one between adds, text cases show
        try:
            rewrite, config = text_cases.optimized(given, name)
        except RewriteError:
            return
        if rewrite.item.variables != rewrite.request.item.variables or rewrite.job.batch_inputs[0].whole:
            return  # the names by which a configuration knows variables and inputs are others behind these passes
        if rewrite.has(Residences) and rewrite.get(Residences).of:
            return  # a text says that a variable is split, and not how large its shards are
        stated = placements_of(rewrite)
        again = normalise(from_printed(text_of(rewrite, full=True), {}))
        assert bool(again.placements) == bool(stated)
        for one in (propagate, reading):
            found = placements_of(optimize(again, request(again, config), [one], task=rewrite.request.task))
            assert found == stated, (name, one.name)


def with_broken(name: str, kind: type[Exception]) -> tuple[Pass, ...]:
    """Return all passes, of which one always runs, and raises."""

    def run(rewrite: Rewrite) -> None:
        raise kind("an invariant is broken")

    return tuple(replace(one, run=run, when=always) if one.name == name else one for one in PIPELINE)


@pytest.mark.parametrize("name", [one.name for one in PIPELINE if one.name not in ("expand",)])
def test_a_pass_that_breaks_leaves_a_reproducer_that_fails_alike(
    call: Call, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(pass_pipeline, "PIPELINE", with_broken(name, VerifyError))
    code, _, err = call("opt graph.txt --config config.yaml")
    assert code == 2
    found = re.search(r"reproducer: autograph-rewrite (opt .*)", err)
    assert found is not None, err
    again, _, said = call(found[1])
    assert again == 2
    assert [line for line in said.splitlines() if not line.startswith("reproducer")] == [
        line for line in err.splitlines() if not line.startswith("reproducer")
    ]
    assert f"while running pass '{name}'" in said


def test_a_users_mistake_leaves_no_reproducer(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_pipeline, "PIPELINE", with_broken("propagate", PassError))
    _, _, err = call("opt graph.txt --config config.yaml")
    assert "reproducer" not in err


def test_rewrite_leaves_a_reproducer_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_pipeline, "PIPELINE", with_broken("merge-instances", KeyError))
    code, _, err = call("rewrite graph.txt --config config.yaml -o new.ar")
    assert code == 2
    assert re.search(r"reproducer: autograph-rewrite opt \S+graph.txt --plan \S+ --stop-after merge-instances", err)


def test_a_selection_keeps_the_order_and_what_each_needs() -> None:
    assert [one.name for one in select(PIPELINE, stop_after="propagate", skip=["shard-variables"])] == [
        "slice-batch-inputs",
        "eliminate-dead-code",
        "bind-captures",
        "partition-model",
        "place-variables",
        "mark-replicas",
        "propagate",
    ]
