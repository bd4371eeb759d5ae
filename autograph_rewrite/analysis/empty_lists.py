"""Empty tensor lists that will hold split values: known only from later writes."""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import ANY


def future_splits(state: Propagation) -> dict[Value, int]:
    """Return the empty lists (and what only passes them on) that will hold blocks, with the dimension that is cut."""
    empty = [value for value, fact in state.facts.items() if fact.dtype == dtypes.VARIANT and fact.placement == ANY]
    found: dict[Value, int] = {}
    changed = bool(empty)
    while changed:
        changed = False
        for value in reversed(empty):
            dim = None if value in found else _follow(state, value, found)
            if dim is not None:
                found[value] = dim
                changed = True
    return found


def _follow(state: Propagation, value: Value, found: dict[Value, int]) -> int | None:
    for node, _ in value._uses:
        transferred = state.transfers.get(node)
        for index, fact in enumerate(transferred.outputs if transferred is not None else ()):
            if fact.dtype != dtypes.VARIANT:
                continue
            if fact.placement.is_split:
                return fact.placement.dim
            if node.output(index) in found:
                return found[node.output(index)]
    return None
