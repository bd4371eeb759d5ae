"""The table of what can be cut into stages says what becomes of each program of the zoo, and most of them can."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import PassError
from tests.support.paths import ROOT
from tests.support.staged import MODELS as STAGED
from tests.support.staged import staged_item
from tests.zoo import ZOO, Options

DOCS = ROOT / "docs" / "strategy" / "pipeline.md"
ROWS = re.findall(r"^\| `([\w/]+)` \| (yes|local|no) \| ?(.*?) ?\|$", DOCS.read_text(), re.MULTILINE)
FLOAT32 = ("cnn_fused", "keras_cnn", "keras_two_inputs")


def item_of(name: str) -> GraphItem:
    if name.startswith("staged/"):
        return staged_item(STAGED[name.removeprefix("staged/")])[0]
    case = ZOO[name]
    built = case.build(Options(dtype="float32" if name in FLOAT32 else "float64"))
    if case.kind == "graph":
        item: GraphItem = built.item()
        return item
    if case.kind == "function":
        return GraphItem.from_function(built.step, *built.specs, batch_inputs=built.batch_inputs)
    return GraphItem.from_keras(built.model, *(_specs(one) for one in built.feeds(0, 8)))


def _specs(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _specs(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_specs(one) for one in value]
    return tf.TensorSpec((None, *np.shape(value)[1:]), np.asarray(value).dtype)


def cut(name: str, batch_norm: str = "sync") -> GraphItem:
    config = {
        "devices": ["CPU:0"],
        "pipeline": {"stages": 4, "microbatches": 8},
        "semantics": {"batch_norm": batch_norm},
    }
    return ar.rewrite(item_of(name), config, verify_each=False)


def test_every_program_has_a_row_and_at_least_seven_of_ten_can_be_cut() -> None:
    assert {name for name, _, _ in ROWS} == {*ZOO, *(f"staged/{name}" for name in STAGED)}
    assert sum(can != "no" for _, can, _ in ROWS) >= 0.7 * len(ROWS)


@pytest.mark.parametrize(("name", "can", "why"), ROWS)
def test_a_program_can_be_cut_if_its_row_says_so(name: str, can: str, why: str) -> None:
    if can == "yes":
        assert cut(name).report.coverage > 0.9
        return
    reason = re.search("`(.*)`", why)
    with pytest.raises(PassError, match=reason[1] if reason else "of the whole batch"):
        cut(name)
    if can == "local":
        assert cut(name, "local").report.coverage > 0.9
