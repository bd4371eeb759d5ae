"""Where the time of a predicted step goes, as text: the levers in words, then the dearest layers."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.cost.tasks.layers import COLUMNS, cells
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.inspect.render.table import drawn, fitted, table


def where_time_goes(found: Simulation, levers: Iterable[str]) -> str:
    """Return sentences and a table.

    Args:
        found: the step, with its nodes.
        levers: what it takes most of.
    """
    first = f"Where the time goes: {str(found).partition(chr(10))[0]} (predicted)."
    layers = found.layers()
    rows = drawn(table("dearest layers, with their gradients", COLUMNS, map(cells, layers))) if layers else ""
    return "\n".join((fitted("\n".join((first, *(f"  {text}" for text in levers)))), rows))
