"""Blocks of blocks: an op that one axis of a mesh has cut is cut again by another.

    inputs ──first axis──► inputs of device k ──second axis──► run per block ──► device k's result ──► the whole

The first is a model axis, whose blocks have known sizes. The second is the batch, of open or known size; a known one is
also what a second model axis would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Placement
from autograph_rewrite.ops.rules.base import Rule
from tests.rules.harness import GROWTH, Case, Operand, check, inputs_of_blocks, make_case, op_of, units_of
from tests.rules.runner import run_once
from tests.rules.sample import Sample

FIRST, SECOND = (3, 2), (1, 2)
Arrays = list[list[np.ndarray]]
"""What each device reads."""


def check_pair(sample: Sample, rule: Rule, first: str, second: str) -> int:
    """Check an op on blocks of blocks; return how many claims there were about blocks that are cut again.

    Args:
        sample: of the op.
        rule: what is checked.
        first: the size that the model axis cuts.
        second: the one that the batch is then; the same size for blocks of one dimension.
    """
    batch, claims = sum(SECOND), 0
    case = _case(sample, first, second, batch)
    for placements in some(case):
        blocks = _inputs(case, rule, placements)
        for inputs, units in zip(blocks, _units(blocks, sample, rule, placements, (first, second)), strict=True):
            inner = Case(sample, case.attrs, tuple(map(Operand, inputs, units)), SECOND)
            expected = run_once(sample.op, inputs, case.attrs)
            for again in some(inner):
                for dynamic in (True, False):
                    try:
                        claims += check(inner, rule, again, dynamic=dynamic, expected=expected)
                    except Exception as error:
                        claim = f"{sample}: {first} by the model axis {placements}, then {second} by the batch {again}"
                        raise AssertionError(f"{claim}, dynamic {dynamic}") from error
    return claims


def some(case: Case) -> Iterator[tuple[Placement, ...]]:
    """Yield placements of the inputs: everything cut that can be, and one contribution beside whole values."""
    natural = tuple(operand.natural() for operand in case.operands)
    whole = (REPLICATED,) * len(natural)
    found = {natural: None}
    for index, operand in enumerate(case.operands):
        if PARTIAL in operand.options():
            found |= {(*base[:index], PARTIAL, *base[index + 1 :]): None for base in (whole, natural)}
    yield from (placements for placements in found if placements != whole)


def _case(sample: Sample, first: str, second: str, batch: int) -> Case:
    """Return what the first axis cuts, where the second size is `batch` in each of its blocks."""
    if first == second:
        return make_case(sample, first, tuple(block * batch for block in FIRST))
    return make_case(replace(sample, sizes={**sample.sizes, second: batch}), first, FIRST)


def _units(
    blocks: Arrays, sample: Sample, rule: Rule, placements: tuple[Placement, ...], letters: tuple[str, str]
) -> list[list[tuple[int, ...]]]:
    """Return which sizes of what each device reads grow with the batch.

    A rule may choose by sizes: a batch counts that is larger, or else smaller, and for which it chooses alike.
    """
    batch = sum(SECOND)
    for growth in (GROWTH, -1) if blocks else ():
        others = _inputs(_case(sample, *letters, batch + growth), rule, placements)
        if [[a.ndim for a in inputs] for inputs in blocks] == [[a.ndim for a in inputs] for inputs in others]:
            return [
                [units_of(*pair, batch, growth) for pair in zip(*each, strict=True)]
                for each in zip(blocks, others, strict=True)
            ]
    assert not blocks, "the rule chooses otherwise for any other batch"
    return []


def _inputs(case: Case, rule: Rule, placements: tuple[Placement, ...]) -> Arrays:
    """Return what each device of the first axis reads; nothing where the op works on whole values."""
    expected = run_once(case.sample.op, [operand.value for operand in case.operands], case.attrs)
    if not check(case, rule, placements, dynamic=False, expected=expected):
        return []
    placed = rule.place(op_of(case, placements, False, expected))
    assert placed is not None
    return [] if placed.decompose else inputs_of_blocks(case, placements, placed)
