"""The table of rules: op type -> Rule, one family of ops per module, merged here and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping

from autograph_rewrite.analysis.rules.base import Rule

FAMILIES = (
    "elementwise",
    "reduce",
    "contract",
    "layout",
    "pieces",
    "sizes",
    "control",
    "variables",
    "effects",
    "random",
    "neural",
    "pooling",
    "normalisation",
    "recurrent",
    "gather",
    "segment",
    "ordering",
    "linalg",
    "images",
    "strings",
    "lists",
    "arrays",
    "coupled",
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
            table[op] = rule._replace(family=rule.family or family)
    return table


def _load(family: str) -> Mapping[str, Rule]:
    name = f"{__name__}.{family}"
    if importlib.util.find_spec(name) is None:
        return {}
    rules: Mapping[str, Rule] = importlib.import_module(name).RULES
    return rules


TABLE: Mapping[str, Rule] = merge((family, _load(family)) for family in FAMILIES)
"""Every op type that has a rule; the others fall back to `base.whole`, with a note."""
