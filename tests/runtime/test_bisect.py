"""`bisect` names the pass and the edge of seeded miscompilations, and finds nothing where nothing is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.check.bisect import bisect, is_explained
from autograph_rewrite.check.side_by_side import Tolerance, TrialSettings
from autograph_rewrite.passes.base.rewriting import Rewrite
from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.miscompilations import MISCOMPILATIONS, Miscompilation
from tests.support.small_items import regression

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}


def quoted(sentence: str) -> Iterator[str]:
    """Yield the nodes that a sentence names, and what they were made for: of `y/block` also `y`."""
    for name in re.findall("'([^']+)'", sentence):
        parts = name.split("/")
        yield from ("/".join(parts[: at + 1]) for at in range(len(parts)))


@pytest.mark.parametrize("one", MISCOMPILATIONS, ids=str)
def test_the_pass_and_a_node_of_a_seeded_miscompilation_are_named(one: Miscompilation) -> None:
    compiler, draw = one.compiler(), one.draw
    found = bisect(draw.item, draw.settings, TrialSettings(2, draw.feeds()), [compiler])
    assert compiler.said
    assert not found.ok
    assert found.made_by == one.behind, str(found)
    named = re.findall(r"[\w/]+", str(found))
    assert {*quoted(compiler.said)} & {one for name in named for one in quoted(f"'{name}'")}, str(found)


@pytest.mark.parametrize("config", ["mirrored2", "shared3", "micro_shared", "loop_shared", "fsdp2"])
def test_nothing_is_found_where_verify_passes(config: str) -> None:
    draw = Draw("counted", "own", config)
    found = ar.bisect(draw.item, draw.settings, steps=2, feeds=draw.feeds())
    assert found.ok, str(found)
    assert not found.made_by


def move(rewrite: Rewrite) -> None:
    """Add one to the gradient."""
    gradient = rewrite.graph.nodes["gradient"].output()
    ones = rewrite.graph.add("OnesLike", [gradient], name="gradient/ones").output()
    rewrite.replace(gradient, rewrite.graph.add("AddV2", [gradient, ones], name="gradient/moved").output())
    ones.node.set_input(0, gradient)


def keep(rewrite: Rewrite) -> None:
    """Edit nothing."""


def test_a_pass_of_the_users_own_is_told_from_the_others() -> None:
    ar.register_pass("keep", keep, after="eliminate-dead-code")
    ar.register_pass("move", move, after="eliminate-dead-code")
    ar.register_pass("keep-again", keep, after="propagate")
    found = ar.bisect(regression(), CONFIG, steps=2)
    assert found.made_by == "move"
    (first,) = found.divergences
    (edge,) = first.edges
    assert (first.node, edge.expected, edge.made_by) == ("update", "gradient:0", "move")


def test_instances_are_a_value_if_they_are_alike_or_blocks_or_contributions() -> None:
    whole, allowed = np.arange(6.0).reshape(3, 2), Tolerance()
    assert is_explained([whole, whole], whole, allowed)
    assert is_explained([whole[:2], whole[2:]], whole, allowed)
    assert is_explained([whole[:, :1], whole[:, 1:]], whole, allowed)
    assert is_explained([whole / 2, whole / 2], whole, allowed)
    assert not is_explained([whole[2:], whole[:2]], whole, allowed)
    assert not is_explained([whole / 2, whole / 2], whole, allowed, alike=True)
    assert not is_explained([whole * 2], whole, allowed)
