"""Control flow moves values without changing them; where two paths meet, their placements are joined.

All replicas share one frame and one predicate, so predicates are always replicated.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import ANY, REPLICATED, UNKNOWN, Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, first_value, like_first, made_whole, scalar, whole
from autograph_rewrite.ops.rules.join import conform, join, reached
from autograph_rewrite.ops.rules.signature import every


def place_switch(n: Op) -> Placed:
    """Send a value down one of two paths."""
    return Placed((n.placement(0),) * 2, made_whole(n, 1), zero=(n.inputs[0].zero,) * 2)


def place_carry(n: Op) -> Placed:
    """Carry a value into, around or out of a loop; the Merge drops contents that change between iterations."""
    return Placed((n.placement(0),), zero=(n.inputs[0].zero,))


def place_merge(n: Op) -> Placed:
    """Join the inputs that propagation has reached."""
    if not reached(n.inputs):
        empty = [fact for fact in n.inputs if fact.placement == ANY]
        zero = any(fact.zero for fact in empty)
        return Placed((ANY if empty else UNKNOWN, REPLICATED), zero=(zero, False))
    target = join(n.inputs, n.semantics.extent.units)
    operand_reshards = {
        i: conform(fact, target, n.semantics.extent.units) for i, fact in enumerate(n.inputs) if reached([fact])
    }
    needed = {i: reshard for i, reshard in operand_reshards.items() if reshard is not None}
    return Placed((target.placement, REPLICATED), needed, zero=(target.zero, False))


def _merged_shape(n: Op) -> tuple[Shape | None, ...]:
    return (join(n.inputs, n.semantics.extent.units).shape, ())


def _merged_value(n: Op) -> tuple[tuple[Dim, ...] | None, ...]:
    joined = join(n.inputs, n.semantics.extent.units)
    unknown: tuple[Dim, ...] = (None,)  # the number of the path taken, which is not known
    return (joined.value, unknown if joined.is_local else None)


RULES: dict[str, Rule] = {
    **every(Rule(place_switch, like_first, first_value), "Switch RefSwitch"),
    **every(Rule(place_merge, _merged_shape, _merged_value), "Merge RefMerge"),
    **every(Rule(place_carry, like_first, first_value), "Enter RefEnter Exit RefExit NextIteration RefNextIteration"),
    "LoopCond": Rule(whole, scalar),
}
