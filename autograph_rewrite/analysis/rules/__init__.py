"""The table of rules: op type -> Rule, one family of ops per module, merged here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from autograph_rewrite.analysis.rules import (
    arrays,
    bits,
    contract,
    control,
    coupled,
    effects,
    elementwise,
    ensured,
    gather,
    images,
    layout,
    linalg,
    lists,
    neural,
    normalisation,
    ordering,
    pieces,
    pooling,
    random,
    recurrent,
    reduce,
    segment,
    sizes,
    slicing,
    strings,
    tables,
    variables,
)
from autograph_rewrite.analysis.rules.base import Rule

FAMILIES: tuple[ModuleType, ...] = (
    elementwise,
    ensured,
    reduce,
    contract,
    layout,
    pieces,
    slicing,
    sizes,
    control,
    variables,
    effects,
    tables,
    random,
    neural,
    pooling,
    normalisation,
    recurrent,
    gather,
    segment,
    ordering,
    linalg,
    images,
    strings,
    bits,
    lists,
    arrays,
    coupled,
)


def merge(families: Iterable[tuple[str, Mapping[str, Rule]]]) -> dict[str, Rule]:
    """Return all rules, each marked with its family.

    Raises:
        ValueError: two families define the same op.
    """
    table: dict[str, Rule] = {}
    for family, rules in families:
        for op, rule in rules.items():
            if op in table:
                raise ValueError(f"both '{table[op].family}' and '{family}' have a rule for {op}")
            table[op] = rule._replace(family=family)
    return table


TABLE: Mapping[str, Rule] = merge((module.__name__.rpartition(".")[2], module.RULES) for module in FAMILIES)
"""Every op type that has a rule; the others fall back to `base.whole`, with a note."""
