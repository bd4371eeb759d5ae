"""Auto with a memory limit on the models whose searches take long: many layers, and four devices."""

from __future__ import annotations

from typing import Any

from benchmarks.auto_memory import SMALL, figures_of
from benchmarks.effort import Effort
from benchmarks.figure import Figure
from benchmarks.memory_limits import LIMITED

TITLE = "Auto with a memory limit, many layers: virtual CPU devices, Session"


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the numbers that they are made of."""
    return figures_of(effort.some([model for model in LIMITED if model not in SMALL]))
