"""Marked pairs of ops that partition the rows of a batch and stitch them together again.

    block of texts ──► StringSplitV2 ──► words, and the row of each ──► RaggedTensorToTensor ──► block of rows of words

The numbers of rows are those of the block, which nobody else may read (`passes.localize.dynamic_partition`); words are
blocks of words.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import split
from autograph_rewrite.ops.facts.symbolic_dims import are_same
from autograph_rewrite.ops.rules.base import Op, Placed, others_whole, whole
from autograph_rewrite.ops.traits import has

ROWS_APART = "_autograph_rows_apart"
"""The attribute that marks both ends."""


def place_rows_apart(n: Op) -> Placed:
    """Leave each replica its rows where all inputs with rows are cut by them."""
    rows = _inputs_with_rows(n)
    blocks = [n.placement(i) == split(0) for i in rows]
    sizes = [n.inputs[i].split_size for i in rows]
    aligned = not has(n.op, "crosses") or all(are_same(size, sizes[0]) for size in sizes)
    if not all(blocks) or not aligned:
        placed = whole(n)
        return placed._replace(decompose=any(blocks) and n.op in ("SparseToDense", "RaggedTensorToTensor"))
    return Placed((split(0),) * len(n.output_dtypes), others_whole(n, *rows, *_sizes(n)))


def _inputs_with_rows(n: Op) -> tuple[int, ...]:
    if has(n.op, "crosses"):
        return tuple(i for i in range(len(n.inputs)) if n.rank(i) == 2)
    return {"SparseToDense": (0, 2), "RaggedTensorToTensor": (1, 4)}.get(n.op, (0,))


def _sizes(n: Op) -> tuple[int, ...]:
    """Return the inputs that say how many rows there are, for a block as for the whole."""
    return {"SparseToDense": (1,), "RaggedTensorToTensor": (3,)}.get(n.op, ())
