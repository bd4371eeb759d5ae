"""Contractions (MatMul, BatchMatMul, Einsum): contracting the split dimension gives a partial result.

Every dimension gets a label; both sides of a contraction share theirs. A split label that the output keeps stays split,
one that is summed away makes the output partial, and operands that are whole but have the label are sliced.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.analysis.dims import Dim, unit
from autograph_rewrite.analysis.fact import PARTIAL, REPLICATED, Shape, split
from autograph_rewrite.analysis.rules.base import Op, Placed, Rule, Slice, Want, whole
from autograph_rewrite.analysis.rules.elementwise import broadcast
from autograph_rewrite.ir import dtypes

Labels = Sequence[str]


def contraction(n: Op, labels: Sequence[Labels], output: Labels) -> Placed:
    """Place an op that multiplies its inputs and sums over the labels that `output` lacks."""
    partial = [i for i in range(len(labels)) if n.placement(i).is_partial]
    others = [i for i in range(len(labels)) if i not in partial]
    if partial:
        one = len(partial) == 1 and n.placement(partial[0]) == PARTIAL
        if one and all(n.placement(i) == REPLICATED for i in others) and n.output_dtypes[0] in dtypes.INEXACT:
            return Placed((PARTIAL,))
    chosen = _split_label(n, labels)
    if chosen is None:
        return whole(n)
    label, size = chosen
    wants: dict[int, Want] = {}
    for i, mine in enumerate(labels):
        placement = n.placement(i)
        at = mine.index(label) if label in mine else None
        if at is None:
            if placement.differs:
                wants[i] = REPLICATED
        elif size is None or not (placement == split(at) and n.inputs[i].split_size == size):
            rows = unit(size)
            if rows is None:
                return whole(n)
            wants[i] = Slice(at, rows)
    result = split(output.index(label)) if label in output else PARTIAL
    return Placed((result,), wants)


def _split_label(n: Op, labels: Sequence[Labels]) -> tuple[str, Dim] | None:
    """Choose the label to keep split: one that several operands are split on, else the first operand's."""
    counts: dict[str, int] = {}
    sizes: dict[str, Dim] = {}
    for i, mine in enumerate(labels):
        placement = n.placement(i)
        if placement.is_split and placement.dim < len(mine):
            label = mine[placement.dim]
            counts[label] = counts.get(label, 0) + 1
            sizes.setdefault(label, n.inputs[i].split_size)
    if not counts:
        return None
    label = max(counts, key=lambda key: counts[key])
    return label, sizes[label]


def _matmul_labels(n: Op) -> tuple[list[list[str]], list[str]]:
    a = ["k", "m"] if n.attr("transpose_a") else ["m", "k"]
    b = ["n", "k"] if n.attr("transpose_b") else ["k", "n"]
    return [a, b], ["m", "n"]


def place_matmul(n: Op) -> Placed:
    """Place MatMul."""
    return contraction(n, *_matmul_labels(n))


def _batch_labels(n: Op) -> tuple[list[list[str]], list[str]] | None:
    shapes = n.shape(0), n.shape(1)
    if shapes[0] is None or shapes[1] is None:
        return None
    a = ["k", "m"] if n.attr("adj_x") else ["m", "k"]
    b = ["n", "k"] if n.attr("adj_y") else ["k", "n"]
    rank = max(len(shapes[0]), len(shapes[1]))
    batch = [f"batch{i}" for i in range(rank - 2)]
    labels = []
    for i, (shape, last) in enumerate(zip(shapes, (a, b), strict=True)):
        mine = batch[rank - len(shape) :]
        # A dimension of size 1 broadcasts: it is not this label's dimension.
        mine = [f"one{i}_{j}" if shape[j] == 1 else name for j, name in enumerate(mine)]
        labels.append(mine + last)
    return labels, [*batch, "m", "n"]


def place_batch_matmul(n: Op) -> Placed:
    """Place BatchMatMul, V2 and V3."""
    found = _batch_labels(n)
    return whole(n) if found is None else contraction(n, *found)


def _einsum_labels(n: Op) -> tuple[list[list[str]], list[str]] | None:
    equation = n.attr("equation").decode().replace(" ", "")
    left, _, right = equation.partition("->")
    labels = []
    for i, term in enumerate(left.split(",")):
        rank = n.rank(i)
        if rank is None:
            return None
        before, dots, after = term.partition("...")
        extra = rank - len(before) - len(after)
        middle = [f"dots{j}" for j in range(extra - 1, -1, -1)] if dots else []  # counted from the right
        labels.append([*before, *middle, *after])
    widest = max((sum(x.startswith("dots") for x in mine) for mine in labels), default=0)
    before, dots, after = right.partition("...")
    output = [*before, *([f"dots{j}" for j in range(widest - 1, -1, -1)] if dots else []), *after]
    return labels, output


def place_einsum(n: Op) -> Placed:
    """Place Einsum; a repeated label inside one operand (a diagonal) is handled whole."""
    found = _einsum_labels(n)
    if found is None or any(len(set(mine)) != len(mine) for mine in found[0]):
        return whole(n)
    return contraction(n, *found)


def shape_matmul(n: Op) -> tuple[Shape | None, ...]:
    """Rows of the first, columns of the second."""
    a, b = n.shape(0), n.shape(1)
    if a is None or b is None:
        return (None,)
    return ((a[1] if n.attr("transpose_a") else a[0], b[0] if n.attr("transpose_b") else b[1]),)


def shape_batch_matmul(n: Op) -> tuple[Shape | None, ...]:
    """Broadcast the batch dimensions; rows of the first, columns of the second."""
    a, b = n.shape(0), n.shape(1)
    if a is None or b is None:
        return (None,)
    batch = broadcast([a[:-2], b[:-2]])
    if batch is None:
        return (None,)
    return ((*batch, a[-1] if n.attr("adj_x") else a[-2], b[-2] if n.attr("adj_y") else b[-1]),)


def shape_einsum(n: Op) -> tuple[Shape | None, ...]:
    """Look each output label up in the operands."""
    found = _einsum_labels(n)
    if found is None:
        return (None,)
    labels, output = found
    sizes: dict[str, Dim] = {}
    for i, mine in enumerate(labels):
        for label, dim in zip(mine, n.shape(i) or (), strict=False):
            if sizes.get(label, 1) in (1, None):
                sizes[label] = dim
    return (tuple(sizes.get(label) for label in output),)


RULES = {
    "MatMul": Rule(place_matmul, shape_matmul, family="contract"),
    "Einsum": Rule(place_einsum, shape_einsum, family="contract"),
} | {
    op: Rule(place_batch_matmul, shape_batch_matmul, family="contract")
    for op in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
}
