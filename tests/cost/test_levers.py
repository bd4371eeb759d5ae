"""Levers: what a step takes most of, and which other plan would change it."""

from __future__ import annotations

import pytest

from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.levers import levers
from autograph_rewrite.cost.search import Evaluator
from autograph_rewrite.cost.simulate import SimulatedStep, simulate, simulated
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.cost.tasks.step import fold
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies import STRATEGIES, named_builder
from tests.zoo import ZOO


def step_of(name: str, batch: int | None = None) -> tuple[SimulatedStep, Config]:
    config = Config.of({"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}})
    item = normalise_original(ZOO[name].build(optimizer="adam", dtype="float32").item())
    return simulate(item, named_builder(config).build(item, config), config, batch=batch), config


@pytest.mark.parametrize("name", ["mlp", "language_model"])
@pytest.mark.parametrize("strategy", ["FSDP", "Parallax", "PS"])
def test_a_plan_that_shares_an_analysis_is_predicted_as_alone(name: str, strategy: str) -> None:
    step, config = step_of(name)
    plan = STRATEGIES[strategy].build(step.folded.item, config)
    shared = Evaluator.after(step).simulate(plan)
    alone = simulated(fold(step.folded.item, plan), plan, step.hardware, events=False)
    assert (shared.step_seconds, shared.peak_bytes) == (alone.step_seconds, alone.peak_bytes)
    assert (shared.moved_bytes, shared.exchanged_bytes) == (alone.moved_bytes, alone.exchanged_bytes)


def test_the_first_plan_that_helps_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    step, config = step_of("language_model", batch=2)
    tried: list[Plan] = []
    run = Evaluator.simulate

    def counted(evaluator: Evaluator, plan: Plan) -> Simulation:
        tried.append(plan)
        return run(evaluator, plan)

    monkeypatch.setattr(Evaluator, "simulate", counted)
    said = levers(step, config)
    assert "With FSDP it would need" in said[-1]
    assert [plan.strategy for plan in tried if plan.strategy == "FSDP"] == ["FSDP"]
    assert all(plan.remat is None for plan in tried)
