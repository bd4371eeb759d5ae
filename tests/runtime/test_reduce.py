"""`reduce` shrinks the graphs of seeded miscompilations, and what it leaves still fails."""

from __future__ import annotations

import pytest

import autograph_rewrite as ar
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.runtime.reduce.reduce import Judge, reduce
from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.miscompilations import FIRST, MISCOMPILATIONS, Miscompilation

SMALL = 25
SHRUNK = ("gradient_scaled", "update_dropped", "contribution_lost", "size_of_one_replica")


@pytest.mark.parametrize("one", [one for one in MISCOMPILATIONS if one.kind in SHRUNK], ids=str)
def test_a_seeded_miscompilation_is_shrunk_and_still_fails(one: Miscompilation) -> None:
    draw, compiler = one.draw, one.compiler()
    found = reduce(draw.item, draw.settings, observers=[compiler])
    assert len(found.item.graph) < SMALL < found.before
    assert Judge(draw.settings, 1, 0, None, 1e-5, [compiler]).kind(found.item, found.kind) == found.kind
    assert Judge(draw.settings, 1, 0, None, 1e-5, []).kind(found.item) == ""


def test_a_good_rewrite_is_not_shrunk() -> None:
    draw = Draw("counted", "own", "shared2")
    found = ar.reduce(draw.item, draw.settings)
    assert (found.kind, found.item) == ("", draw.item)


def test_a_plan_is_refused() -> None:
    draw = Miscompilation("counted", "own", "shared2", "operands_swapped", FIRST).draw
    with pytest.raises(ConfigError, match="a plan is of one graph"):
        ar.reduce(draw.item, draw.plan)
