"""Rematerialisation in pipeline stages: a copy has its original's stage, and runs once per micro-batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, PlanError
from autograph_rewrite.passes import rematerialize
from autograph_rewrite.resolve.stages import assignment
from tests.passes.rematerialize.test_rematerialize import BLOCKS, EVERY, SQRT, assert_same, rewritten
from tests.support.covering import covering
from tests.support.recomputed import chain, feeds, transformer
from tests.support.training import make_item

FEEDS = feeds((4,), (4,), (8, 8))
CUTS = ["layer_3/act", "layer_7/act", "layer_11/act"]
DEVICES = [f"CPU:{i}" for i in range(4)]


def stages(schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    pipeline = {"stages": 4, "microbatches": 4, "boundaries": CUTS, **_form(schedule), **more}
    return {"devices": ["CPU:0"], "pipeline": pipeline}


def _form(schedule: str) -> dict[str, Any]:
    return {"form": "loop"} if schedule == "loop" else {"schedule": schedule}


@pytest.mark.parametrize(
    ("schedule", "remat"), covering(["gpipe", "1f1b", "interleaved", "loop"], [SQRT, EVERY, BLOCKS])
)
def test_stages_that_compute_again_train_to_the_same_variables(schedule: str, remat: Mapping[str, Any]) -> None:
    item = make_item(chain())
    config = stages(schedule)
    if schedule == "interleaved":
        config["pipeline"] |= {"stages": 2, "circular_repeat": 2}
    new = rewritten(item, config, remat)
    assert new.report.recomputed.segments
    assert_same(item, new, FEEDS)


def test_a_transformer_in_stages_that_are_balanced_by_cost() -> None:
    item = make_item(transformer(4, "stateless"))
    config = {"devices": ["CPU:0"], "pipeline": {"stages": 2, "microbatches": 2}}
    new = rewritten(item, config, BLOCKS)
    assert new.report.recomputed.segments
    assert_same(item, new, feeds((5, 8), (5, 8), (4, 4)))


def test_replicas_of_stages() -> None:
    item = make_item(chain())
    config = {"devices": DEVICES[:2], "pipeline": {"stages": 2, "microbatches": 2, "boundaries": CUTS[1:2]}}
    new = rewritten(item, config, SQRT)
    assert new.report.recomputed.segments
    assert_same(item, new, FEEDS)


def copies(new: ar.GraphItem) -> dict[str, list[Any]]:
    """Return the copies of each original, in all micro-batches."""
    found: dict[str, list[Any]] = {}
    for node in new.graph:
        if match := re.search(r"remat/\d+/(.+)", node.name):
            found.setdefault(match[1], []).append(node)
    return found


def stage_of(name: str) -> int:
    return int(re.findall(r"layer_(\d+)", name)[0]) // 4


def test_no_segment_crosses_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`every:3` would have segments of layers 3 to 5, in two stages."""

    def crossing() -> list[tuple[int, ...]]:
        new = ar.rewrite(make_item(chain()), {**stages(), "remat": {"policy": "every:3"}})
        found = [{stage_of(name) for name in segment.nodes} for segment in new.report.recomputed.segments]
        assert found
        return [tuple(one) for one in found if len(one) > 1]

    assert not crossing()
    monkeypatch.setattr(rematerialize, "by_stage", lambda parts, *_: parts)
    assert crossing()


def test_stages_can_be_named() -> None:
    item = make_item(chain())
    new = rewritten(item, stages(devices=DEVICES), {**EVERY, "stages": [0, 2]})
    assert {stage_of(name) for name in copies(new)} == {0, 2}
    assert_same(item, new, FEEDS)
    plan = ar.build_plan(item, {**stages(), "remat": {**EVERY, "stages": [0, 2]}})
    again = ar.Plan.from_yaml(plan.to_yaml())
    assert again.remat is not None
    assert again.remat.stages == (0, 2)
    with pytest.raises(ConfigError, match=r"remat\.stages names stage 4, and the pipeline has 4, from 0 on"):
        ar.build_plan(item, {**stages(), "remat": {**EVERY, "stages": [4]}})
    with pytest.raises(ConfigError, match="there is no pipeline"):
        ar.build_plan(item, {"devices": ["CPU:0"], "remat": {**EVERY, "stages": [0]}})


