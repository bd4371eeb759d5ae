"""Pairwise covering: few rows in which any two values of different factors meet at least once.

Greedy and deterministic: a row starts from the first pair that is still missing, then every other factor
takes the value that covers most missing pairs. Constraints are a predicate over partial rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]
Allowed = Callable[[Mapping[str, object]], bool]


def pairwise(
    factors: Mapping[str, Sequence[object]],
    allowed: Allowed = lambda row: True,
    skip: Sequence[frozenset[str]] = (),
    covered: Sequence[Mapping[str, object]] = (),
) -> list[Row]:
    """Return rows that cover every allowed pair, except pairs of the factors in `skip` and those of `covered` rows."""
    missing = dict.fromkeys(_pairs(factors, allowed, skip))  # a dict: an ordered set
    for pair in (pair for row in covered for pair in _covered(row, factors)):
        missing.pop(pair, None)
    rows = []
    while missing:
        first = next(iter(missing))
        row = _row(dict(first), factors, allowed, missing)
        if row is None:  # no whole row contains this pair
            del missing[first]
            continue
        for pair in _covered(row, factors):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def _pairs(factors: Mapping[str, Sequence[object]], allowed: Allowed, skip: Sequence[frozenset[str]]) -> Iterator[Pair]:
    for left, right in combinations(factors, 2):
        if frozenset((left, right)) in skip:
            continue
        for a in factors[left]:
            for b in factors[right]:
                if allowed({left: a, right: b}):
                    yield (left, a), (right, b)


def _covered(row: Mapping[str, object], factors: Mapping[str, Sequence[object]]) -> Iterator[Pair]:
    for left, right in combinations([name for name in factors if name in row], 2):
        yield (left, row[left]), (right, row[right])


def _row(
    row: Row, factors: Mapping[str, Sequence[object]], allowed: Allowed, missing: Mapping[Pair, None]
) -> Row | None:
    """Complete a partial row, best value first, backtracking where constraints forbid it."""
    open_factors = [name for name in factors if name not in row]
    if not open_factors:
        return row
    name = open_factors[0]
    candidates = [{**row, name: value} for value in factors[name]]
    candidates = [each for each in candidates if allowed(each)]
    candidates.sort(key=lambda each: -sum(pair in missing for pair in _covered(each, factors)))  # stable
    for each in candidates:
        done = _row(each, factors, allowed, missing)
        if done is not None:
            return {factor: done[factor] for factor in factors}
    return None
