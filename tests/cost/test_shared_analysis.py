"""Plans that share an analysis, counts or a division into stages are predicted as each of them is alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.cost.search import Evaluator
from autograph_rewrite.cost.simulate import simulated
from autograph_rewrite.cost.tasks.step import fold
from autograph_rewrite.errors import GraphError
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.parts.messages import Micro
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph
from tests.support.split_models import item
from tests.support.training import make_item, placeholder, variable
from tests.zoo import ZOO

MODES = ("shared", "mirrored")


def plan_of(model: Any, mode: str, strategy: str = "AllReduce", **settings: Any) -> Plan:
    devices = [f"CPU:{i}" for i in range(4)]
    config: Mapping[str, Any] = {"devices": devices, "strategy": {"name": strategy, "variables": mode}}
    return ar.build_plan(model, {**config, **settings})


def assert_alike(evaluator: Evaluator, graph: TrainingGraph, plan: Plan) -> None:
    shared = evaluator.simulate(plan)
    alone = simulated(fold(graph, plan, evaluator.batch), plan, evaluator.hardware, batch=evaluator.batch, events=False)
    assert shared == alone


@pytest.mark.parametrize("mode", MODES)
def test_whatever_number_of_micro_batches_came_before(mode: str) -> None:
    model = ZOO["mlp"].build(optimizer="adam", dtype="float32").item()
    graph = normalise_original(model)
    evaluator = Evaluator(graph, batch=64)
    for count in (1, 4, 2, 3):
        for strategy in ("AllReduce", "PS", "FSDP"):
            assert_alike(evaluator, graph, plan_of(model, mode, strategy, microbatches=count))
    looped = {"microbatches": 4, "accumulation": {"form": "loop"}}
    assert_alike(evaluator, graph, plan_of(model, mode, **looped))


@pytest.mark.parametrize("mode", MODES)
def test_whatever_stages_and_recomputation_came_before(mode: str) -> None:
    model = item(hidden=16)
    graph = normalise_original(model)
    evaluator = Evaluator(graph, batch=64)
    for stages in (2, 4):
        for count in (1, 4, 2):
            section = {"stages": stages, "microbatches": count}
            for strategy in ("AllReduce", "FSDP"):
                assert_alike(evaluator, graph, plan_of(model, mode, strategy, pipeline=section))
            again = {"policy": "sqrt"}
            assert_alike(evaluator, graph, plan_of(model, mode, pipeline=section, remat=again))
    twice = {"stages": 2, "microbatches": 2, "schedule": "interleaved", "circular_repeat": 2}  # four, on two devices
    assert_alike(evaluator, graph, plan_of(model, mode, pipeline=twice))
    for policy in ("none", "sqrt"):
        assert_alike(evaluator, graph, plan_of(model, mode, microbatches=2, remat={"policy": policy}))


def test_more_micro_batches_than_examples_are_refused_after_fewer_were_not() -> None:
    def loss() -> Any:
        return {"loss": tf.reduce_sum((placeholder("x", 8, 3) @ variable("w", np.ones((3, 2)))) ** 2)}

    model = make_item(loss, batch_inputs={"x": 0})
    evaluator, plan = Evaluator(normalise_original(model)), plan_of(model, "mirrored", microbatches=2)
    evaluator.simulate(plan)
    with pytest.raises(GraphError, match="fewer than the 4 x 3 micro-batches"):
        evaluator.simulate(replace(plan, micro=Micro(3)))
