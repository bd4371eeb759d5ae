"""Control flow moves values without changing them; where two paths meet, their placements are joined.

All replicas share one frame and one predicate, so predicates are always replicated.
"""

from __future__ import annotations

from autograph_rewrite.analysis.dims import Dim
from autograph_rewrite.analysis.fact import ANY, REPLICATED, UNKNOWN, Shape
from autograph_rewrite.analysis.rules.base import Op, Placed, Rule, Want, whole
from autograph_rewrite.analysis.rules.joining import conform, join, reached
from autograph_rewrite.analysis.rules.signature import every


def place_switch(n: Op) -> Placed:
    """Send a value down one of two paths."""
    wants: dict[int, Want] = {1: REPLICATED} if n.placement(1).differs else {}
    return Placed((n.placement(0),) * 2, wants, zero=(n.inputs[0].zero,) * 2)


def _both_shapes(n: Op) -> tuple[Shape | None, ...]:
    return (n.shape(0),) * 2


def _both_values(n: Op) -> tuple[tuple[Dim, ...] | None, ...]:
    return (n.value(0),) * 2


def place_carry(n: Op) -> Placed:
    """Keep the placement; the contents of a loop variable change, so a size in it goes global."""
    if n.inputs[0].is_local:
        return whole(n)
    return Placed((n.placement(0),), zero=(n.inputs[0].zero,))


def place_enter(n: Op) -> Placed:
    """Enter a loop; a constant of the loop keeps its contents, so it may be a size."""
    constant = n.attr("is_constant", False)
    return Placed((n.placement(0),), zero=(n.inputs[0].zero,)) if constant else place_carry(n)


def _enter_value(n: Op) -> tuple[tuple[Dim, ...] | None]:
    return (n.value(0) if n.attr("is_constant", False) else None,)


def _same_shape(n: Op) -> tuple[Shape | None]:
    return (n.shape(0),)


def place_merge(n: Op) -> Placed:
    """Join the paths that are known."""
    if not reached(n.inputs):
        empty = any(fact.placement == ANY for fact in n.inputs)
        return Placed((ANY if empty else UNKNOWN, REPLICATED))
    target = join(n.inputs)
    wants = {i: conform(fact, target) for i, fact in enumerate(n.inputs) if reached([fact])}
    needed = {i: want for i, want in wants.items() if want is not None}
    return Placed((target.placement, REPLICATED), needed, zero=(target.zero, False))


def _merged_shape(n: Op) -> tuple[Shape | None, ...]:
    return (join(n.inputs).shape, ())


def _merged_value(n: Op) -> tuple[tuple[Dim, ...] | None, ...]:
    return (join(n.inputs).value, None)


def _scalar(n: Op) -> tuple[Shape]:
    return ((),)


RULES: dict[str, Rule] = {
    **every(Rule(place_switch, _both_shapes, _both_values), "Switch RefSwitch"),
    **every(Rule(place_merge, _merged_shape, _merged_value), "Merge RefMerge"),
    **every(Rule(place_enter, _same_shape, _enter_value), "Enter RefEnter"),
    **every(Rule(place_carry, _same_shape), "Exit RefExit NextIteration RefNextIteration"),
    "LoopCond": Rule(whole, _scalar),
}
