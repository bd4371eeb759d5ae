"""A rewrite can be asked what it did, why a node is there, and where replicas meet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.diagnostics.amounts import size
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.communication import Meeting, meetings, report
from autograph_rewrite.inspect.report_view import account_of
from autograph_rewrite.inspect.why import why
from autograph_rewrite.item import GraphItem
from autograph_rewrite.passes.base.report import PassRecord, Report
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from tests.support.covering import covering
from tests.support.golden_text import check_golden
from tests.support.small_items import DEVICES, mirrored, regression
from tests.support.staged import MODELS, staged_item

EDGES = (
    EdgePlan(
        "gradient",
        "partial(sum)",
        "replicated",
        "w",
        "",
        "collective_reduce",
        "float32",
        12,
        7,
        11,
        0,
        0,
        "update reads it",
    ),
    EdgePlan("loss", "partial(sum)", "replicated", "step", "", "add_n", "float32", 4, reason="it is an output"),
    EdgePlan("x", "replicated", "split(0)", "step", "", "slice", "float32", 12, reason="MatMul 'y' reads it"),
    EdgePlan("rows", "split(0)", "replicated", "w", "", "concat", "int64", 2**21, bucket=3, reason="sparse"),
)


def rewritten(edges: tuple[EdgePlan, ...] = EDGES, notes: tuple[Note, ...] = ()) -> GraphItem:
    """Return the mirrored regression with a report, as `ar.rewrite` would."""
    plan = Plan(DEVICES, "mirrored", edges=edges)
    seconds = {"propagate": (0.25, 0), "lower-reshards": (0.5, 7)}
    passes = (
        *(PassRecord(name, took, added, 0) for name, (took, added) in seconds.items()),
        PassRecord("propagate", 0.5, 0, 0),
    )
    return replace(mirrored(), report=Report(plan, passes, notes, 18, 20, 41, 1.5))


def test_an_explanation_is_as_it_was() -> None:
    notes = (Note("sorted", "Sort", "no rule"), Note("again", "Sort", "no rule"), Note("odd", "NoSuchOp", "unknown op"))
    check_golden("explain_mirrored.txt", ar.explain(rewritten(notes=notes)))


def test_a_rewrite_without_exchanges_or_notes_is_explained_too() -> None:
    text = ar.explain(rewritten(edges=()))
    assert "No variable's gradient had to be combined." in text
    assert "no op runs whole because it lacks a rule" in text


def test_two_reductions_of_one_variable_are_pointed_out() -> None:
    assert "More than one reduction: w (2)" in ar.explain(rewritten(edges=(EDGES[0], EDGES[0])))


def test_what_devices_hold_is_told_and_what_is_cut() -> None:
    item, cuts = staged_item(MODELS["mlp"])
    two, four = ["CPU:0", "CPU:1"], [f"CPU:{i}" for i in range(4)]
    whole = size(sum(variable.nbytes for variable in item.variables.values()))

    def lines(**config: object) -> list[str]:
        return ar.explain(ar.rewrite(item, config)).splitlines()

    assert f"Each device holds {whole} of variables and optimizer state, as one device alone." in lines(
        devices=two, strategy={"name": "AllReduce", "variables": "mirrored"}
    )
    (held,) = [line for line in lines(devices=two, strategy={"name": "FSDP"}) if line.startswith("Each device holds")]
    assert held.endswith(f"of variables and optimizer state, of {whole} in all.")
    on_axis = lines(devices=four, mesh={"data": 2, "model": 2}, sharding=[{"match": "w0", "split": [1, 2]}])
    at = next(i for i, line in enumerate(on_axis) if "in blocks on the model axis" in line)
    assert on_axis[at + 1].startswith("  w0")
    assert on_axis[at + 1].endswith(": dimension 1 in 2")
    staged = lines(devices=["CPU:0"], pipeline={"stages": 2, "microbatches": 2, "boundaries": cuts[1:2]})
    first, second = (line for line in staged if line.startswith("  CPU:"))
    assert first.startswith("  CPU:0 computes w0, b0, w1, b1;")
    assert second.startswith("  CPU:1 computes w2, b2, w3, b3;")


@pytest.mark.parametrize(("mode", "stage"), covering(("shared", "mirrored"), (0, 1, 3)))
def test_shards_of_replicas_are_no_blocks_of_the_model_axis(mode: str, stage: int) -> None:
    item, _ = staged_item(MODELS["mlp"])
    over = [{"match": "w.*", "partition": {"over": "data", "stage": stage}}] if stage else []
    mesh = {"mesh": {"data": 2, "model": 2}, "sharding": [{"match": "w0", "split": [1, 2]}]}
    strategy = {"name": "AllReduce", "variables": mode}
    devices = [f"CPU:{i}" for i in range(4)]
    new = ar.rewrite(item, {"devices": devices, "strategy": strategy, "variables": over, **mesh})
    blocks = account_of(new).blocks
    assert blocks["w0"] == "dimension 1 in 2"
    assert "w3" not in blocks, "nothing cuts it on the model axis"


def test_an_original_has_nothing_to_explain() -> None:
    with pytest.raises(GraphError, match="has no report"):
        ar.explain(regression())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (343_441_420, "328 MiB")]
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text


def test_every_node_knows_why_it_is_there() -> None:
    item = rewritten()
    reduce = why(item, "replica_1/gradient/all_reduce")
    assert (reduce.made_by, reduce.origin) == ("lower-reshards", "gradient")
    assert reduce.edges[0].reason == "update reads it"
    assert "edges[0] of the plan: gradient partial(sum) -> replicated by collective_reduce, for variable 'w'" in str(
        reduce
    )
    copy = why(item, "%replica_1/y:0")
    assert (copy.made_by, copy.origin) == ("expand", "y")
    assert "a copy of 'y' for one replica" in str(copy)
    own = why(item, "update")
    assert (own.made_by, own.origin, own.edges) == ("", "", ())
    assert "a node of the original graph" in str(own)
    with pytest.raises(GraphError, match="closest names"):
        why(item, "replica_1/gradent")
    json.dumps(reduce.data())


def test_a_plan_file_gives_the_line_behind_a_node(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan(DEVICES, "mirrored", edges=EDGES).save(path)
    found = why(mirrored(), "replica_0/gradient/all_reduce", Plan.load(path)).edges[0].where
    file, _, line = found.rpartition(":")
    assert file == str(path)
    assert "gradient" in "".join(path.read_text().splitlines(keepends=True)[int(line) - 1 : int(line) + 2])


def test_meetings_list_collectives_and_merges() -> None:
    reduce, merge = meetings(mirrored())
    assert reduce.kind == "CollectiveReduceV2"
    assert reduce.members == ("replica_0/gradient/all_reduce", "replica_1/gradient/all_reduce")
    assert reduce.places == DEVICES
    assert (reduce.order, reduce.keys, reduce.bytes, reduce.owner) == (0, (7, 11), None, "")
    assert (merge.kind, merge.value, merge.order, merge.keys) == ("AddN", "loss", None, None)


def test_a_report_adds_sizes_and_owners_to_meetings() -> None:
    reduce, merge = meetings(rewritten())
    assert (reduce.bytes, reduce.owner) == (12, "w")
    assert (merge.bytes, merge.owner) == (4, "step")
    assert "2 exchanges, 16 bytes per member and step\n" in report([reduce, merge])
    check_golden("comm_mirrored.txt", report(meetings(rewritten())))


def test_a_bucket_is_one_meeting_of_several_values() -> None:
    both = (
        EDGES[0],
        EdgePlan("other", "partial(sum)", "replicated", "v", "", "collective_reduce", "float32", 8, 7, 11),
    )
    reduce = meetings(rewritten(edges=both))[0]
    assert (reduce.value, reduce.bytes, reduce.owner) == ("gradient and 1 more", 20, "w, v")


def test_an_undistributed_graph_has_no_meetings() -> None:
    assert meetings(regression()) == []
    assert "0 exchanges" in report([])


def test_long_lists_of_owners_are_counted_unless_all_are_asked_for() -> None:
    one = Meeting("AddN", "g", "float32", ("a",), ("",), None, None, 4, tuple(f"w{i}" for i in range(201)))
    assert "w0, w1, w2, w3 and 197 more" in report([one])
    assert "w199, w200" in report([one], every=True)
