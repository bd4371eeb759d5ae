"""Every rule on every pair of axes and sizes, asked as propagation asks it on a mesh of two axes."""

from __future__ import annotations

import itertools

import pytest

from autograph_rewrite.analysis import transfer
from autograph_rewrite.ir.mesh import MODEL, REPLICA
from tests.rules.sample import Sample
from tests.rules.samples import SAMPLES
from tests.rules.test_rules import name
from tests.rules.two_axes import check_on_two_axes

BLOCKS = (((2, 2), (2, 2)), ((2, 1), (1, 2)), ((1, 1), (3, 2)), ((3, 0), (1, 1)))
"""Even, uneven, of one row, and an empty one of the batch; those of a model axis are never empty."""


@pytest.mark.parametrize("sample", SAMPLES, ids=[name(i) for i in range(len(SAMPLES))])
def test_blocks_on_two_axes_give_what_the_whole_gives(sample: Sample) -> None:
    for number, (first, second) in enumerate(itertools.product(sample.letters, repeat=2)):
        for replica, model in BLOCKS if len(sample.letters) == 1 else BLOCKS[number % 4 :][:1]:
            dynamic = 0 in replica or number % 3 == 0
            blocks = {REPLICA: replica, MODEL: (sum(replica) - 1, 1) if first == second else model}
            check_on_two_axes(sample, {REPLICA: first, MODEL: second}, blocks, dynamic=dynamic)


def test_most_ops_that_one_axis_cuts_are_cut_by_both() -> None:
    """Propagation that gave up on every block would pass the test above."""
    chosen = [sample for sample in SAMPLES[::10] if len(sample.letters) > 1]
    blocks = {REPLICA: (2, 1), MODEL: (1, 2)}
    cut = [
        sample
        for sample in chosen
        if any(
            check_on_two_axes(sample, {REPLICA: first, MODEL: second}, blocks, dynamic=False)
            for first, second in itertools.permutations(sample.letters, 2)
        )
    ]
    assert len(cut) >= 0.5 * len(chosen)


def test_the_test_sees_a_rule_that_forgets_what_the_other_axis_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = next(sample for sample in SAMPLES if sample.op == "MatMul")
    letters, blocks = {REPLICA: matmul.letters[0], MODEL: matmul.letters[1]}, {REPLICA: (2, 1), MODEL: (1, 2)}
    assert check_on_two_axes(matmul, letters, blocks, dynamic=True) > 0
    monkeypatch.setattr(transfer, "_settled", lambda fact, earlier, extent: earlier)
    with pytest.raises(AssertionError, match=r"MatMul.*inputs"):
        check_on_two_axes(matmul, letters, blocks, dynamic=True)
