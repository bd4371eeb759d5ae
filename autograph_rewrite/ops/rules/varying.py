"""Values that differ between replicas by nature: each replica computes on with its own.

    id: own      x: split(0)      x * id     split(0)         each example with the number of its replica
    id: own      w: replicated    w * id     own
    id: own      s: partial(sum)  s * id     partial(sum)     each contribution with its number

A value of a replica's own takes part as if it were replicated; what would be replicated then is the replica's own, too.
Where a rule would cut it, or count it once in a sum, the op works on whole values, and what it makes is the replica's
own. A draw without state may have a seed of the replica's own. What acts for all replicas (a condition, a variable, a
table, printing) cannot take it: that is refused when all is placed (`passes.canonicalize.varying_values`).
"""

from __future__ import annotations

from autograph_rewrite.ir.format.annotations import placement_of
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ops.facts.placement import LOCAL, REPLICATED, Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import local_entry, read_symbol
from autograph_rewrite.ops.rules.base import OWN_VALUE, Op, Placed, Rule, others_whole, whole
from autograph_rewrite.ops.traits import SWITCHES, has

_HANDLES = frozenset((dtypes.RESOURCE, dtypes.VARIANT))


def place_varying(n: Op, rule: Rule) -> Placed:
    """Leave each replica its own; where the op acts for all of them, ask for one value, which there is none of."""
    own = [i for i, fact in enumerate(n.inputs) if fact.placement == OWN_VALUE]
    if _acts_for_all(n, own):
        return whole(n)
    if rule.pinned:
        return _place_draw(n)
    seen = n._replace(inputs=tuple(f._replace(placement=REPLICATED) if i in own else f for i, f in enumerate(n.inputs)))
    placed = rule.place(seen)
    if placed is None or placed.holds is not None or any(i in placed.operand_reshards for i in own):
        return Placed((OWN_VALUE,) * len(n.output_dtypes), others_whole(n, *own))
    outputs = tuple(OWN_VALUE if one in (REPLICATED, LOCAL) else one for one in placed.outputs)
    return placed._replace(outputs=outputs, zero=())


def _place_draw(n: Op) -> Placed:
    """Let each replica draw with a seed of its own: its block, where the shape is that of one."""
    dim = local_entry(n.value(0))
    if n.placement(0) == LOCAL and dim is not None:
        return Placed((split(dim),) * len(n.output_dtypes))
    return Placed((OWN_VALUE,) * len(n.output_dtypes), {0: REPLICATED} if n.inputs[0].is_local else {})


def place_of_one(n: Op) -> Placed:
    """Let a copy take its block for all there is: what it makes is the replica's own."""
    return Placed((OWN_VALUE,) * len(n.output_dtypes))


def let_out_mark(fact: Fact) -> str:
    """Return the mark of a node that lets out what each replica has of its own as what a fact says: `split(0) 2*b`."""
    if not fact.placement.is_split or fact.shape is None:
        return repr(fact.placement)
    return f"{fact.placement!r} {fact.shape[fact.placement.dim]!r}"


def let_out_as(mark: str, own: Fact) -> Fact:
    """Return the fact of a value that is let out.

    Args:
        own: the fact of what each replica has.
    """
    text, _, rows = mark.partition(" ")
    placement = placement_of(text)
    shape = own.shape
    if placement.is_split and shape is not None and rows:
        shape = (*shape[: placement.dim], read_symbol(rows), *shape[placement.dim + 1 :])
    return Fact(placement, own.dtype, shape)


def _acts_for_all(n: Op, own: list[int]) -> bool:
    """Return whether one run of an op counts for all replicas."""
    if n.op == "LoopCond" or (n.op in SWITCHES and 1 in own):
        return True
    if any(dtypes.base(dtype) in _HANDLES for dtype in (*[f.dtype for f in n.inputs], *n.output_dtypes)):
        return True
    return not (is_pure(n.op) or has(n.op, "routes"))
