"""Every rule of the table, run on blocks: the generic test, over all samples."""

from __future__ import annotations

import itertools

import pytest

from autograph_rewrite.analysis.fact import LOCAL, PARTIAL, REPLICATED, Fact, split
from autograph_rewrite.analysis.rules import TABLE, merge
from autograph_rewrite.analysis.rules.base import Op, Rule, Semantics, whole
from autograph_rewrite.ir.opdefs import find_op
from tests.rules.harness import BLOCKINGS, check, combinations, make_case
from tests.rules.runner import run
from tests.rules.sample import Sample
from tests.rules.samples import NOT_RUN, REFUSES_EMPTY, SAMPLES

WHOLE = sorted(op for op, rule in TABLE.items() if rule.place is whole)
PLACED = sorted(set(TABLE) - set(WHOLE))


def name(index: int) -> str:
    same = [s for s in SAMPLES[:index] if str(s) == str(SAMPLES[index])]
    return f"{SAMPLES[index]}{len(same) or ''}"


@pytest.mark.parametrize("sample", SAMPLES, ids=[name(i) for i in range(len(SAMPLES))])
def test_an_op_on_blocks_gives_what_it_gives_on_the_whole(sample: Sample) -> None:
    rule = TABLE[sample.op]
    for letter, blocks in itertools.product(sample.letters, BLOCKINGS):
        case = make_case(sample, letter, blocks)
        expected = run(sample.op, [operand.value for operand in case.operands], case.attrs)
        natural = tuple(operand.natural() for operand in case.operands)
        # A static batch has at least one example for each replica.
        modes = (True,) if 0 in blocks else (True, False)
        if 0 in blocks and sample.op in REFUSES_EMPTY:
            continue
        for placements, dynamic in itertools.product(combinations(case), modes):
            try:
                stays = check(case, rule, placements, dynamic=dynamic, expected=expected)
            except Exception as error:
                claim = f"{sample}: batch is {letter}, blocks {blocks}, inputs {placements}, dynamic {dynamic}"
                raise AssertionError(claim) from error
            stated = tuple(REPLICATED if p == LOCAL else p for p in natural)
            wanted = letter in (sample.stays if dynamic else sample.stays + sample.stays_static)
            if wanted and (placements == natural or (placements == stated and not dynamic)):
                assert stays, f"{sample}: inputs {placements} make it fall back, batch is {letter}"


@pytest.mark.parametrize("op", WHOLE)
def test_a_deliberately_whole_op_reads_whole_values(op: str) -> None:
    facts = tuple(Fact(placement, 1) for placement in (split(0), PARTIAL, REPLICATED))
    n = Op(op, lambda key, default=None: default, facts, (1, 1), (None, None), Semantics(), {})
    assert TABLE[op].place(n) == whole(n)


def test_every_rule_that_places_something_has_a_sample() -> None:
    sampled = {sample.op for sample in SAMPLES}
    assert sorted(set(PLACED) - sampled - set(NOT_RUN)) == []


def test_no_sampled_op_is_excused() -> None:
    assert sorted({sample.op for sample in SAMPLES} & set(NOT_RUN)) == []


def test_every_op_of_the_table_exists() -> None:
    assert [op for op in TABLE if find_op(op) is None] == []


def test_the_table_covers_220_op_types() -> None:
    assert len(PLACED) >= 220


def test_two_rules_for_one_op_are_refused() -> None:
    with pytest.raises(ValueError, match="both 'a' and 'b' have a rule for Relu"):
        merge([("a", {"Relu": Rule(whole)}), ("b", {"Relu": Rule(whole)})])
