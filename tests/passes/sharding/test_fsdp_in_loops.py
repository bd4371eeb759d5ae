"""FSDP with micro-batches or stages in a loop: a stage holds its shards, and the certificate follows the loop."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.support.staged import MODELS, assert_alike, feed, staged_item, train

FOUR = [f"CPU:{i}" for i in range(4)]


@lru_cache
def made(name: str) -> tuple[GraphItem, list[str]]:
    return staged_item(MODELS[name])


def staged(cuts: list[str], form: str) -> dict[str, Any]:
    pipeline = {"stages": 2, "microbatches": 2, "boundaries": cuts[1:2], "form": form}
    return {"devices": FOUR, "mesh": {"data": 2}, "strategy": {"name": "FSDP"}, "pipeline": pipeline}


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_stages_in_a_loop_train_on_shards_as_one_device(name: str) -> None:
    item, cuts = made(name)
    new, feeds = ar.rewrite(item, staged(cuts, "loop")), [feed(item, step) for step in range(3)]
    assert_alike(train(new, feeds), train(item, feeds))
    report = ar.verify(item, staged(cuts, "loop"), steps=2)
    assert report.ok, str(report)


def test_a_stage_in_a_loop_holds_its_shards() -> None:
    item, cuts = made("mlp")
    unrolled, looped = (ar.rewrite(item, staged(cuts, form)).report.held for form in ("unrolled", "loop"))
    assert looped == unrolled
    assert min(looped.values()) > 0


@pytest.mark.parametrize("mode", ["shared", "mirrored"])
def test_shards_are_certified_where_micro_batches_are_a_loop(mode: str) -> None:
    item, _ = made("mlp")
    strategy = {"name": "FSDP", "variables": mode}
    report = ar.verify(
        item, {"devices": FOUR[:2], "strategy": strategy, "microbatches": 2, "accumulation": {"form": "loop"}}, steps=2
    )
    assert report.ok, str(report)
