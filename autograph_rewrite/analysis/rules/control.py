"""Control flow moves values without changing them; where two paths meet, their placements are joined.

All replicas share one frame and one predicate, so predicates are always replicated.
"""

from __future__ import annotations

from autograph_rewrite.analysis.dims import Dim, unit
from autograph_rewrite.analysis.fact import ANY, LOCAL, PARTIAL, REPLICATED, UNKNOWN, Fact, Shape
from autograph_rewrite.analysis.rules.base import Op, Placed, Rule, Slice, Want, whole


def _switch(n: Op) -> Placed:
    wants: dict[int, Want] = {1: REPLICATED} if n.placement(1).differs else {}
    return Placed((n.placement(0),) * 2, wants, zero=(n.inputs[0].zero,) * 2)


def _both_shapes(n: Op) -> tuple[Shape | None, ...]:
    return (n.shape(0),) * 2


def _both_values(n: Op) -> tuple[tuple[Dim, ...] | None, ...]:
    return (n.value(0),) * 2


def _carry(n: Op) -> Placed:
    """Keep the placement. The contents of a loop variable change, so a size in it is not tracked: it goes global."""
    if n.inputs[0].is_local:
        return whole(n)
    return Placed((n.placement(0),), zero=(n.inputs[0].zero,))


def _enter(n: Op) -> Placed:
    return Placed((n.placement(0),), zero=(n.inputs[0].zero,)) if n.attr("is_constant") else _carry(n)


def _enter_value(n: Op) -> tuple[tuple[Dim, ...] | None]:
    return (n.value(0) if n.attr("is_constant") else None,)


def _same_shape(n: Op) -> tuple[Shape | None]:
    return (n.shape(0) if n.shape(0) is not None else n.static[0],)


def _merge(n: Op) -> Placed:
    """Join: what is not known yet yields, a replicated value follows a split or partial one, other mixes are whole."""
    reached = {i: fact for i, fact in enumerate(n.inputs) if fact.placement not in (UNKNOWN, ANY)}
    if not reached:
        waiting = any(fact.placement == UNKNOWN for fact in n.inputs)
        return Placed((UNKNOWN if waiting else ANY, REPLICATED))
    zero = (all(fact.zero for fact in reached.values()), False)
    placements = {fact.placement for fact in reached.values()}
    if len(placements) == 1 and (LOCAL not in placements or _same_contents(reached)):
        return Placed((*placements, REPLICATED), zero=zero)
    leading = placements - {REPLICATED}
    if len(leading) != 1 or LOCAL in leading:
        return whole(n)
    (target,) = leading
    if target == PARTIAL:
        wants: dict[int, Want] = {
            i: PARTIAL for i, f in reached.items() if f.placement == REPLICATED and not f.zero
        }
        return Placed((PARTIAL, REPLICATED), wants, zero=zero)
    if not target.is_split:
        return whole(n)
    units = {unit(fact.split_size) for fact in reached.values() if fact.placement.is_split}
    rows = units.pop() if len(units) == 1 else None
    if rows is None:
        return whole(n)
    cuts: dict[int, Want] = {
        i: Slice(target.dim, rows) for i, f in reached.items() if f.placement == REPLICATED
    }
    return Placed((target, REPLICATED), cuts, zero=zero)


def _same_contents(facts: dict[int, Fact]) -> bool:
    values = {fact.value for fact in facts.values()}
    return len(values) == 1 and None not in values


def _merged_shape(n: Op) -> tuple[Shape | None, ...]:
    shapes = [
        fact.shape for fact in n.inputs if fact.placement not in (UNKNOWN, ANY) or fact.shape is not None
    ]
    first = shapes[0] if shapes else None
    if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
        return (None, ())
    return (
        tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*filter(None, shapes), strict=True)),
        (),
    )


def _merged_value(n: Op) -> tuple[tuple[Dim, ...] | None, ...]:
    values = {fact.value for fact in n.inputs if fact.placement != UNKNOWN}
    return (values.pop() if len(values) == 1 else None, None)


def _scalar(n: Op) -> tuple[Shape]:
    return ((),)


SWITCH = Rule(_switch, _both_shapes, _both_values)
MERGE = Rule(_merge, _merged_shape, _merged_value)
ENTER = Rule(_enter, _same_shape, _enter_value)
CARRY = Rule(_carry, _same_shape)

RULES: dict[str, Rule] = {
    "Switch": SWITCH,
    "RefSwitch": SWITCH,
    "Merge": MERGE,
    "RefMerge": MERGE,
    "Enter": ENTER,
    "RefEnter": ENTER,
    "Exit": CARRY,
    "RefExit": CARRY,
    "NextIteration": CARRY,
    "RefNextIteration": CARRY,
    "LoopCond": Rule(whole, _scalar),
}
