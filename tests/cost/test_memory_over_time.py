"""`simulate --memory`: bytes over time before and after recomputation, and who holds them at the peak."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.tools import cli
from tests.support.recomputed import chain
from tests.support.training import make_item

PIPELINE = {
    "devices": ["CPU:0", "CPU:1"],
    "strategy": {"name": "Pipeline"},
    "pipeline": {"stages": 2, "microbatches": 4},
}


@pytest.mark.parametrize("config", [{"devices": ["CPU:0"]}, {"devices": ["CPU:0", "CPU:1"]}, PIPELINE])
def test_who_holds_memory_at_the_peak_adds_up_to_it(config: dict[str, Any]) -> None:
    item = make_item(chain(12, 16))
    for remat in ("none", "sqrt"):
        plan = ar.build_plan(item, {**config, "remat": {"policy": remat}})
        for one in ar.simulate(item, plan, batch=256).devices:
            assert sum(nbytes for _, nbytes in one.holders) == pytest.approx(one.peak_bytes, rel=0.02)
            assert max(nbytes for _, nbytes in one.memory) == one.peak_bytes
            assert dict(one.holders).keys() >= {"variables"}


def test_the_verb_draws_both_and_writes_them_as_data(tmp_path: Path) -> None:
    make_item(chain(12, 16)).save(tmp_path / "g.ar")
    (tmp_path / "c.yaml").write_text("devices: [CPU:0]\nremat: {policy: sqrt}\n")
    options = ["simulate", str(tmp_path / "g.ar"), "--config", str(tmp_path / "c.yaml"), "--batch", "512", "--memory"]
    assert cli.main([*options, str(tmp_path / "m.svg")]) == 0
    words = " ".join(ElementTree.parse(tmp_path / "m.svg").getroot().itertext())
    assert "at the peak, before" in words
    assert "at the peak, after" in words
    assert cli.main([*options, str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    before, after = (found[how]["devices"][0] for how in ("before", "after"))
    assert after["peak_bytes"] < 0.7 * before["peak_bytes"]
    assert {"holder", "bytes"} == set(before["at_peak"][0])
    assert any("layer_" in one["holder"] for one in before["at_peak"])
    assert cli.main([*options, str(tmp_path / "m.txt")]) == 2
