"""budget:SIZE beside every set of activations that can be kept, on small graphs: as few FLOPs, as low a peak."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import PlanError
from autograph_rewrite.passes import rematerialize
from autograph_rewrite.resolve.remat import budget
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.policies import connected
from autograph_rewrite.resolve.remat.segments import segments_of
from autograph_rewrite.resolve.remat.step_memory import StepMemory
from tests.passes.rematerialize.test_rematerialize import ONE, assert_same
from tests.support.dags import DAGS, Forward
from tests.support.training import make_item, placeholder, variable

BATCH = 512
SHARES = (0.0, 0.1, 0.25, 0.4, 0.6, 0.8)


def uneven(layers: int, seed: int) -> Forward:
    """Return a chain whose layers differ in size."""
    dice = random.Random(seed)
    widths = [4, *(dice.choice((4, 8, 12, 16)) for _ in range(layers))]

    def forward() -> Any:
        h = placeholder("x", None, 4)
        y = placeholder("y", None, widths[-1])
        for i, (inner, outer) in enumerate(itertools.pairwise(widths)):
            weights = np.random.default_rng(i).normal(size=(inner, outer)) * 0.4
            h = tf.tanh(h @ variable(f"w{i}", weights))
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    return forward


CHAINS = {f"chain_{layers}": uneven(layers, layers) for layers in (6, 9, 11)}
GRAPHS = {**DAGS, **CHAINS}


def asked_of(item: ar.GraphItem, monkeypatch: pytest.MonkeyPatch) -> tuple[Activations, StepMemory]:
    """Return what the choice for a budget is made of; nothing is edited."""
    found: list[Any] = []

    def stop(*given: Any) -> None:
        found.extend(given)
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(rematerialize, "choose", stop)
        with pytest.raises(InterruptedError):
            ar.rewrite(item, {**ONE, "remat": {"policy": "budget:1TiB"}}, batch=BATCH)
    return found[0], found[1]


def every_way(acts: Activations, memory: StepMemory) -> list[tuple[int, float]]:
    """Return peak and FLOPs for each set of the values that gradients read: what is left falls apart into segments."""
    read = [node for node in acts.forward if node in acts.repeatable and acts.is_kept_today(node)]
    values = list(dict.fromkeys(root_of(node) for node in read))
    assert 5 <= len(values) <= 12
    found = []
    for keeps in itertools.product((False, True), repeat=len(values)):
        parts = connected(acts, set(itertools.compress(values, keeps)))
        segments, _ = segments_of(acts, parts, only_saving=False)
        nodes = [[acts.state.graph.nodes[name] for name in segment.nodes] for segment in segments]
        found.append((memory.peak(nodes), sum(segment.added_flops for segment in segments)))
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_no_other_set_that_fits_adds_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(GRAPHS[name])
    acts, memory = asked_of(item, monkeypatch)
    ways, plain = every_way(acts, memory), memory.peak(())
    least = min(peak for peak, _ in ways)
    assert least < 0.9 * plain
    for share in SHARES:
        limit = int(least + share * (plain - least))
        new = ar.rewrite(item, {**ONE, "remat": {"policy": f"budget:{limit}"}}, batch=BATCH)
        assert new.report.recomputed.peaks.after <= limit
        spent = sum(segment.added_flops for segment in new.report.recomputed.segments)
        assert 0 < spent <= 1.05 * min(flops for peak, flops in ways if peak <= limit)
    with pytest.raises(PlanError, match=r"at least [\d,]+ B") as caught:
        ar.rewrite(item, {**ONE, "remat": {"policy": "budget:1"}}, batch=BATCH)
    assert f"at least {least:,} B" in str(caught.value)  # with which it was rewritten above: SHARES begin with 0


@pytest.mark.parametrize("name", GRAPHS)
def test_the_search_on_graphs_of_many_activations_is_near_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acts, memory = asked_of(make_item(GRAPHS[name]), monkeypatch)
    plain = memory.peak(())
    with pytest.raises(PlanError) as caught:
        budget.choose(acts, memory, 1, "")
    least = int(str(caught.value).partition("budget to ")[2].partition(" ")[0])
    for share in SHARES:
        limit = int(least + share * (plain - least))
        best = budget.choose(acts, memory, limit, "")
        with monkeypatch.context() as patch:
            patch.setattr(budget, "FEW", 0)
            found = budget.choose(acts, memory, limit, "")
        assert found.peak <= limit
        assert best.flops <= found.flops <= 1.15 * best.flops


@pytest.mark.parametrize("name", ["u_net", "gates", "two_heads"])
def test_what_is_chosen_trains_to_the_same_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(GRAPHS[name])
    rng, inputs = np.random.default_rng(0), {one.name: one.shape[1] for one in item.inputs.values()}
    _, memory = asked_of(item, monkeypatch)
    new = ar.rewrite(item, {**ONE, "remat": {"policy": f"budget:{int(0.75 * memory.peak(()))}"}}, batch=BATCH)
    assert new.report.recomputed.segments
    assert_same(item, new, [{key: rng.normal(size=(6, width)) for key, width in inputs.items()}])
