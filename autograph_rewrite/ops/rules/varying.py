"""Places ops on varying values: each replica has a different value, and computes with it.

    id: own      x: split(0)      x * id     split(0)         each example with the number of its replica
    id: own      w: replicated    w * id     own
    id: own      s: partial(sum)  s * id     partial(sum)     each contribution with its number

A rule sees a varying operand as replicated; a result that would be replicated is varying. Where the rule would slice
the operand, or count it once in a sum, the op reads its other operands whole, and its results are varying. A stateless
draw may have a varying seed. An op that acts for all replicas (a condition, a variable, a table, printing) cannot read
a varying value: `passes.canonicalize.varying_values` refuses it once all values are placed.
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
    """Place an op with varying operands; if it acts for all replicas, ask for whole values, which is refused later."""
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
    """Let each replica draw with its seed: its block of the result if the shape is that of a block."""
    dim = local_entry(n.value(0))
    if n.placement(0) == LOCAL and dim is not None:
        return Placed((split(dim),) * len(n.output_dtypes))
    return Placed((OWN_VALUE,) * len(n.output_dtypes), {0: REPLICATED} if n.inputs[0].is_local else {})


def place_of_one(n: Op) -> Placed:
    """Let each replica use its block as if it were the whole value: the results are varying."""
    return Placed((OWN_VALUE,) * len(n.output_dtypes))


def let_out_mark(fact: Fact) -> str:
    """Return the mark of a node that turns a varying value into a value with a given fact: `split(0) 2*b`."""
    if not fact.placement.is_split or fact.shape is None:
        return repr(fact.placement)
    return f"{fact.placement!r} {fact.shape[fact.placement.dim]!r}"


def let_out_as(mark: str, own: Fact) -> Fact:
    """Return the fact that a mark states for a varying value; see `let_out_mark`.

    Args:
        own: the fact of the varying value.
    """
    text, _, rows = mark.partition(" ")
    placement = placement_of(text)
    shape = own.shape
    if placement.is_split and shape is not None and rows:
        shape = (*shape[: placement.dim], read_symbol(rows), *shape[placement.dim + 1 :])
    return Fact(placement, own.dtype, shape)


def _acts_for_all(n: Op, own: list[int]) -> bool:
    """Return whether an op acts for all replicas."""
    if n.op == "LoopCond" or (n.op in SWITCHES and 1 in own):
        return True
    if any(dtypes.base(dtype) in _HANDLES for dtype in (*[f.dtype for f in n.inputs], *n.output_dtypes)):
        return True
    return not (is_pure(n.op) or has(n.op, "routes"))
