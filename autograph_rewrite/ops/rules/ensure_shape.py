"""EnsureShape is an identity with a check; the shape that it states is that of the global value.

With [None, 6] every block has the same 6, so each replica checks its block. The 4 of [4, 6] counts the whole batch: the
op is decomposed into a check of the whole size, and a check of the blocks that leaves that dimension open.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.base import Op, Placed, Rule
from autograph_rewrite.ops.rules.elementwise import value_same


def place_ensured(n: Op) -> Placed:
    """Pass the value on; a number stated for the split dimension is the size of the whole, not of a block."""
    placement, stated = n.placement(0), n.attr("shape")
    fixed = placement.is_split and stated is not None and placement.dim < len(stated)
    counts = fixed and stated[placement.dim] is not None
    return Placed((placement,), decompose=counts, zero=(n.inputs[0].zero,))


def shape_ensured(n: Op) -> tuple[Shape | None, ...]:
    """Return the value's shape, with the stated sizes of the dimensions that are not split."""
    known, stated, placement = n.shape(0), n.attr("shape"), n.placement(0)
    if stated is None or (known is not None and len(known) != len(stated)):
        return (known,)
    sizes: list[Dim] = list(known) if known is not None else [None] * len(stated)
    for dim, size in enumerate(stated):
        if size is not None and not (placement.is_split and dim == placement.dim):
            sizes[dim] = size
    return (tuple(sizes),)


RULES: dict[str, Rule] = {"EnsureShape": Rule(place_ensured, shape_ensured, value_same)}
