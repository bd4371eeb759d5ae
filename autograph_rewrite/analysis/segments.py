"""Segments: the blocks of a concatenation along the batch, each made of one block of every operand.

    whole   a0 a1 a2 b0 b1 b2        concat([a, b], 0)
    blocks  a0 a1 b0 b1 | a2 b2      each replica has its rows of a, then its rows of b

What does not ask for the order of rows works on such blocks as on any others: the size of the cut dimension,
`b[1,1]`, keeps what has other rows from lining up with them. Only the op families named here see them. Every other op
reads the whole, in the order of the original, and so does one of theirs that would hand on rows without their segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autograph_rewrite.analysis.facts.placement import Fact
from autograph_rewrite.analysis.facts.symbolic_dims import is_segmented, segments, unit
from autograph_rewrite.analysis.rule_table import families
from autograph_rewrite.analysis.rules.base import WHOLE, Op, Rule
from autograph_rewrite.analysis.rules.marked.blockwise import BLOCKWISE
from autograph_rewrite.analysis.rules.marked.dynamic_partition import ROWS_APART
from autograph_rewrite.ops.traits import has

FAMILIES = families(
    "elementwise", "reduce", "contraction", "layout", "layers", "convolutions", "normalization", "pooling",
    "concat_split", "slicing", "sizes", "ensure_shape",
)  # fmt: skip
"""Rules that follow rows wherever they stand, and line blocks up by their sizes only."""


def read_whole(n: Op, rule: Rule | None) -> tuple[int, ...]:
    """Return the inputs with segments that an op has to read whole."""
    found = tuple(i for i, fact in enumerate(n.inputs) if fact.is_segmented and fact.placement.differs)
    if rule is None or any(n.attr(mark, False) for mark in (BLOCKWISE, ROWS_APART, WHOLE)):
        return found
    if has(n.op, "gathers") or n.op == "ResourceGather":
        return tuple(i for i in found if not i and not n.inputs[0].is_local)
    return () if rule.family in FAMILIES else found


def are_lost(op: str, inputs: Sequence[Fact], outputs: Iterable[Fact]) -> bool:
    """Return whether nobody can tell the segments of what is made of blocks with segments.

    Args:
        op: op type.
        inputs: facts of the operands.
        outputs: facts of the results.
    """
    had = any(fact.placement.is_split and is_segmented(fact.split_size) for fact in inputs)
    for fact in outputs:
        size = fact.split_size
        if not fact.placement.is_split or segments(size):
            continue
        if is_segmented(size) or (had and (not has(op, "cuts") or unit(size) is None)):
            return True
    return False
