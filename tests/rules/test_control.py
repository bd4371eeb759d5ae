"""Control flow carries placements, and joins them where paths meet."""

from __future__ import annotations

import numpy as np
import pytest

from autograph_rewrite.analysis.transfer import transferred
from autograph_rewrite.ops.facts.placement import Fact, Placement
from autograph_rewrite.ops.facts.symbolic_dims import Sym
from autograph_rewrite.ops.rules.base import Op, Reshard, Semantics, Slice
from autograph_rewrite.ops.rules.signature import Signature, signed
from autograph_rewrite.ops.rules.table import TABLE
from tests.rules.facts import ANY, PARTIAL, REPLICATED, UNKNOWN, B, fact, node, placed, sizes, split
from tests.rules.nodes import node_of

BLOCKS = fact(split(0), B, 3)
ROWS = Sym(1, ("B",))
WHOLE = fact(REPLICATED, ROWS, 3)
ZEROS = fact(REPLICATED, ROWS, 3, zero=True)
SUM = fact(PARTIAL, 5, 3)
OTHER = fact(split(1), 3, B)


def merge(*inputs: Fact) -> Op:
    return node("Merge", *inputs, outputs=2)


@pytest.mark.parametrize(
    ("left", "right", "joined", "operand_reshards"),
    [
        (WHOLE, WHOLE, REPLICATED, {}),
        (BLOCKS, BLOCKS, split(0), {}),
        (SUM, SUM, PARTIAL, {}),
        (BLOCKS, fact(UNKNOWN), split(0), {}),
        (fact(ANY), SUM, PARTIAL, {}),
        (fact(ANY), fact(UNKNOWN), ANY, {}),
        (fact(UNKNOWN), fact(UNKNOWN), UNKNOWN, {}),
        (WHOLE, BLOCKS, split(0), {0: Slice(0, 1)}),
        (BLOCKS, ZEROS, split(0), {1: Slice(0, 1)}),
        (BLOCKS, fact(REPLICATED, 1, 3), REPLICATED, {0: REPLICATED}),
        (BLOCKS, fact(REPLICATED, 7, 3), REPLICATED, {0: REPLICATED}),
        (BLOCKS, fact(REPLICATED, None, 3), REPLICATED, {0: REPLICATED}),
        (BLOCKS, fact(REPLICATED), REPLICATED, {0: REPLICATED}),
        (WHOLE, SUM, PARTIAL, {0: PARTIAL}),
        (SUM, ZEROS, PARTIAL, {}),
        (BLOCKS, OTHER, REPLICATED, {0: REPLICATED, 1: REPLICATED}),
        (BLOCKS, SUM, REPLICATED, {0: REPLICATED, 1: REPLICATED}),
        (WHOLE, fact(Placement("partial", op="max"), 3), REPLICATED, {1: REPLICATED}),
        (sizes(B, 3), sizes(6, 3), REPLICATED, {0: REPLICATED}),
        (sizes(B, 3), sizes(B, 4), REPLICATED, {0: REPLICATED, 1: REPLICATED}),
        (WHOLE, fact(split(0), None, 3), REPLICATED, {1: REPLICATED}),
    ],
)
def test_a_merge_joins_placements(
    left: Fact, right: Fact, joined: Placement, operand_reshards: dict[int, Reshard]
) -> None:
    transferred = placed(merge(left, right))
    assert transferred.outputs == (joined, REPLICATED)
    assert dict(transferred.operand_reshards) == operand_reshards


def test_a_merge_of_equal_sizes_stays_a_size() -> None:
    n = merge(sizes(B, 3), sizes(B, 3))
    rule = TABLE["Merge"]
    assert placed(n).outputs[0] == sizes(B).placement
    assert rule.value is not None
    assert rule.value(n) == ((B, 3), (None,))


def test_a_merge_forgets_sizes_that_differ() -> None:
    rule = TABLE["Merge"]
    assert rule.shape is not None
    assert rule.shape(merge(fact(REPLICATED, 4, 3), fact(REPLICATED, 5, 3))) == ((None, 3), ())
    assert rule.shape(merge(fact(REPLICATED, 4), fact(REPLICATED, 4, 3))) == (None, ())
    assert rule.shape(merge(BLOCKS, fact(UNKNOWN))) == ((B, 3), ())


def test_zeros_on_all_paths_are_zeros() -> None:
    assert placed(merge(ZEROS, ZEROS)).zero[0]
    assert not placed(merge(ZEROS, WHOLE)).zero[0]


def test_a_switch_keeps_the_placement_and_wants_a_whole_predicate() -> None:
    transferred = placed(node("Switch", BLOCKS, fact(split(0), B), outputs=2))
    assert transferred.outputs == (split(0), split(0))
    assert dict(transferred.operand_reshards) == {1: REPLICATED}


@pytest.mark.parametrize("op", ["Enter", "NextIteration", "Exit", "Switch"])
def test_a_size_stays_one_around_a_loop_that_does_not_change_it(op: str) -> None:
    rule = TABLE[op]
    n = node(op, sizes(B), fact(REPLICATED), outputs=1 + (op == "Switch"))
    assert rule.value is not None
    assert dict(placed(n).operand_reshards) == {}
    assert rule.value(n)[0] == (B,)  # type: ignore[index]


def test_a_merge_forgets_contents_that_differ() -> None:
    rule = TABLE["Merge"]
    assert rule.value is not None
    assert rule.value(merge(sizes(3), sizes(4))) == (None, None)
    assert rule.value(merge(sizes(3), fact(ANY, zero=True))) == (None, None), "reserved elements are zeros"


def test_a_merge_of_blocks_of_different_sizes_has_blocks_of_unknown_size() -> None:
    rule = TABLE["Merge"]
    assert rule.shape is not None
    n = merge(BLOCKS, fact(split(0), Sym(2, ("b",)), 3))
    assert placed(n).outputs[0] == split(0)
    assert rule.shape(n) == ((None, 3), ())


@pytest.mark.parametrize("op", ["NextIteration", "Exit", "Enter"])
@pytest.mark.parametrize("value", [BLOCKS, SUM, WHOLE, fact(ANY)])
def test_a_loop_carries_placements_around(op: str, value: Fact) -> None:
    assert placed(node(op, value)).outputs == (value.placement,)


def test_a_loop_condition_is_the_same_everywhere() -> None:
    assert dict(placed(node("LoopCond", fact(PARTIAL))).operand_reshards) == {0: REPLICATED}


def test_an_answer_whose_blocks_count_examples_in_two_dimensions_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = Signature((("n", ""),), (("n", "n"),))
    monkeypatch.setitem(TABLE, "Diag", signed(lambda n: described))  # type: ignore[arg-type]
    diagonal = node_of("Diag", [np.ones((3, 2))], {})
    found = transferred(diagonal, (fact(split(0), B, 2),), {}, Semantics())
    assert [output.placement for output in found.outputs] == [REPLICATED]
    assert found.operand_reshards == {0: REPLICATED}
    assert "counts a block in dimension 1" in found.note
