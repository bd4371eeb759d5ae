"""Auto with a memory limit: its plan fits, when it is simulated and when it runs; what cannot fit says the least."""

from __future__ import annotations

import re

import pytest

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.search import Evaluator
from autograph_rewrite.errors import PlanError
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.strategies import auto
from autograph_rewrite.strategies.auto import RESERVE, Starts
from autograph_rewrite.strategies.per_variable import BUILDERS
from benchmarks.auto_memory import by_hand, measured_peak, simulated
from benchmarks.memory_limits import LIMITED
from benchmarks.mesh_models import MODELS
from tests.support.recomputed import chain
from tests.support.training import make_item

WIDE = LIMITED["wide"]
AUTO = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "Auto"}}


def test_the_plan_fits_and_no_plan_of_a_single_builder_that_fits_is_faster() -> None:
    item = normalise(WIDE.item())
    plan = ar.build_plan(item, {**AUTO, "memory_limit": WIDE.limit})
    found = ar.simulate(item, plan)
    assert found.peak_bytes < WIDE.limit
    hands = list(simulated(item, by_hand(WIDE)))
    plain = [one for config, one in hands if "AllReduce" in str(config) and config.keys() == {"devices", "strategy"}]
    assert [one.peak_bytes > WIDE.limit for one in plain] == [True, True]
    assert found.step_seconds <= min(one.step_seconds for _, one in hands if one.peak_bytes <= WIDE.limit)
    assert plan.strategy == "Auto"


def test_the_plan_fits_when_it_runs() -> None:
    item = WIDE.item()
    assert measured_peak(item, {**AUTO, "memory_limit": WIDE.limit}, WIDE.feeds()) <= WIDE.limit
    plain = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce"}}
    assert measured_peak(item, plain, WIDE.feeds()) > WIDE.limit


def test_activations_are_computed_again_where_nothing_else_helps() -> None:
    item = make_item(chain(12, 16))
    one = {"devices": ["CPU:0"], "strategy": {"name": "Auto"}, "microbatches": 1}
    plain = ar.simulate(item, ar.build_plan(item, {**one, "strategy": {"name": "AllReduce"}})).peak_bytes
    plan = ar.build_plan(item, {**one, "memory_limit": int(0.85 * plain)})
    assert plan.micro is not None or plan.remat is not None
    assert ar.simulate(item, plan).peak_bytes < 0.85 * plain
    new = ar.rewrite(item, plan)
    assert new.report.plan.remat == plan.remat


def test_what_cannot_fit_says_the_least_that_could() -> None:
    item = normalise(WIDE.item())
    with pytest.raises(PlanError, match="memory_limit is 1,048,576 B") as caught:
        ar.build_plan(item, {**AUTO, "memory_limit": "1MiB"})
    wanted = re.findall(r"set memory_limit to (\d+) or more", str(caught.value))[0]
    plan = ar.build_plan(item, {**AUTO, "memory_limit": int(wanted)})
    assert ar.simulate(item, plan).peak_bytes <= int(wanted)


def test_what_the_configuration_says_is_kept() -> None:
    item = normalise(WIDE.item())
    asked = {**AUTO, "memory_limit": "40MiB", "microbatches": 2, "remat": {"policy": "none"}}
    plan = ar.build_plan(item, asked)
    assert (plan.microbatches, plan.remat, plan.pipeline) == (2, None, None)


def test_another_builder_does_not_choose_by_the_limit_and_a_note_says_so() -> None:
    config = {"devices": ["CPU:0", "CPU:1"], "memory_limit": "1GiB"}
    with pytest.warns(UserWarning, match="memory_limit"):
        plan = ar.build_plan(WIDE.item(), config)
    assert any("only the strategy Auto chooses by it" in note for note in plan.notes)
    assert Config.of(config).memory_limit == 2**30


def test_state_is_shared_out_and_stages_compute_activations_again_as_far_as_they_must() -> None:
    item = normalise(make_item(chain(12, 16)))
    staged = {"devices": ["CPU:0", "CPU:1"], "pipeline": {"stages": 2, "microbatches": 2}}
    plain = ar.simulate(item, ar.build_plan(item, staged)).peak_bytes
    limit = int(0.9 * plain / (1 - RESERVE))
    config = Config.of({**AUTO, "memory_limit": limit})
    starts = Starts(item, config, Evaluator(item), {one.name: one for one in BUILDERS}, int(0.9 * plain))
    fits = [start.name for start in starts.fitting()]
    assert any("ZeRO 1 (mirrored)" in start.name for start in starts.found)
    assert any("ZeRO 2 (mirrored)" in start.name for start in starts.found)
    assert any("stages" in name and "remat budget" in name for name in fits)


def test_stages_have_a_model_axis_too_and_no_plan_is_tried_twice() -> None:
    item = normalise(MODELS["layers"].item(32))
    config = Config.of(
        {"devices": [f"CPU:{i}" for i in range(4)], "strategy": {"name": "Auto"}, "memory_limit": "4MiB"}
    )
    starts = Starts(item, config, Evaluator(item), {one.name: one for one in BUILDERS}, 4 * 2**20)
    starts.fitting()
    names = [start.name for start in starts.found]
    assert len(names) == len(set(names))
    (both, *_) = [
        one
        for one in starts.found
        if one.name.startswith("AllReduce (shared), mesh 1 x 2") and one.name.endswith(", 2 stages")
    ]
    assert ar.verify(item, both.candidate.plan).ok


def test_of_a_large_graph_every_number_of_stages_is_tried_and_recomputation_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "FEWEST_FITTING", 60)
    monkeypatch.setattr(auto, "NODES_FITTING", 0)
    item = normalise(make_item(chain(12, 16)))
    config = Config.of({**AUTO, "devices": [f"CPU:{i}" for i in range(4)], "memory_limit": 2**20})
    evaluator = Evaluator(item)
    starts = Starts(item, config, evaluator, {one.name: one for one in BUILDERS}, 7_000)  # which only variables fit
    with pytest.raises(PlanError):
        starts.fitting()
    names = [start.name for start in starts.found]
    assert evaluator.tried <= 60
    assert all(any(f", {count} stages" in name for name in names) for count in (2, 4))
    assert any("remat" in name for name in names)
