"""Parameters of a test: few rows in every run, in which any two values meet, and the whole product under `full`.

    @pytest.mark.parametrize(("strategy", "mode", "name"), covering(STRATEGIES, MODES, NAMES))

Of two factors all pairs are the whole product; then each value comes once, and the values take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.matrix.cover import pairwise


def covering(*factors: Sequence[Any]) -> list[Any]:
    """Return the rows of a product; those that a cover of its pairs does not need are marked as `full`."""
    places = [range(len(values)) for values in factors]
    if len(factors) == 2:
        chosen = {(i % len(factors[0]), i % len(factors[1])) for i in range(max(map(len, factors)))}
    else:
        rows = pairwise({str(i): each for i, each in enumerate(places)})
        chosen = {tuple(int(str(row[str(i)])) for i in range(len(factors))) for row in rows}
    return [
        pytest.param(*(values[i] for values, i in zip(factors, row, strict=True)), marks=marks(row in chosen))
        for row in product(*places)
    ]


def marks(is_chosen: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a row."""
    return () if is_chosen else (pytest.mark.full,)
