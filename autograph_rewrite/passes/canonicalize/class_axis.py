"""Decompose softmax, its losses and extremes along a dimension that is cut, so that no device needs all classes.

    before   SparseSoftmaxCrossEntropyWithLogits(z, labels)           z [n, C], of which C is cut
    after    m = Max(z) ─► s = z - m ─► e = Exp(s) ─► t = Sum(e)      partial(max), partial(sum): [n, 1] each
             loss = Log(t) - Sum(s where class == label)              partial(sum)
             gradient = e / t - (class == label)                      cut like z

    before   ArgMax(z)
    after    Min(class where z == Max(z))                             partial(max), then partial(min)

The formulas are those of TensorFlow's kernels; the vocabulary-parallel loss is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.replace_op import replace_outputs
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import to_global, unit
from autograph_rewrite.ops.rules.marked import is_whole
from autograph_rewrite.ops.traits import has, ops_with

# Decompose top-k over classes that are cut: each device finds its best, and the best of those are the best of all.
#
#     before   TopKV2(z, k)                                      z [n, C], of which C is cut into U blocks
#     after    TopKV2(z as [n, U, C / U], k) ─► [n, U k]         each device its own: k candidates
#              TopKV2(candidates, k), GatherV2(their classes)    of U k values, instead of C
#
#     before   InTopK(z, labels, k)
#     after    z at label > 0 of others: Sum(z > Sum(z where class == label)) < k, and All(z is finite)
#
# Candidates are in the order of their classes, so that the first of equal ones counts, as in the kernel of TopKV2.


def top_k(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    """Return the best values and their classes.

    Args:
        node: a TopKV2 or TopK that sorts.
    """
    values, best, (units, block) = node.inputs[0], pieces.count, pieces.blocks
    each = min(best, block)
    index_type = node.output_dtypes[1]
    apart = pieces.op("Reshape", values, pieces.const([-1, units, block], dtypes.INT32, "apart"), what="blocks")
    found = pieces.op("TopKV2", apart, pieces.const(each, dtypes.INT32, "each"), what="own", index_type=index_type)
    joined = pieces.const([-1, units * each], dtypes.INT32, "joined")
    candidates = pieces.op("Reshape", found, joined, what="candidates")
    first = pieces.const(np.arange(units).reshape(1, units, 1) * block, index_type, "first_classes")
    pieces.numbered[first] = 1
    own = pieces.op("AddV2", found.node.output(1), first, what="own_classes")
    classes = pieces.op("Reshape", own, joined, what="classes")
    count = pieces.const(best, dtypes.INT32, "k")
    chosen = pieces.op("TopKV2", candidates, count, what="best", index_type=index_type)
    results = {0: chosen} if is_read(node, 0) else {}
    if is_read(node, 1):
        axis = pieces.const(1, dtypes.INT32, "axis")
        results[1] = pieces.op("GatherV2", classes, chosen.node.output(1), axis, what="best_classes", batch_dims=1)
    return results


def in_top_k(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    """Return whether each label is among the best; false for a row with a value that is not finite."""
    values, labels = node.inputs[:2]
    column = pieces.op("ExpandDims", labels, pieces.const(1, dtypes.INT32, "last"), what="label_of_row")
    mask = pieces.op("Equal", column, pieces.numbers(labels.dtype), what="is_label")
    own = pieces.reduce("Sum", pieces.only(mask, values, "picked"), "of_label")
    better = pieces.cast(pieces.op("Greater", values, own, what="better"), dtypes.INT32, "counted")
    count = pieces.reduce("Sum", better, "count", keep=False)
    few = pieces.op("Less", count, pieces.const(pieces.count, dtypes.INT32, "k"), what="few")
    finite = pieces.reduce("All", pieces.op("IsFinite", values, what="is_finite"), "finite", keep=False)
    known = pieces.reduce("Any", mask, "known", keep=False)
    return {0: pieces.op("LogicalAnd", few, pieces.op("LogicalAnd", finite, known, what="valid"), what="among")}


_FLOATS = (dtypes.FLOAT, dtypes.DOUBLE)
_ORDERED = (*_FLOATS, dtypes.INT32, dtypes.INT64)


def cut_classes(state: Propagation) -> list[tuple[Node, ClassAxis]]:
    """Return the nodes that work along a cut dimension and can be decomposed, each with that dimension."""
    free = [node for node in state.order if node.op in _DECOMPOSITIONS and node not in state.looped]
    found = [(node, _classes(state, node)) for node in free if not is_whole(node)]
    return [(node, axis) for node, axis in found if axis is not None]


def decompose_classes(graph: Graph, node: Node, axis: ClassAxis) -> dict[Value, int]:
    """Rewrite a node; return the constants that are to be cut along the classes, each with its class dimension.

    Args:
        node: works along the classes.
        axis: the class dimension of its first operand.
    """
    pieces = ClassPieces(graph, node.name, node, ONCE, "", None, *axis)
    replace_outputs(graph, node, _DECOMPOSITIONS[node.op](pieces, node))
    return pieces.numbered


def _classes(state: Propagation, node: Node) -> ClassAxis | None:
    """Return the dimension of classes; None unless it is cut and each device can compute its part."""
    facts = [state.facts[value] for value in node.inputs]
    rank = facts[0].rank
    if not rank or facts[0].dtype not in (_ORDERED if has(node.op, "extremes", "top") else _FLOATS):
        return None
    dim = rank - 1
    if has(node.op, "extremes"):
        stated = facts[1].value
        if stated is None or not isinstance(stated[0], int):
            return None
        dim = stated[0] % rank
    both = facts[:2] if node.op == "SoftmaxCrossEntropyWithLogits" else facts[:1]
    sizes = {to_global(fact.shape[dim], state.semantics.extent.units) if fact.shape else None for fact in both}
    size = sizes.pop()
    if sizes or not isinstance(size, int) or all(fact.placement != split(dim) for fact in both):
        return None
    block = next(unit(fact.split_size) or 1 for fact in both if fact.placement == split(dim))
    axis = ClassAxis(dim, rank, size, (size // block, block))
    return _counted(node, facts, axis) if has(node.op, "top", "in_top") else axis


def _counted(node: Node, facts: Sequence[Fact], axis: ClassAxis) -> ClassAxis | None:
    """Return the class dimension of a top-k op with its k; None if the devices cannot find candidates separately."""
    told = {"TopKV2": 1, "InTopKV2": 2}.get(node.op)
    stated = facts[told].value if told is not None else (node.attr("k"),)
    if stated is None or not isinstance(stated[0], int):
        return None
    (units, block), count = axis.blocks, stated[0]
    if has(node.op, "top") and (axis.rank != 2 or not node.attr("sorted") or units * min(count, block) >= axis.classes):
        return None
    return axis._replace(asked=count)


def _softmax(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    _, powers, total = pieces.exponentials(node.inputs[0])
    return {0: pieces.op("RealDiv", powers, total, what="softmax")}


def _log_softmax(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    shifted, _, total = pieces.exponentials(node.inputs[0])
    return {0: pieces.op("Sub", shifted, pieces.op("Log", total, what="log"), what="log_softmax")}


def _cross_entropy(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    logits, labels = node.inputs
    shifted, powers, total = pieces.exponentials(logits)
    found = {}
    if is_read(node, 0):
        unlikely = pieces.op("Sub", pieces.op("Log", total, what="log"), shifted, what="unlikely")
        found[0] = pieces.reduce("Sum", pieces.op("Mul", labels, unlikely, what="terms"), "loss", keep=False)
    if is_read(node, 1):
        found[1] = pieces.op("Sub", pieces.op("RealDiv", powers, total, what="softmax"), labels, what="gradient")
    return found


def _sparse_cross_entropy(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    logits, labels = node.inputs
    shifted, powers, total = pieces.exponentials(logits)
    # A gather refuses a label that is no class, as the kernel of the loss does.
    every = pieces.const(np.arange(pieces.classes), labels.dtype, "valid")
    label = pieces.op("GatherV2", every, labels, pieces.const(0, dtypes.INT32, "first"), what="label")
    label = pieces.op("ExpandDims", label, pieces.const(1, dtypes.INT32, "last"), what="label_of_row")
    mask = pieces.op("Equal", label, pieces.numbers(labels.dtype), what="is_label")
    found = {}
    if is_read(node, 0):
        picked = pieces.reduce("Sum", pieces.only(mask, shifted, "picked"), "of_label", keep=False)
        log = pieces.op("Log", pieces.op("Squeeze", total, what="total", squeeze_dims=(1,)), what="log")
        found[0] = pieces.op("Sub", log, picked, what="loss")
    if is_read(node, 1):
        softmax = pieces.op("RealDiv", powers, total, what="softmax")
        found[1] = pieces.op("Sub", softmax, pieces.cast(mask, logits.dtype, "one_hot"), what="gradient")
    return found


def _extreme(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    """Return the first class that has the extreme value; NaN never counts, as in the kernel."""
    values, most = node.inputs[0], node.op == "ArgMax"
    if values.dtype in _FLOATS:
        worst = pieces.const(-np.inf if most else np.inf, values.dtype, "worst")
        values = pieces.op("SelectV2", pieces.op("IsNan", values, what="is_nan"), worst, values, what="numbers")
    extreme = pieces.reduce("Max" if most else "Min", values, "extreme")
    mask = pieces.op("Equal", values, extreme, what="is_extreme")
    none = pieces.const(pieces.classes, dtypes.INT32, "none")
    candidates = pieces.op("SelectV2", mask, pieces.numbers(dtypes.INT32), none, what="candidates")
    first = pieces.reduce("Min", candidates, "first", keep=False)
    return {0: pieces.cast(first, node.output_dtypes[0], "narrow")}


_DECOMPOSITIONS: Mapping[str, Callable[[ClassPieces, Node], dict[int, Value]]] = {
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": _sparse_cross_entropy,
    **dict.fromkeys(ops_with("extremes"), _extreme),
    **dict.fromkeys(ops_with("top"), top_k),
    **dict.fromkeys(ops_with("in_top"), in_top_k),
}


# Pieces of the decompositions: reductions along the dimension of classes, and the number of each class.
#
#     numbers      [[0, 1, ..., C - 1]]      each device has those of its block
#     only(m, z)   z where m is set, else 0
#
# Constants along the classes are later cut to the classes of each device (`numbered`).


class ClassAxis(NamedTuple):
    """The dimension of the classes.

    Attributes:
        dim: its position in the operand.
        rank: of the operand.
        classes: how many there are.
        blocks: how many units the devices' blocks are counted in, and how many classes each unit has.
        asked: the k of a top-k op.
    """

    dim: int
    rank: int
    classes: int
    blocks: tuple[int, int]
    asked: int = 0


@dataclass(frozen=True)
class ClassPieces(Builder):
    """Adds pieces that work along classes.

    Attributes:
        dim: the position of the class dimension in the operand.
        rank: of the operand.
        classes: how many there are.
        blocks: how many units the devices' blocks are counted in, and how many classes each unit has.
        count: the k of a top-k op.
        numbered: the added constants of class numbers, each with its class dimension.
    """

    dim: int = 0
    rank: int = 0
    classes: int = 0
    blocks: tuple[int, int] = (1, 1)
    count: int = 0
    numbered: dict[Value, int] = field(default_factory=dict)

    def reduce(self, op: str, value: Value, name: str, *, keep: bool = True) -> Value:
        """Reduce along the classes; with `keep`, their dimension stays with size 1."""
        axis = self.const([self.dim], dtypes.INT32, f"{name}/axis")
        return self.op(op, value, axis, what=name, keep_dims=keep)

    def numbers(self, dtype: int) -> Value:
        """Return the number of each class, along the class dimension."""
        shape = [self.classes if dim == self.dim else 1 for dim in range(self.rank)]
        made = self.const(np.arange(self.classes).reshape(shape), dtype, "classes")
        self.numbered[made] = self.dim
        return made

    def exponentials(self, logits: Value) -> tuple[Value, Value, Value]:
        """Return logits less their maximum, the exponentials of that, and the sum of these."""
        shifted = self.op("Sub", logits, self.reduce("Max", logits, "max"), what="shifted")
        powers = self.op("Exp", shifted, what="exp")
        return shifted, powers, self.reduce("Sum", powers, "sum")

    def only(self, mask: Value, value: Value, name: str) -> Value:
        """Return a value where a mask is set, else zero."""
        return self.op("SelectV2", mask, value, self.const(0, value.dtype, f"{name}/zero"), what=name)


def is_read(node: Node, index: int) -> bool:
    """Return whether an output has readers or an anchor."""
    value = node.output(index)
    return bool(value.uses) or value in value.node.graph.anchors.values()
