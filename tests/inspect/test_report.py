"""The data of a report: states that can be told from their steps, tables, bytes, and names that cannot break out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.inspect.communication import meetings
from autograph_rewrite.inspect.pass_states import COLUMNS, GraphStates
from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.inspect.report import page
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from tests.inspect.test_profile import rank
from tests.support.small_items import regression

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "__proto__",
    "a\u2028b",
    "/",
    "//a",
    "b//c",
    "/".join(["deep"] * 20_000),
    "long" * 5_000,
)


def data_of(file: Path) -> dict[str, Any]:
    """Return the data of a report by view, as the page reads it."""
    text = file.read_text(encoding="utf-8")
    parts = re.findall(r'<script type="application/json" id="data-([\w-]+)">(.*?)</script>', text, re.DOTALL)
    return {name: json.loads(part) for name, part in parts}


def states_of(data: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Return the nodes of each state by name: texts by column, and the names of producers."""
    names, strings = data["graph"]["names"], data["graph"]["strings"]
    state: dict[str, dict[str, Any]] = {}
    found = []
    for index in range(len(data["graph"]["steps"])):
        step = data[f"step-{index}"]
        inputs = iter(step["inputs"])
        for row, number in enumerate(step["id"]):
            texts = {c: step[c][row] if c == "copies" else strings[step[c][row]] for c in COLUMNS}
            read = [(names[next(inputs)], next(inputs)) for _ in range(step["input_counts"][row])]
            state[names[number]] = {**texts, "inputs": read}
        for number in step["drop"]:
            del state[names[number]]
        found.append(dict(state))
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ar.report(regression(), tmp_path_factory.mktemp("report") / "report.html", CONFIG)


def test_states_are_those_of_the_passes(report: Path) -> None:
    data = data_of(report)
    states = states_of(data)
    steps = data["graph"]["steps"]
    assert [steps[0]["pass"], steps[-1]["pass"]] == ["original", "expand"]
    assert set(states[0]) == {node.name for node in regression().graph}
    assert [len(state) for state in states] == [step["nodes"] for step in steps]
    by_pass = {step["pass"]: state for step, state in zip(steps, states, strict=True)}
    assert by_pass["eliminate-dead-code"]["gradient"]["placement"] == ""
    assert by_pass["propagate"]["gradient"]["placement"] == "partial(sum)"
    assert by_pass["propagate"]["y"]["placement"] == "split(0)"
    assert "gradient/all_reduce" not in by_pass["propagate"]
    assert by_pass["lower-reshards"]["gradient/all_reduce"]["pass"] == "lower-reshards"


def test_copies_are_stacked(report: Path) -> None:
    last = states_of(data_of(report))[-1]
    assert last["y"]["copies"] == last["gradient/all_reduce"]["copies"] == 2
    assert last["y"]["device"] == "CPU:0, CPU:1"
    assert last["y"]["inputs"] == [("x/shard", 0), ("w/Read", 0)] or [n for n, _ in last["y"]["inputs"]][1] == "w/Read"
    assert not [name for name in last if name.startswith("replica_0/")]


def test_what_merges_copies_under_their_name_stands_beside_their_stack() -> None:
    graph = Graph()
    parts = [graph.add("Placeholder", name=f"replica_{i}/loss", attrs={"dtype": dtypes.FLOAT}) for i in (0, 1)]
    graph.add("AddN", [part.output() for part in parts], name="loss")
    states = GraphStates()
    states.keep("expand", graph)
    assert states.names.texts == ["replica_*/loss", "loss"]
    assert [row.copies for row in states.steps[0].put.values()] == [2, 1]


def test_a_pass_that_edits_nothing_takes_no_room(report: Path) -> None:
    data = data_of(report)
    idle = [i for i, step in enumerate(data["graph"]["steps"]) if not (step["added"] or step["changed"])]
    assert any(len(json.dumps(data[f"step-{i}"])) < 300 for i in idle)


