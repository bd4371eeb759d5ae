"""The table of rules: op type -> Rule, one family of ops per module, merged here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from autograph_rewrite.analysis.rules import control
from autograph_rewrite.analysis.rules.arrays import (
    bitcast,
    concat_split,
    elementwise,
    ensure_shape,
    gather_scatter,
    layout,
    ordering,
    random,
    segment,
    slicing,
    strings,
)
from autograph_rewrite.analysis.rules.base import Rule
from autograph_rewrite.analysis.rules.linalg import contraction, cross_example, linalg, reduce
from autograph_rewrite.analysis.rules.nn import (
    convolutions,
    images,
    layers,
    normalization,
    pooling,
    quantization,
    recurrent,
)
from autograph_rewrite.analysis.rules.shapes import sizes
from autograph_rewrite.analysis.rules.state import side_effects, tables, tensor_arrays, tensor_lists, variables

FAMILIES: tuple[ModuleType, ...] = (
    elementwise,
    ensure_shape,
    reduce,
    contraction,
    layout,
    concat_split,
    slicing,
    sizes,
    control,
    variables,
    side_effects,
    tables,
    random,
    layers,
    convolutions,
    pooling,
    quantization,
    normalization,
    recurrent,
    gather_scatter,
    segment,
    ordering,
    linalg,
    images,
    strings,
    bitcast,
    tensor_lists,
    tensor_arrays,
    cross_example,
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


NAMES = tuple(module.__name__.rpartition(".")[2] for module in FAMILIES)
"""What the families are called: as their modules."""
TABLE: Mapping[str, Rule] = merge(zip(NAMES, (module.RULES for module in FAMILIES), strict=True))
"""Every op type that has a rule; the others fall back to `base.whole`, with a note."""


def families(*names: str) -> frozenset[str]:
    """Return families of rules, by name.

    Raises:
        ValueError: there is no such family, so that a table of families cannot outlive the name of one.
    """
    if unknown := sorted(set(names) - set(NAMES)):
        raise ValueError(f"no family of rules is called {', '.join(unknown)}")
    return frozenset(names)
