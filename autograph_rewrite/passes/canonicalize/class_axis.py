"""Decompose softmax, its losses and extremes along a dimension that is cut, so that no device needs all classes.

    before   SparseSoftmaxCrossEntropyWithLogits(z, labels)           z [n, C], of which C is cut
    after    m = Max(z) ─► s = z - m ─► e = Exp(s) ─► t = Sum(e)      partial(max), partial(sum): [n, 1] each
             loss = Log(t) - Sum(s where class == label)              partial(sum)
             gradient = e / t - (class == label)                      cut like z

    before   ArgMax(z)
    after    Min(class where z == Max(z))                             partial(max), then partial(min)

`class_top_k` has the best of several.

The formulas are those of TensorFlow's kernels; the vocabulary-parallel loss is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autograph_rewrite.analysis.facts.placement import Fact, split
from autograph_rewrite.analysis.facts.symbolic_dims import to_global, unit
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.rules.base import WHOLE
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import has, ops_with
from autograph_rewrite.passes.canonicalize.class_pieces import Axis, ClassPieces, is_read
from autograph_rewrite.passes.canonicalize.class_top_k import in_top_k, top_k
from autograph_rewrite.passes.canonicalize.pieces import finish

_FLOATS = (dtypes.FLOAT, dtypes.DOUBLE)
_ORDERED = (*_FLOATS, dtypes.INT32, dtypes.INT64)


def cut_classes(state: Propagation) -> list[tuple[Node, Axis]]:
    """Return the nodes that work along a dimension that is cut, and can be decomposed.

    Args:
        state: the placements.
    """
    free = [node for node in state.order if node.op in _DECOMPOSITIONS and node not in state.looped]
    found = [(node, _classes(state, node)) for node in free if not node.attr(WHOLE, False)]
    return [(node, axis) for node, axis in found if axis is not None]


def decompose_classes(graph: Graph, node: Node, axis: Axis) -> dict[Value, int]:
    """Rewrite a node; return the constants of which each device needs the part for its classes.

    Args:
        graph: edited in place.
        node: what works along the classes.
        axis: of its first operand, that of the classes.
    """
    pieces = ClassPieces(graph, node, axis)
    finish(graph, node, _DECOMPOSITIONS[node.op](pieces, node))
    return pieces.numbered


def _classes(state: Propagation, node: Node) -> Axis | None:
    """Return the dimension of classes where it is cut, and each device can do its part; None otherwise."""
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
    sizes = {to_global(fact.shape[dim], state.semantics.batch) if fact.shape else None for fact in both}
    size = sizes.pop()
    if sizes or not isinstance(size, int) or all(fact.placement != split(dim) for fact in both):
        return None
    block = next(unit(fact.split_size) or 1 for fact in both if fact.placement == split(dim))
    axis = Axis(dim, rank, size, (size // block, block))
    return _counted(node, facts, axis) if has(node.op, "top", "in_top") else axis


def _counted(node: Node, facts: Sequence[Fact], axis: Axis) -> Axis | None:
    """Return the classes of a node that counts them, where each device can find its own candidates."""
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
    return {0: pieces("RealDiv", powers, total, name="softmax")}


def _log_softmax(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    shifted, _, total = pieces.exponentials(node.inputs[0])
    return {0: pieces("Sub", shifted, pieces("Log", total, name="log"), name="log_softmax")}


def _cross_entropy(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    logits, labels = node.inputs
    shifted, powers, total = pieces.exponentials(logits)
    found = {}
    if is_read(node, 0):
        unlikely = pieces("Sub", pieces("Log", total, name="log"), shifted, name="unlikely")
        found[0] = pieces.reduce("Sum", pieces("Mul", labels, unlikely, name="terms"), "loss", keep=False)
    if is_read(node, 1):
        found[1] = pieces("Sub", pieces("RealDiv", powers, total, name="softmax"), labels, name="gradient")
    return found


def _sparse_cross_entropy(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    logits, labels = node.inputs
    shifted, powers, total = pieces.exponentials(logits)
    # A gather of each number refuses what is none, as the kernel of the loss does.
    every = pieces.const(np.arange(pieces.classes), labels.dtype, "valid")
    label = pieces("GatherV2", every, labels, pieces.const(0, dtypes.INT32, "first"), name="label")
    label = pieces("ExpandDims", label, pieces.const(1, dtypes.INT32, "last"), name="label_of_row")
    mask = pieces("Equal", label, pieces.numbers(labels.dtype), name="is_label")
    found = {}
    if is_read(node, 0):
        picked = pieces.reduce("Sum", pieces.only(mask, shifted, "picked"), "of_label", keep=False)
        log = pieces("Log", pieces("Squeeze", total, name="total", squeeze_dims=(1,)), name="log")
        found[0] = pieces("Sub", log, picked, name="loss")
    if is_read(node, 1):
        softmax = pieces("RealDiv", powers, total, name="softmax")
        found[1] = pieces("Sub", softmax, pieces.cast(mask, logits.dtype, "one_hot"), name="gradient")
    return found


def _extreme(pieces: ClassPieces, node: Node) -> dict[int, Value]:
    """The first class that has the extreme value; what is not a number never has it, as in the kernel."""
    values, most = node.inputs[0], node.op == "ArgMax"
    if values.dtype in _FLOATS:
        worst = pieces.const(-np.inf if most else np.inf, values.dtype, "worst")
        values = pieces("SelectV2", pieces("IsNan", values, name="is_nan"), worst, values, name="numbers")
    extreme = pieces.reduce("Max" if most else "Min", values, "extreme")
    mask = pieces("Equal", values, extreme, name="is_extreme")
    none = pieces.const(pieces.classes, dtypes.INT32, "none")
    candidates = pieces("SelectV2", mask, pieces.numbers(dtypes.INT32), none, name="candidates")
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