def test_the_tables_say_what_comm_and_the_plan_say(report: Path) -> None:
    data, new = data_of(report), ar.rewrite(regression(), CONFIG)
    assert [row["bytes"] for row in data["exchanges"]] == [one.bytes for one in meetings(new)]
    assert [row["bytes"] for row in data["reshards"]] == [edge.bytes for edge in new.report.plan.edges]
    assert data["overview"]["rewrite"]["batch"] == new.report.plan.batch == data["step"]["batch"]
    assert data["overview"]["rewrite"]["exchanged_bytes"] == data["step"]["exchanged_bytes"]
    (row,) = data["variables"]
    assert (row["name"], row["bytes"], row["slots"], row["slot_bytes"]) == (
        "w",
        12,
        [{"name": "w/Momentum", "bytes": 12}],
        12,
    )
    assert (row["residence"], row["devices"]) == ("a copy on each device", ["CPU:0", "CPU:1"])


def test_events_are_those_of_the_simulation(report: Path) -> None:
    events = data_of(report)["step"]["events"]
    found = ar.simulate(regression(), ar.build_plan(regression(), CONFIG), CONFIG).events
    assert [events["names"][i] for i in events["name"]] == [event.name for event in found]
    assert [events["lanes"][i] for i in events["lane"]] == [event.lane for event in found]


def test_a_graph_alone_and_a_rewritten_file_say_what_is_missing(tmp_path: Path) -> None:
    alone = data_of(ar.report(regression(), tmp_path / "alone.html"))
    assert alone["overview"]["rewrite"] is None
    assert [step["pass"] for step in alone["graph"]["steps"]] == ["graph"]
    ar.rewrite(regression(), CONFIG).save(tmp_path / "new.ar")
    as_pb = replace(ar.GraphItem.load(tmp_path / "new.ar"), plan_bytes=None)
    kept = data_of(ar.report(as_pb, tmp_path / "kept.html"))
    assert [note.partition(":")[0] for note in kept["overview"]["notes"]] == [
        "There are no snapshots of the passes",
        "A .pb keeps no plan",
        "There is no original to simulate",
    ]
    assert kept["step"] is None
    told = data_of(ar.report(ar.GraphItem.load(tmp_path / "new.ar"), tmp_path / "told.html"))
    assert [row["value"] for row in told["exchanges"]] == [row["value"] for row in kept["exchanges"]]
    assert {row["for"] for row in told["exchanges"]} == {"w", "step"}


def test_a_distributed_keras_model_has_a_report(tmp_path: Path) -> None:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model = ar.distribute(model, {"devices": ["CPU:0", "CPU:1"]})
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    data = data_of(ar.report(model, tmp_path / "model.html"))
    assert data["overview"]["rewrite"]["replicas"] == 2
    assert len(data["graph"]["steps"]) > 5


def hostile_graph() -> Graph:
    """Return a graph whose names try to break out of the page."""
    graph = Graph()
    for name in HOSTILE:
        graph.insert(Node(graph, name, "Placeholder", "", {"dtype": encode("type", dtypes.FLOAT)}, b""))
    return graph


def test_names_cannot_end_the_data(tmp_path: Path) -> None:
    file = ar.report(ar.GraphItem(hostile_graph()), tmp_path / "hostile.html")
    data = data_of(file)
    assert data["graph"]["names"] == list(HOSTILE)
    text = file.read_text(encoding="utf-8")
    assert "<script>window" not in text
    assert "<img" not in text


def test_a_title_is_text_and_nothing_in_it_is_filled_in() -> None:
    text = page("<!--data--><b>", {"graph": "<!--scripts-->"})
    assert "<title>&lt;!--data--&gt;&lt;b&gt;</title>" in text
    assert '"\\u003c!--scripts-->"' in text


def test_the_page_asks_nobody_for_anything(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r'(?:src|href)="(?!#)[^"]+"', text)


