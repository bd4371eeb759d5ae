"""What users have from earlier versions still works: public names, options and keys; plans, .ar files, builders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite import strategies
from autograph_rewrite.resolve.given_plan import FOUND_ANEW
from tests.support.paths import GOLDEN
from tests.support.public_surface import surface
from tests.support.training import learnt

KEPT = GOLDEN / "kept"
ONE_NODE = KEPT / "before_one_node"
"""Of the commit before a variable that is cut became one node; the model has two variables and a slot."""
PLANS = sorted(path.name for path in (*KEPT.glob("*.yaml"), *KEPT.glob("*.pb")))


def is_of_parts(name: str) -> bool:
    """Return whether a plan has an edge for each shard of what is one variable over the replicas today."""
    return name.startswith("shards")


def test_no_name_option_or_key_that_users_have_is_gone() -> None:
    before = (GOLDEN / "public_surface.txt").read_text(encoding="utf-8").splitlines()
    now = set(surface())
    assert [line for line in before if line not in now] == []


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_an_earlier_version_is_carried_out(name: str) -> None:
    item = ar.GraphItem.load(KEPT / "regression.ar")
    plan = ar.Plan.load(KEPT / name)
    new = ar.rewrite(item, plan)
    assert is_of_parts(name) or new.report.plan.edges == plan.edges
    assert set(new.variables) >= set(item.variables)


@pytest.mark.parametrize("name", [name for name in PLANS if is_of_parts(name)])
def test_a_plan_with_an_edge_for_each_shard_means_the_same(name: str) -> None:
    item, plan = ar.GraphItem.load(KEPT / "regression.ar"), ar.Plan.load(KEPT / name)
    now = ar.rewrite(item, plan).report.plan.edges
    parts = [edge for edge in plan.edges if "/part_" in edge.owner]
    assert [edge for edge in plan.edges if edge in now] == [edge for edge in plan.edges if edge not in parts]
    assert parts
    assert {edge.owner.partition("/part_")[0] for edge in parts} <= {edge.owner for edge in now}
    report = ar.verify(item, plan, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("path", sorted(ONE_NODE.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_plan_of_variables_that_were_cut_apart_cuts_them_alike_and_trains_as_one_device(path: Path) -> None:
    item, plan = ar.GraphItem.load(ONE_NODE / "item.ar"), ar.Plan.load(path)
    task = {"task": 0} if plan.workers > 1 or "/job:" in plan.devices[0] else {}
    new = ar.rewrite(item, plan, **task)
    assert new.report.plan.residences == plan.residences
    assert new.report.plan.version > plan.version == 1
    kept = [edge.value for edge in new.report.plan.edges] == [edge.value for edge in plan.edges]
    assert (FOUND_ANEW in new.report.plan.notes) is not kept
    if not task:
        report = ar.verify(item, plan, steps=3)
        assert report.ok, str(report)


def test_an_impossible_lowering_in_a_plan_of_an_earlier_version_is_refused_at_its_line() -> None:
    item, text = ar.GraphItem.load(KEPT / "regression.ar"), (KEPT / "mirrored.yaml").read_text(encoding="utf-8")
    assert "lowering: collective_reduce" in text
    plan = ar.Plan.from_yaml(text.replace("lowering: collective_reduce", "lowering: slice"), name="p.yaml")
    with pytest.raises(ar.PlanError, match=r"p\.yaml:\d+: .* cannot be lowered as slice"):
        ar.rewrite(item, plan)


@pytest.mark.parametrize("name", ["fsdp", "partitioned_ps", "model_axis"])
def test_a_rewritten_graph_of_an_earlier_version_trains_as_one_device(name: str) -> None:
    item, new = ar.GraphItem.load(ONE_NODE / "item.ar"), ar.GraphItem.load(ONE_NODE / f"{name}.ar")
    feeds = [{"x": np.random.default_rng(k).normal(size=(5, 6))} for k in range(3)]
    for got, wanted in zip(learnt(new, feeds), learnt(item, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


def test_both_forms_of_a_kept_plan_are_one_value() -> None:
    for name in {path.stem for path in KEPT.glob("*.pb")}:
        assert ar.Plan.load(KEPT / f"{name}.yaml") == ar.Plan.load(KEPT / f"{name}.pb")


def test_a_kept_builder_builds_a_plan_that_trains_to_the_same_values() -> None:
    item = ar.GraphItem.load(KEPT / "regression.ar")
    ar.allow_code(KEPT / "mine.py")
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": f"{KEPT / 'mine.py'}:HalvedOnServers"}}
    plan = ar.build_plan(item, config)
    assert any(len(request.sizes) == 2 for request in plan.variables)
    report = ar.verify(item, config, steps=2)
    assert report.ok, str(report)
    assert np.isfinite(report.max_error)


def test_a_kept_builder_may_extend_one_of_ours() -> None:
    item = ar.GraphItem.load(KEPT / "regression.ar")
    ar.allow_code(KEPT / "mine.py")
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": f"{KEPT / 'mine.py'}:AsAlways"}}
    assert ar.build_plan(item, config).variables == ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"]}).variables


@pytest.mark.parametrize("name", ["AllReduce", "PS", "PSLoadBalancing", "PartitionedPS", "UnevenPartitionedPS"])
def test_every_builder_is_still_exported_by_its_name(name: str) -> None:
    item = ar.GraphItem.load(KEPT / "regression.ar")
    config = ar.Config.of({"devices": ["CPU:0", "CPU:1"], "strategy": {"name": name}})
    builder = getattr(strategies, name)()
    assert builder.build(item, config) == strategies.STRATEGIES[name].build(item, config)
