"""Pipeline stages whose variables live on servers: each is on its server, and the numbers are those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import PlanError
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.preconditions import require_no_servers
from tests.matrix.run import FLOOR, compare, distributed, truth
from tests.support.covering import covering
from tests.support.small_items import regression
from tests.support.staged import MODELS, assert_alike, feed, staged_item, train
from tests.zoo import ZOO, Options

SERVED = ("PS", "PSLoadBalancing", "PartitionedPS")
SIZES = (12, 7, 13)


def config(strategy: str, devices: int, **pipeline: Any) -> dict[str, Any]:
    asked = {"stages": 2, "microbatches": 3, **pipeline}
    return {"devices": [f"CPU:{i}" for i in range(devices)], "strategy": {"name": strategy}, "pipeline": asked}


@pytest.fixture(autouse=True)
def _certified(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pass_pipeline.rewrite

    def certified(asked: Any, **options: Any) -> Any:
        return plain(replace(asked, certificate=asked.certificate or Certificate(strict=True)), **options)

    monkeypatch.setattr(pass_pipeline, "rewrite", certified)


@pytest.mark.parametrize(
    ("made", "strategy", "devices"),
    covering([("mlp", "unrolled"), ("mlp", "loop"), ("tied", "unrolled")], SERVED, [2, 4]),
)
def test_stages_of_served_variables_train_as_one_device(made: tuple[str, str], strategy: str, devices: int) -> None:
    model, form = made
    item, cuts = staged_item(MODELS[model])
    feeds = [feed(item, step) for step in range(3)]
    boundaries = {"boundaries": cuts[:1]} if form == "loop" else {}
    new = ar.rewrite(item, config(strategy, devices, form=form, **boundaries))
    assert_alike(train(new, feeds), train(item, feeds), 1e-9)
    homes = new.report.homes
    placed = {node.name: node.device for node in new.graph if node.op == "VarHandleOp"}
    assert homes.keys() & placed.keys()
    assert {name: placed[name] for name in homes if name in placed} == {n: homes[n] for n in homes if n in placed}


@pytest.mark.parametrize(
    ("model", "strategy", "devices"),
    [
        ("language_model", "Parallax", 2),
        ("language_model", "PartitionedPS", 4),
        ("function_sparse", "Parallax", 4),
        ("keras_two_inputs", "PSLoadBalancing", 2),
    ],
)
def test_looked_up_rows_functions_and_models_train_as_one_device(model: str, strategy: str, devices: int) -> None:
    options = Options(optimizer="adam")
    actual, _ = distributed(ZOO[model].build(options), config(strategy, devices), SIZES)
    errors = dict(compare(actual, truth(model, options, SIZES), FLOOR["float64"]))
    assert max(errors.values()) < 1e-9, errors


def test_losing_an_update_would_be_noticed() -> None:
    item, _ = staged_item(MODELS["mlp"])
    feeds = [feed(item, step) for step in range(3)]
    few, expected = train(item, feeds[:2]), train(item, feeds)
    assert max(np.abs(few[1][name] - expected[1][name]).max() for name in expected[1]) > 1e-3


def test_servers_and_stages_in_several_processes_are_refused_with_the_reason() -> None:
    item, _ = staged_item(MODELS["mlp"])
    plan = ar.build_plan(item, config("PS", 2))
    assert plan.pipeline is not None
    require_no_servers(plan)
    hosts = tuple(f"/job:worker/task:{i}/device:CPU:0" for i in range(2))
    driven = replace(plan, devices=hosts[:1], pipeline=replace(plan.pipeline, devices=hosts))
    with pytest.raises(PlanError, match="one session drives all stages"):
        require_no_servers(driven)


def test_servers_and_a_model_axis_over_several_processes_are_refused_with_the_reason() -> None:
    cluster = {"workers": ["127.0.0.1:1", "127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    mesh = {"devices": ["CPU:0"], "mesh": {"data": 1, "model": 2}, "cluster": cluster, "strategy": {"name": "PS"}}
    with pytest.raises(PlanError, match="one session drives all model axes"):
        ar.rewrite(regression(), mesh, task=0)


def test_a_pipeline_of_served_variables_can_be_simulated() -> None:
    item, _ = staged_item(MODELS["mlp"])
    assert "bubble" in str(ar.simulate(item, ar.build_plan(item, config("PSLoadBalancing", 2)), batch=24))