def test_all_ranks_of_a_job_are_in_one_report_and_one_of_them_can_be_chosen(tmp_path: Path) -> None:
    config = {
        "devices": ["CPU:0"],
        "cluster": {"workers": ["127.0.0.1:2221", "127.0.0.1:2222"]},
        "strategy": {"name": "AllReduce"},
    }
    both = data_of(ar.report(regression(), tmp_path / "both.html", config))
    assert [step["pass"] for step in both["graph"]["steps"]][-2:] == ["expand (rank 0)", "expand (rank 1)"]
    places = [{node["device"] for node in state.values()} for state in states_of(both)[-2:]]
    assert any("task:0" in one for one in places[0])
    assert any("task:1" in one for one in places[1])
    alone = data_of(ar.report(regression(), tmp_path / "one.html", config, task=1))
    assert [step["pass"] for step in alone["graph"]["steps"]][-2:] == ["assign-devices", "expand"]
    assert states_of(alone)[-1] == states_of(both)[-1]


def test_a_measured_step_stands_beside_the_predicted_one(tmp_path: Path) -> None:
    file = Profile.of([rank(0), rank(1)]).save(tmp_path / "profile.json")
    data = data_of(ar.report(regression(), tmp_path / "report.html", CONFIG, measured=file))
    measured = data["measured"]
    assert measured["step_seconds"] == pytest.approx(1e-6)
    events = measured["events"]
    lanes = ("CPU:0", "CPU:0 exchanges", "not in the graph")
    assert set(events["lanes"]) == {f"rank {number} {lane}" for number in (0, 1) for lane in lanes}
    assert {events["kinds"][kind] for kind in events["kind"]} == {"compute", "exchange", "other"}
    assert max(start + length for start, length in zip(events["start"], events["seconds"], strict=True)) <= 1.1
    assert [row["rank"] for row in measured["devices"]] == [0, 1]
    assert all(row["predicted"]["compute"] > 0 for row in measured["devices"])
    assert data["step"]["batch"] == 8  # what was measured
    assert data["step"]["events"]["lanes"]


def test_the_figures_of_the_page_are_those_of_plan_comm_and_simulate(report: Path) -> None:
    data, item = data_of(report), regression()
    new = ar.rewrite(item, CONFIG)
    step = ar.simulate(item, CONFIG)
    exchanged = {
        data["overview"]["rewrite"]["exchanged_bytes"],
        sum(row["bytes"] for row in data["exchanges"] if row["role"] == "exchange"),
        sum(one.bytes or 0 for one in meetings(new, new.report.plan) if one.role == "exchange"),
        data["step"]["exchanged_bytes"],
        step.exchanged_bytes,
    }
    assert len(exchanged) == 1
    assert data["step"]["step_seconds"] == step.step_seconds
    assert data["step"]["peak_bytes"] == step.peak_bytes
    assert len(data["overview"]["rewrite"]["devices"]) == new.report.plan.replicas
    assert data["overview"]["graph"]["variables"] + data["overview"]["graph"]["slots"] == len(item.variables)
    assert data["overview"]["graph"]["variables"] == len(data["variables"])


def test_the_cost_of_scopes_adds_up_to_the_devices(report: Path) -> None:
    data = data_of(report)
    scopes, first = data["cost"]["scopes"], data["step"]["devices"][0]
    outermost = [at for at, depth in enumerate(scopes["depth"]) if depth == 0]
    assert sum(scopes["seconds"][at] for at in outermost) == pytest.approx(first["busy_seconds"])
    assert sum(scopes["peak_bytes"][at] for at in outermost) == first["peak_bytes"]
    assert sum(scopes["exchanged_bytes"][at] for at in outermost) == data["step"]["exchanged_bytes"]
    assert first["busy_seconds"] <= data["step"]["step_seconds"]
    assert len(data["cost"]["levers"]) == 3


def test_a_page_says_whether_the_rewrite_is_right_or_that_nobody_has_looked(tmp_path: Path, report: Path) -> None:
    assert data_of(report)["verified"] is None
    found = data_of(ar.report(regression(), tmp_path / "verified.html", CONFIG, verify=True))["verified"]
    assert found["ok"]
    assert {row["name"] for row in found["rows"]} >= {"w", "loss"}
    with pytest.raises(ar.GraphError, match="nothing to verify"):
        ar.report(regression(), tmp_path / "original.html", verify=True)
