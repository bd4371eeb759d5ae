"""Decompose the best of classes that are cut: each device finds its own, and the best of those are the best of all.

    before   TopKV2(z, k)                                      z [n, C], of which C is cut into U blocks
    after    TopKV2(z as [n, U, C / U], k) ─► [n, U k]         each device its own: k candidates
             TopKV2(candidates, k), GatherV2(their classes)    of U k values, instead of C

    before   InTopK(z, labels, k)
    after    z at label > 0 of others: Sum(z > Sum(z where class == label)) < k, and All(z is finite)

Candidates stand in the order of their classes, so that of equal ones the first counts, as in the kernel of TopKV2.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.canonicalize.class_pieces import ClassPieces, is_read


def top_k(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    """Return the best values and their classes.

    Args:
        pieces: adds nodes; of a matrix, whose blocks have more than one class.
        node: a TopKV2 or TopK that sorts.
    """
    values, best, (units, block) = node.inputs[0], best_of(pieces, node), pieces.blocks
    each = min(best, block)
    index_type = node.output_dtypes[1]
    apart = pieces("Reshape", values, pieces.const([-1, units, block], dtypes.INT32, "apart"), name="blocks")
    found = pieces("TopKV2", apart, pieces.const(each, dtypes.INT32, "each"), name="own", index_type=index_type)
    joined = pieces.const([-1, units * each], dtypes.INT32, "joined")
    candidates = pieces("Reshape", found, joined, name="candidates")
    first = pieces.const(np.arange(units).reshape(1, units, 1) * block, index_type, "first_classes")
    pieces.numbered[first] = 1
    own = pieces("AddV2", found.node.output(1), first, name="own_classes")
    classes = pieces("Reshape", own, joined, name="classes")
    count = pieces.const(best, dtypes.INT32, "k")
    chosen = pieces("TopKV2", candidates, count, name="best", index_type=index_type)
    results = {0: chosen} if is_read(node, 0) else {}
    if is_read(node, 1):
        axis = pieces.const(1, dtypes.INT32, "axis")
        results[1] = pieces("GatherV2", classes, chosen.node.output(1), axis, name="best_classes", batch_dims=1)
    return results


def in_top_k(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    """Return whether each label is among the best; it is not where some value is no finite number.

    Args:
        pieces: adds nodes.
        node: an InTopK or InTopKV2.
    """
    values, labels = node.inputs[:2]
    column = pieces("ExpandDims", labels, pieces.const(1, dtypes.INT32, "last"), name="label_of_row")
    mask = pieces("Equal", column, pieces.numbers(labels.dtype), name="is_label")
    own = pieces.reduce("Sum", pieces.only(mask, values, "picked"), "of_label")
    better = pieces.cast(pieces("Greater", values, own, name="better"), dtypes.INT32, "counted")
    count = pieces.reduce("Sum", better, "count", keep=False)
    few = pieces("Less", count, pieces.const(best_of(pieces, node), dtypes.INT32, "k"), name="few")
    finite = pieces.reduce("All", pieces("IsFinite", values, name="is_finite"), "finite", keep=False)
    known = pieces.reduce("Any", mask, "known", keep=False)
    return {0: pieces("LogicalAnd", few, pieces("LogicalAnd", finite, known, name="valid"), name="among")}


def best_of(pieces: ClassPieces, node: Node) -> int:
    """Return how many are the best.

    Args:
        pieces: those of the node.
        node: whose constant operand, or attribute, says it.
    """
    return pieces.count if pieces.count is not None else int(node.attr("k"))
