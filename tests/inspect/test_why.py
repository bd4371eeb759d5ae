"""A value knows its placement, what it is converted to, and the chain of reasons from the batch to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.dump import dump
from autograph_rewrite.inspect.why import why
from autograph_rewrite.ir.attr_inference import closest
from autograph_rewrite.tools import cli
from tests.support.golden_text import check_golden
from tests.support.small_items import regression

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rewritten regression: as an archive, as a .pb, and its plan."""
    folder = tmp_path_factory.mktemp("rewritten")
    new = ar.rewrite(regression(), CONFIG)
    new.save(folder / "new.ar")
    (folder / "new.pb").write_bytes(new.graph_bytes)
    new.report.plan.save(folder / "plan.yaml")
    return folder


@pytest.mark.parametrize("name", ["gradient", "update", "loss"])
def test_the_chain_of_a_value_is_as_it_was(name: str, saved: Path) -> None:
    check_golden(f"why_{name}.txt", str(why(saved / "new.ar", name)))


@pytest.mark.parametrize("format", ["text", "table", "json", "dot"])
def test_dumps_with_placements_and_conversions_are_as_they_were(format: str, saved: Path) -> None:
    check_golden(f"dump_placed.{format}.txt", dump(saved / "new.ar", format, name="gradient|^loss|x"))


def test_an_archive_knows_what_the_item_in_memory_knows(saved: Path) -> None:
    new = ar.rewrite(regression(), CONFIG)
    assert why(new, "gradient").data() == why(saved / "new.ar", "gradient").data()
    assert dump(new) == dump(saved / "new.ar")


def test_an_original_name_stands_for_all_instances_and_a_rewritten_one_for_itself(saved: Path) -> None:
    original, one = why(saved / "new.ar", "gradient"), why(saved / "new.ar", "%replica_1/gradient:0")
    assert original.value is not None
    assert one.value is not None
    assert original.value.devices == ("/device:CPU:0", "/device:CPU:1")
    assert one.value.devices == ("/device:CPU:1",)
    assert original.chain == one.chain


def test_the_chain_goes_from_a_batch_input_to_the_update(saved: Path) -> None:
    chain = why(saved / "new.ar", "update").chain
    assert "batch input" in chain[0].because
    assert chain[-1].value == "update"
    kinds = [step.placement.partition(" by ")[0] for step in chain]
    assert kinds.index("-> split(0)[data]") < kinds.index("partial(sum)[data]") < kinds.index("-> replicated")


def test_what_the_batch_does_not_reach_says_so(saved: Path) -> None:
    reason = why(saved / "new.ar", "w")
    assert reason.chain == ()
    assert "Nothing of the batch reaches it" in str(reason)


def test_a_graph_without_placements_knows_the_conversions_of_its_plan(saved: Path) -> None:
    plan = ar.Plan.load(saved / "plan.yaml")
    reason = why(saved / "new.pb", "gradient", plan)
    assert reason.value is not None
    assert [edge.lowering for edge in reason.value.conversions] == ["collective_reduce"]
    assert "plan.yaml:" in str(reason)
    assert "-> replicated by collective_reduce" in dump(saved / "new.pb", plan=plan)
    assert "Give the .ar" in str(why(saved / "new.pb", "gradient"))


def test_a_variable_stands_for_its_read() -> None:
    item = regression()
    w, slot = item.variables.values()
    named = {"layer/kernel": replace(w, name="layer/kernel"), slot.name: slot}
    new = ar.rewrite(replace(item, variables=named), CONFIG)
    read = why(new, "layer/kernel")
    assert read.data() == why(new, "w/Read").data()
    assert "ReadVariableOp" in read.line
    with pytest.raises(GraphError, match="closest names: layer/kernel"):
        why(new, "layer/kernels")


def test_comm_rewrites_an_original_by_a_configuration_and_refuses_it_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regression().save(tmp_path / "old.ar")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert cli.main(["comm", str(tmp_path / "old.ar")]) == 2
    assert "give --config" in capsys.readouterr().err
    assert cli.main(["comm", str(tmp_path / "old.ar"), "--config", str(tmp_path / "config.json"), "--json"]) == 0
    ar.rewrite(regression(), CONFIG).save(tmp_path / "new.ar")
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["comm", str(tmp_path / "new.ar"), "--json"]) == 0
    assert found == json.loads(capsys.readouterr().out)
    assert found["exchanges"]


def test_a_mistyped_end_of_a_name_is_answered_with_the_names_that_end_so() -> None:
    assert closest("MatMull", ["model/layer/attention/MatMul", "model/Add"]) == (
        "closest names: model/layer/attention/MatMul"
    )


def test_a_name_of_neither_graph_is_refused_with_the_closest(saved: Path) -> None:
    with pytest.raises(GraphError, match="closest names: gradient"):
        why(saved / "new.ar", "gradiant")
    with pytest.raises(GraphError, match="no 'replica_0/gradient:3'"):
        why(saved / "new.ar", "gradient:3")


def test_the_verb_rewrites_an_original_by_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regression().save(tmp_path / "old.ar")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["why", str(tmp_path / "old.ar"), "gradient", "--config", str(tmp_path / "config.json"), "--json"]
    assert cli.main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["value"]["placement"] == "partial(sum)"
    assert said["value"]["conversions"][0]["by"] == "collective_reduce"
    assert said["chain"][-1]["converts"]