def test_stages_send_what_they_sent() -> None:
    item = make_item(chain())
    plain, new = (ar.rewrite(item, {**stages(devices=DEVICES), "remat": one}) for one in ({"policy": "none"}, EVERY))

    def sent(one: ar.GraphItem) -> int:
        pairs = {(v.name, node.device) for node in one.graph for v in node.inputs if v.node.device != node.device}
        return len({pair for pair in pairs if "layer_" in pair[0]})

    assert sent(new) == sent(plain)


def test_a_simulation_says_that_stages_hold_less() -> None:
    item = make_item(chain(16, 16))
    peaks = []
    for remat in ({"policy": "none"}, SQRT):
        plan = ar.build_plan(item, {**stages("gpipe", devices=DEVICES), "remat": remat})
        peaks.append([one.peak_bytes for one in ar.simulate(item, plan, batch=4096).devices])
    assert all(again < kept for kept, again in zip(*peaks, strict=True) if kept == max(peaks[0]))
    assert sum(peaks[1]) < 0.8 * sum(peaks[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "loop"])
def test_to_a_budget_each_stage_computes_as_little_again_as_fits_its_device(schedule: str) -> None:
    item = make_item(chain(16, 16))
    config = stages(schedule, devices=DEVICES)
    plain = [one.peak_bytes for one in ar.simulate(item, ar.build_plan(item, config), batch=4096).devices]
    limit = int(0.85 * max(plain))
    new = ar.rewrite(item, {**config, "remat": {"policy": f"budget:{limit}B"}}, batch=4096)
    again = [one.peak_bytes for one in ar.simulate(item, new.report.plan, batch=4096).devices]
    peaks = new.report.recomputed.peaks
    assert peaks.before == pytest.approx(max(plain), rel=0.1)
    assert peaks.after == pytest.approx(max(again), rel=0.1)
    assert peaks.after <= limit
    assert max(again) <= 1.03 * limit
    inside = {stage_of(name) for segment in new.report.recomputed.segments for name in segment.nodes if "layer" in name}
    assert inside <= {i for i, peak in enumerate(plain) if peak > 0.9 * limit}


def test_stages_to_a_budget_train_to_the_same_variables_and_what_does_not_fit_is_refused() -> None:
    item = make_item(chain())
    config = stages("1f1b", devices=DEVICES)
    big = ar.rewrite(item, {**config, "remat": {"policy": "budget:1GiB"}}, batch=4096)
    assert big.report.recomputed.segments == ()
    before = big.report.recomputed.peaks.before
    remat = {"policy": f"budget:{int(0.8 * before)}B"}
    new = ar.rewrite(item, {**config, "remat": remat}, batch=4096)
    assert new.report.recomputed.segments
    assert_same(item, new, FEEDS)
    with pytest.raises(PlanError, match=r"stage \d on .*: a step takes at least"):
        ar.rewrite(item, {**config, "remat": {"policy": f"budget:{before // 8}B"}}, batch=4096)


def test_sizes_of_the_forward_are_measured_there_so_that_it_is_not_kept_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = make_item(chain(16, 16))
    plan = ar.build_plan(item, stages("gpipe", devices=DEVICES))

    def kept_for_gradients() -> int:
        return ar.simulate(item, plan, batch=4096).devices[-1].activation_bytes

    measured = kept_for_gradients()
    monkeypatch.setattr(assignment, "gradients_of", lambda rest, needed, made: {one for one in rest if one in needed})
    assert measured < 0.9 * kept_for_gradients()
