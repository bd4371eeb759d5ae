"""Nodes that are run on samples: large sizes are judged by smaller ones, and unknown ones are drawn until they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.certify.run_blocks import judge_by_running
from autograph_rewrite.certify.samples import TooLargeError
from autograph_rewrite.certify.seen import Seen
from autograph_rewrite.ir.claims import Claim
from tests.rules.nodes import node_of

BLOCK = (1, ("b",))
FLOATS, INTS = np.float32([0]), np.int32([0])


def known(*entries: Any) -> Claim:
    kind = "local" if BLOCK in entries else "replicated"
    return Claim(kind, shape=(len(entries),), value=entries)


def judged(op: str, operands: Sequence[Claim], result: Claim, **attrs: Any) -> str | None:
    values = [INTS if claim.value is not None else FLOATS for claim in operands]
    return judge_by_running(Seen(node_of(op, values, attrs), tuple(operands), (result,)))


@pytest.mark.parametrize(("dim", "is_right"), [(2, True), (1, False)])
def test_a_transposition_of_large_blocks_is_judged_by_smaller_ones(dim: int, is_right: bool) -> None:
    shape = (3000, 4000, BLOCK) if dim == 2 else (3000, BLOCK, None)
    rows = Claim("split", 0, shape=(BLOCK, 4000, 3000))
    problem = judged("Transpose", (rows, known(2, 1, 0)), Claim("split", dim, shape=shape))
    assert (problem is None) == is_right, problem


@pytest.mark.parametrize("heads", [12, 36])
def test_a_reshape_of_large_blocks_is_judged_by_sizes_with_the_same_products(heads: int) -> None:
    rows = Claim("split", 0, shape=(BLOCK, 512, 768))
    made = Claim("split", 0, shape=(BLOCK, 512, heads, 64))
    if heads == 12:
        assert judged("Reshape", (rows, known(BLOCK, 512, heads, 64)), made) is None
        return
    with pytest.raises(TooLargeError):
        judged("Reshape", (rows, known(BLOCK, 512, heads, 64)), made)


def test_a_size_that_nobody_knows_is_drawn_until_the_slice_fits() -> None:
    rows, made = Claim("split", 0, shape=(BLOCK, None)), Claim("split", 0, shape=(BLOCK, 5))
    assert judged("Slice", (rows, known(0, 3), known(-1, 5)), made) is None
    assert judged("Slice", (rows, known(1, 3), known(-1, 5)), made) is not None


def test_blocks_of_one_row_are_among_the_samples() -> None:
    problem = judged("Squeeze", (Claim("split", 0, shape=(BLOCK, 1)),), Claim("split", 0, shape=(BLOCK,)))
    assert problem is not None
    assert (
        judged("Squeeze", (Claim("split", 0, shape=(BLOCK, 1)),), Claim("split", 0, shape=(BLOCK,)), squeeze_dims=[1])
        is None
    )
