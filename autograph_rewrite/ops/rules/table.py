"""Merges the rules of all families into one table, by op type; each module defines the rules of one family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from autograph_rewrite.ops.rules import (
    bitcast,
    concat_split,
    contraction,
    control,
    convolutions,
    cross_example,
    elementwise,
    ensure_shape,
    gather_scatter,
    images,
    layers,
    layout,
    linalg,
    normalization,
    ordering,
    pooling,
    quantization,
    random,
    recurrent,
    reduce,
    reshards,
    segment,
    side_effects,
    sizes,
    slicing,
    strings,
    tables,
    tensor_arrays,
    tensor_lists,
    variables,
)
from autograph_rewrite.ops.rules.base import Rule
from autograph_rewrite.ops.rules.kernels import KERNELS
from autograph_rewrite.ops.rules.registered import entry_of

FAMILIES: tuple[ModuleType, ...] = (
    elementwise, ensure_shape, reduce, contraction, layout, concat_split, slicing, sizes, control, variables,
    side_effects, tables, random, layers, convolutions, pooling, quantization, normalization, recurrent,
    gather_scatter, segment, ordering, linalg, images, strings, bitcast, tensor_lists, tensor_arrays, cross_example,
    reshards,
)  # fmt: skip


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
            table[op] = rule._replace(family=family, kernel=KERNELS.get(op))
    return table


NAMES = tuple(module.__name__.rpartition(".")[2] for module in FAMILIES)
"""The names of the families, which are those of their modules."""
TABLE: Mapping[str, Rule] = merge(zip(NAMES, (module.RULES for module in FAMILIES), strict=True))
"""Every op type that has a rule; the others fall back to `base.whole`, with a note."""


def families(*names: str) -> frozenset[str]:
    """Return families of rules, by name.

    Raises:
        ValueError: a family does not exist, so that a table of families cannot keep the name of a removed family.
    """
    if unknown := sorted(set(names) - set(NAMES)):
        raise ValueError(f"no family of rules is called {', '.join(unknown)}")
    return frozenset(names)


def rule_of(op: str) -> Rule | None:
    """Return the rule of an op, also of an op that the user registered; None where it has none."""
    rule = TABLE.get(op)
    if rule is not None:
        return rule
    entry = entry_of(op)
    return None if entry is None else entry.rule


def family_of(op: str) -> str:
    """Return the family of an op's rule; empty where it has none."""
    rule = rule_of(op)
    return rule.family if rule is not None else ""
