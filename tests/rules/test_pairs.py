"""Every rule of the table on every pair of axes: blocks of blocks give what the whole gives."""

from __future__ import annotations

import itertools

import pytest

from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.rules.base import Op, Placed
from autograph_rewrite.ops.rules.table import TABLE
from tests.rules.pairs import check_pair
from tests.rules.sample import Sample
from tests.rules.samples import SAMPLES
from tests.rules.test_rules import name

FIRST = [number for number, sample in enumerate(SAMPLES) if sample.op not in {one.op for one in SAMPLES[:number]}]
"""One sample of each op: its others, on two axes as well, are those of `test_two_axes`."""


@pytest.mark.parametrize("sample", [SAMPLES[number] for number in FIRST], ids=map(name, FIRST))
def test_blocks_of_blocks_give_what_the_whole_gives(sample: Sample) -> None:
    for first, second in pairs_of(sample):
        check_pair(sample, TABLE[sample.op], first, second)


def pairs_of(sample: Sample) -> list[tuple[str, str]]:
    """Return each size with itself, with the next one, and with the one before: of up to three sizes all pairs."""
    letters = list(sample.letters)
    turned = [letters[at:] + letters[:at] for at in sorted({0, 1 % len(letters), -1 % len(letters)})]
    return [pair for other in turned for pair in zip(letters, other, strict=True)]


def test_the_test_of_pairs_sees_a_rule_that_is_wrong_for_blocks_only() -> None:
    matmul = next(sample for sample in SAMPLES if sample.op == "MatMul")
    right = TABLE["MatMul"]
    assert check_pair(matmul, right, "n", "m") > 0

    def place(n: Op) -> Placed | None:
        columns = n.inputs[1].shape
        return Placed((REPLICATED,)) if columns is not None and columns[1] == 2 else right.place(n)

    with pytest.raises(AssertionError, match=r"n by the model axis .* then m by the batch"):
        check_pair(matmul, right._replace(place=place), "n", "m")


def test_most_ops_that_one_axis_cuts_are_cut_by_both() -> None:
    """A rule that gave up on every block would pass the test above, so a tenth of the samples counts what it says."""
    chosen = [sample for sample in SAMPLES[::10] if len(sample.letters) > 1]
    cut = [
        sample
        for sample in chosen
        if any(check_pair(sample, TABLE[sample.op], *pair) for pair in itertools.permutations(sample.letters, 2))
    ]
    assert len(cut) >= 0.6 * len(chosen)
