"""Offload: values go to the host's memory and come back before gradients read them; on CPUs nothing moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.passes import rematerialize
from autograph_rewrite.resolve.remat.policies import OFFLOAD_ATTR
from tests.passes.rematerialize.test_rematerialize import LOOP, MICRO, MODELS, ONE, SMALL, TWO, assert_same, rewritten
from tests.support.recomputed import chain, executed
from tests.support.training import make_item

GPU, GPUS = {"devices": ["GPU:0"]}, {"devices": ["GPU:0", "GPU:1"]}
NAMES = {"policy": "none", "offload": "names", "names": [r"layer_[258]/act"]}
AUTO = {"policy": "none", "offload": "auto"}
SEGMENTS = {"policy": "every:3", "offload": "auto"}


def pairs(new: ar.GraphItem) -> list[tuple[Node, Node]]:
    """Return what is in the host's memory, and what comes back."""
    away = [node for node in new.graph if OFFLOAD_ATTR in node.attrs]
    return [(node, use.node) for node in away for use in node.output().uses]


@pytest.mark.parametrize("remat", [NAMES, AUTO, SEGMENTS], ids=["names", "auto", "segments"])
def test_values_are_on_the_host_until_an_upstream_gradient_is_there(remat: Mapping[str, Any]) -> None:
    new = rewritten(make_item(chain(12)), GPUS, remat)
    count = len(new.report.recomputed.offloaded)
    assert count >= 3
    assert f"offloaded: {count} values are in the host's memory" in str(new.report)
    found = pairs(new)
    assert len(found) == count * len(GPUS["devices"])
    for away, back in found:
        value = away.inputs[0]
        assert (away.device.endswith("CPU:0"), "GPU" in back.device) == (True, True)
        assert back.device == value.node.device
        assert any("gradients" in one.name for one in ancestors(back.controls))
        later = [use.node for use in value.uses if use.node is not away and use.node in descendants(back.controls)]
        assert not [node.name for node in later if node.op not in ("Shape", "ShapeN")]  # all of them read what is back


def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPUs count as accelerators, so that there is something to run."""
    monkeypatch.setattr(rematerialize, "is_host", lambda device: False)


@pytest.mark.parametrize("config", [ONE, TWO, MICRO, LOOP], ids=["one", "two", "micro", "loop"])
def test_what_was_away_is_what_it_was(config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)
    item = make_item(chain(12))
    for remat in (AUTO, SEGMENTS):
        new = rewritten(item, config, remat)
        assert new.report.recomputed.offloaded
        assert_same(item, new, SMALL)
    assert executed(new, SMALL[0])["Snapshot"] >= 2 or config is LOOP


@pytest.mark.parametrize("name", MODELS)
def test_models_whose_activations_were_away_train_as_they_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus(monkeypatch)
    forward, given = MODELS[name]
    item = make_item(forward)
    assert_same(item, rewritten(item, ONE, AUTO), given)


def test_offloading_by_names_needs_names() -> None:
    with pytest.raises(ConfigError, match=r"remat\.offload: names needs remat\.names"):
        ar.Config.of({**GPU, "remat": {"policy": "none", "offload": "names"}})


def test_plans_say_what_is_offloaded() -> None:
    plan = ar.build_plan(make_item(chain(12)), {**GPU, "remat": NAMES})
    assert plan.remat is not None
    assert ar.Plan.from_yaml(plan.to_yaml()).remat == plan.remat
