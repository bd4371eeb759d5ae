"""`reduce` shrinks the graphs of seeded miscompilations, and what it leaves still fails."""

from __future__ import annotations

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite.check.reduce import FAILS, Judge, Known, plain, reduce, with_constant_starts, with_simpler
from autograph_rewrite.check.side_by_side import TrialSettings
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.inspect.dump import dump
from autograph_rewrite.ir.types.attrs import encode
from tests.seeded_mistakes.draws import Draw
from tests.seeded_mistakes.miscompilations import FIRST, MISCOMPILATIONS, Miscompilation
from tests.support.small_items import regression

SMALL = 25
SHRUNK = (
    "gradient_scaled",
    "update_dropped",
    "contribution_lost",
    "size_of_one_replica",
    "updates_swapped",
    "gather_along_other_axis",
)


@pytest.mark.parametrize("one", [one for one in MISCOMPILATIONS if one.kind in SHRUNK], ids=str)
def test_a_seeded_miscompilation_is_shrunk_and_still_fails(one: Miscompilation) -> None:
    draw, compiler = one.draw, one.compiler()
    found = reduce(draw.item, draw.settings, TrialSettings(1), [compiler])
    assert len(found.item.graph) < SMALL < found.before
    assert Judge(draw.settings, TrialSettings(1), [compiler]).kind(found.item, found.kind) == found.kind
    assert Judge(draw.settings, TrialSettings(1), []).kind(found.item) == ""
    assert (found.kind == FAILS) == (one.kind == "gather_along_other_axis")


def test_an_optimizer_becomes_a_subtraction_and_a_node_its_operand() -> None:
    item = regression()
    plain = with_simpler(item, "update", Known({}, {}))
    assert plain is not None
    update = plain.graph.nodes["update"]
    assert (update.op, [value.node.name for value in update.inputs]) == ("AssignSubVariableOp", ["w", "gradient"])
    assert "w/Momentum" not in plain.variables
    assert with_simpler(plain, "update", Known({}, {})) is None
    shorter = with_simpler(item, "squares", Known({}, {}))
    assert shorter is not None
    assert "squares" not in shorter.graph
    assert shorter.graph.nodes["loss"].inputs[0].node.name == "y"


def test_colocations_and_nodes_that_only_hand_on_an_order_go_first() -> None:
    item = regression()
    item.graph.nodes["gradient"].set_raw_attr("_class", encode("list(string)", [b"loc:@y"]))
    first = item.graph.add("NoOp", name="between", controls=[item.graph.nodes["update"]])
    item.graph.nodes["train"].remove_control(item.graph.nodes["update"])
    item.graph.nodes["train"].add_control(first)
    simple = plain(item).graph
    assert not any("_class" in node.attrs for node in simple)
    assert [node.name for node in simple.nodes["train"].controls] == ["update"]
    assert "between" not in simple


def test_a_start_whose_elements_are_all_the_same_is_printed_as_one_of_them() -> None:
    item = regression()
    starts = {name: np.full((200, 2), 0.5, np.float32) for name in item.variables}
    zeros = next(iter(starts.values()))
    zeros[:] = -0.0
    zeros[-1, -1] = 0.0  # equal, and not the same
    text = dump(with_constant_starts(item, starts), full=True)
    assert text.count(" splat 0.5") == len(starts) - 1
    assert text.count(" b64") == 1


def test_a_good_rewrite_is_not_shrunk() -> None:
    draw = Draw("counted", "own", "shared2")
    found = ar.reduce(draw.item, draw.settings)
    assert (found.kind, found.item) == ("", draw.item)


def test_a_plan_is_refused() -> None:
    draw = Miscompilation("counted", "own", "shared2", "operands_swapped", FIRST).draw
    with pytest.raises(ConfigError, match="a plan is of one graph"):
        ar.reduce(draw.item, draw.plan)
