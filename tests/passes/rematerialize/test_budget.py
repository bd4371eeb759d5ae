"""budget:SIZE: as little again as lets a step fit, beside every other way; what cannot fit says the least that can."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError, PlanError
from autograph_rewrite.passes import rematerialize
from autograph_rewrite.resolve.remat.budget import Costs, least_flops
from benchmarks.cost import allocated, traced
from benchmarks.memory_limits import LIMITED
from benchmarks.remat import Built
from tests.passes.rematerialize.test_rematerialize import LOOP, MICRO, MIRRORED, ONE, SMALL, TWO, assert_same, rewritten
from tests.support.recomputed import chain, feeds, residual, transformer, two_losses
from tests.support.training import make_item

Layers = Sequence[tuple[int, int]]


def costs_of(layers: Layers) -> Costs:
    """Return a chain of layers, each with the bytes that gradients need of it and its FLOPs."""
    count = len(layers) + 1
    crossing, inside, flops = (np.zeros((count, count)) for _ in range(3))
    for a, b in itertools.combinations(range(count), 2):
        crossing[a, b] = layers[b - 1][0] if b < count - 1 else 0
        again = layers[a : b - 1] if b < count - 1 else layers[a:b]
        inside[a, b], flops[a, b] = sum(kept for kept, _ in again), sum(work for _, work in again)
    return Costs(np.array([0, *(kept for kept, _ in layers)]), np.zeros(count), crossing, inside, flops)


def every_way(layers: Layers) -> Iterator[tuple[int, int]]:
    """Yield peak and FLOPs of every choice of layers that are kept; what is between two of them comes again."""
    for kept in itertools.product((False, True), repeat=len(layers) - 1):
        peak = alive = again = flops = 0
        for i, ((nbytes, work), keeps) in enumerate(zip(layers, (*kept, True), strict=True)):
            if keeps:
                alive += nbytes
                peak, again = max(peak, alive + again), 0
            elif i < len(layers) - 1:
                again += nbytes
                flops += work
        yield peak, flops


@pytest.mark.parametrize("seed", range(12))
def test_on_a_chain_no_other_choice_adds_less(seed: int) -> None:
    dice = random.Random(seed)
    layers = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(dice.randint(4, 16))]
    costs, ways = costs_of(layers), list(every_way(layers))
    peaks = sorted({peak for peak, _ in ways})
    for limit in peaks[:: max(1, len(peaks) // 6)]:
        best = min(flops for peak, flops in ways if peak <= limit)
        parts = least_flops(costs, limit)
        assert parts is not None
        found = sum(costs.flops[part.begin, part.end] for part in parts)
        assert best <= found <= 1.05 * best
    assert least_flops(costs, peaks[0] - 0.5) is None


@pytest.mark.parametrize("number", [4, 40])
def test_on_a_long_chain_little_is_lost_by_following_some_pairs_alone(number: int) -> None:
    dice = random.Random(number)
    costs = costs_of([(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(50)])
    exact = pytest.MonkeyPatch()
    for share in (0.3, 0.6, 0.9):
        limit = share * costs.kept.sum()
        found = least_flops(costs, limit)
        with exact.context() as patch:
            patch.setattr("autograph_rewrite.resolve.remat.budget.SHORT", 1000)
            best = least_flops(costs, limit)
        assert found is not None
        assert best is not None
        spent, least = (sum(costs.flops[part] for part in parts) for parts in (found, best))
        assert spent <= 1.05 * least


def peaks_of(item: ar.GraphItem, **options: Any) -> tuple[int, int]:
    """Return the peak without anything computed again, and the least that there is."""
    with pytest.raises(PlanError) as caught:
        ar.rewrite(item, {**ONE, "remat": {"policy": "budget:1"}}, **{"batch": 512, **options})
    least, without = re.findall(r"at least ([\d,]+) B .*without it ([\d,]+) B", str(caught.value))[0]
    return int(without.replace(",", "")), int(least.replace(",", ""))


def test_what_cannot_fit_says_the_least_that_can() -> None:
    item = make_item(chain(16, 16))
    plain, least = peaks_of(item)
    assert least < 0.6 * plain
    new = ar.rewrite(item, {**ONE, "remat": {"policy": f"budget:{least}"}}, batch=512)
    peaks = new.report.recomputed.peaks
    assert peaks.before == plain
    assert 0.95 * least <= peaks.after <= least
    assert f"static peak of a device, 512 examples in all: {peaks.after:,} B instead of {plain:,} B" in str(new.report)
    with pytest.raises(PlanError, match=r"set budget to \d+ or more"):
        ar.rewrite(item, {**ONE, "remat": {"policy": f"budget:{least * 9 // 10}"}}, batch=512)


def test_nothing_is_computed_again_where_there_is_room() -> None:
    new = ar.rewrite(make_item(chain()), {**ONE, "remat": {"policy": "budget:1GiB"}})
    assert new.report.recomputed.segments == ()
    assert "1,073,741,824 B are allowed" in str(new.report)
    assert "it is taken to have 32 examples in all" in str(new.report)


def test_less_room_costs_more_flops() -> None:
    item = make_item(chain(24, 16))
    plain, least = peaks_of(item)
    spent = []
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        config = {**ONE, "remat": {"policy": f"budget:{int(least + share * (plain - least))}"}}
        made = ar.rewrite(item, config, batch=512).report.recomputed
        assert made.peaks.after <= made.peaks.limit
        spent.append(sum(segment.added_flops for segment in made.segments))
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] > spent[1]


MODELS = {
    "chain": (chain(), SMALL),
    "transformer": (transformer(), feeds((5, 8), (5, 8))),
    "dropout": (transformer(3, "stateless"), feeds((5, 8), (5, 8))),
    "residual": (residual, feeds((5, 5, 3), (3,))),
    "two_losses": (two_losses, SMALL),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_trains_to_the_same_variables(name: str) -> None:
    forward, given = MODELS[name]
    item = make_item(forward)
    plain, least = peaks_of(item, batch=None)
    new = rewritten(item, ONE, {"policy": f"budget:{(plain + least) // 2}"})
    assert new.report.recomputed.segments
    assert_same(item, new, given)


@pytest.mark.parametrize("config", [TWO, MIRRORED, MICRO, LOOP], ids=["shared", "mirrored", "micro", "loop"])
def test_a_budget_is_that_of_one_device(config: Any) -> None:
    item = make_item(chain())
    with pytest.raises(PlanError) as caught:
        ar.rewrite(item, {**config, "remat": {"policy": "budget:1"}}, batch=96)
    least, plain = re.findall(r"at least ([\d,]+) B .*without it ([\d,]+) B", str(caught.value))[0]
    whole, plain = peaks_of(item, batch=96)[0], int(plain.replace(",", ""))
    assert plain < whole or config is TWO  # each has a part of the batch at a time
    assert plain == pytest.approx(whole, rel=0.01) or config is not TWO  # both replicas are on the one device
    new = ar.rewrite(item, {**config, "remat": {"policy": f"budget:{least.replace(',', '')}"}}, batch=96)
    assert new.report.recomputed.segments
    assert_same(item, new, SMALL)


def test_the_peak_is_near_what_the_runtime_records() -> None:
    item = make_item(chain(layers=32, width=16))
    plain, least = peaks_of(item, batch=4096)
    asked = {**ONE, "remat": {"policy": f"budget:{(plain + 2 * least) // 3}"}}
    feed, built = feeds((16,), (16,), (4096,))[0], Built(item, ("out_loss:0",))
    before, after = (ar.rewrite(item, config, batch=4096) for config in (ONE, asked))
    peaks, variables = after.report.recomputed.peaks, sum(one.nbytes for one in item.variables.values())
    assert peaks.after < 0.6 * peaks.before
    # One thread runs the nodes in the same order each time; gradients then wait for their updates.
    longest = [allocated(traced(new, built, feed, serial=True)[0], new) for new in (before, after)]
    assert longest[0] > 0.95 * (peaks.before - variables)
    assert longest[1] > 0.95 * (peaks.after - variables)
    assert longest[1] < 0.5 * longest[0]
    assert longest[0] < 1.6 * (peaks.before - variables)  # with a core to spare, which no test can count on, 1.15


def test_a_simulation_has_the_same_peak() -> None:
    item = make_item(transformer(4))
    plain, least = peaks_of(item)
    asked = {**ONE, "remat": {"policy": f"budget:{(plain + least) // 2}"}}
    peaks = ar.rewrite(item, asked, batch=512).report.recomputed.peaks
    for config, peak in ((ONE, peaks.before), (asked, peaks.after)):
        simulated = ar.simulate(item, ar.build_plan(item, config), batch=512)
        assert simulated.devices[0].peak_bytes == pytest.approx(peak, 0.01)


def test_gradients_of_constants_that_adam_merely_waits_for_hold_nothing() -> None:
    item = LIMITED["deep"].item()
    plain, least = peaks_of(item, batch=None)
    simulated = ar.simulate(item, ar.build_plan(item, ONE)).devices[0]
    assert simulated.peak_bytes == pytest.approx(plain, 0.01)
    assert least < 0.2 * plain


def test_a_budget_is_a_size_and_the_plan_holds_it_in_bytes() -> None:
    item = make_item(chain(8))
    plan = ar.build_plan(item, {**ONE, "remat": {"policy": "budget:512MiB"}})
    assert plan.remat is not None
    assert plan.remat.limit == 512 * 2**20
    assert ar.Plan.from_yaml(plan.to_yaml()).remat == plan.remat
    with pytest.raises(ConfigError, match="must be a size"):
        ar.build_plan(item, {**ONE, "remat": {"policy": "budget:much"}})


def test_what_cannot_wait_is_not_taken_to_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(chain(16, 16))
    _, least = peaks_of(item)
    real = rematerialize.rematerialize
    monkeypatch.setattr(rematerialize, "rematerialize", lambda acts, segments: real(acts, segments[1:]))
    with pytest.raises(PlanError, match="with what can wait for a gradient computed again"):
        ar.rewrite(item, {**ONE, "remat": {"policy": f"budget:{least}"}}, batch=512)
