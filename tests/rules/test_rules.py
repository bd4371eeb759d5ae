"""Every rule of the table, run on blocks: the generic test, over all samples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ops.facts.placement import LOCAL, PARTIAL, REPLICATED, Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import Sym
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, Semantics, whole
from autograph_rewrite.ops.rules.table import TABLE, families, merge
from tests.rules.harness import BLOCKINGS, check, combinations, make_case, with_zeros
from tests.rules.runner import run
from tests.rules.sample import Sample
from tests.rules.samples import NOT_RUN, SAMPLES

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


ZERO_AWARE = [
    i
    for i, sample in enumerate(SAMPLES)
    if TABLE[sample.op].family in families("elementwise", "layout", "concat_split", "tensor_lists")
]


@pytest.mark.parametrize("sample", [SAMPLES[i] for i in ZERO_AWARE], ids=[name(i) for i in ZERO_AWARE])
def test_an_input_known_to_be_zero_may_count_as_anything(sample: Sample) -> None:
    for letter in sample.letters:
        whole_case = make_case(sample, letter, (2, 2, 1))
        floats = [i for i, o in enumerate(whole_case.operands) if o.value.dtype.kind == "f"]
        for case in (with_zeros(whole_case, i) for i in floats):
            expected = run(sample.op, [operand.value for operand in case.operands], case.attrs)
            if not all(np.isfinite(output).all() for output in expected if output.dtype.kind == "f"):
                continue  # a division by zero is not a number, whole or not
            for placements in combinations(case):
                check(case, TABLE[sample.op], placements, dynamic=True, expected=expected)


MATMUL = next(sample for sample in SAMPLES if sample.op == "MatMul")
WRONG = {
    "a sum taken for a whole value": lambda n: Placed((REPLICATED,)),
    "a sum taken for blocks": lambda n: Placed((split(0),)),
    "another dimension": lambda n: Placed((split(1),)),
    "a whole operand that is not sliced": lambda n: Placed((PARTIAL,)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_generic_test_sees_a_wrong_rule(wrong: str) -> None:
    case = make_case(MATMUL, "k", (2, 2, 1))
    expected = run("MatMul", [operand.value for operand in case.operands], case.attrs)
    both = (split(1), split(0))
    check(case, TABLE["MatMul"], both, dynamic=True, expected=expected)
    placements = (split(1), REPLICATED) if "not sliced" in wrong else both
    with pytest.raises((AssertionError, ValueError, tensorflow_errors())):
        check(case, Rule(WRONG[wrong]), placements, dynamic=True, expected=expected)


def test_the_generic_test_sees_a_wrong_shape() -> None:
    case = make_case(MATMUL, "m", (2, 2, 1))
    expected = run("MatMul", [operand.value for operand in case.operands], case.attrs)
    rule = TABLE["MatMul"]._replace(shape=lambda n: ((Sym(2, ("b",)), 3),))
    with pytest.raises(AssertionError, match="claimed"):
        check(case, rule, (split(0), REPLICATED), dynamic=True, expected=expected)


def tensorflow_errors() -> type[Exception]:
    import tensorflow as tf

    errors: type[Exception] = tf.errors.OpError
    return errors


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
