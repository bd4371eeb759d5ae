"""Contractions (MatMul, BatchMatMul, Einsum): contracting the split dimension gives a partial result.

Every dimension gets a label; both sides of a contraction share theirs. A split label that the output keeps stays split,
one that is summed away makes the output partial, and operands that are whole but have the label are sliced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import (
    Dim,
    are_rows,
    broadcast,
    broadcast_dim,
    is_whole_of,
    to_global,
)
from autograph_rewrite.ops.rules.base import Attr, Numbers, Op, Placed, Reshard, Rule, block_of, whole
from autograph_rewrite.ops.rules.einsum_scratch import scratch_elements

Labels = Sequence[str]
STRETCHES = "..."
"""How the labels of dimensions begin that broadcast: an operand may have size 1 there."""


def contraction(n: Op, labels: Sequence[Labels], output: Labels) -> Placed:
    """Place an op that multiplies its inputs and sums over the labels that `output` lacks.

    Args:
        labels: of each operand's dimensions.
        output: labels of the result's dimensions.
    """
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
    if any(mine.count(label) > 1 for mine in (*labels, output)):
        return whole(n)  # a block of rows has the columns of all rows: its diagonal lies elsewhere
    alone = sum(label in mine for mine in labels) == 1  # blocks of unknown sizes need not line up
    operand_reshards: dict[int, Reshard] = {}
    for i, mine in enumerate(labels):
        reshard = _operand_want(n, i, mine.index(label) if label in mine else None, label, size, alone)
        if reshard is None:
            return whole(n)
        if reshard != n.placement(i):
            operand_reshards[i] = reshard
    result = split(output.index(label)) if label in output else PARTIAL
    return Placed((result,), operand_reshards)


def _operand_want(n: Op, index: int, at: int | None, label: str, size: Dim, alone: bool) -> Reshard | None:
    """Return what an operand must be where `label`, its dimension `at`, is split; None where that is not known."""
    fact = n.inputs[index]
    if at is None:
        return REPLICATED if fact.placement.differs else fact.placement
    if fact.placement == split(at) and (are_rows(fact.split_size, size) or alone):
        return fact.placement
    block = block_of(at, size)
    if block is None:
        return None
    batch = n.semantics.extent.units
    if label.startswith(STRETCHES) and not is_whole_of(to_global((fact.shape or ())[at], batch), size, batch):
        return None
    return block


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


def _stretching(n: Op, index: int, first: int, count: int) -> list[str]:
    """Return the labels of the `count` dimensions from `first` on, counted from the right as they broadcast.

    A dimension of size 1 stretches: it is not the dimension of that label, so it gets one of its own.
    """
    shape = n.shape(index) or ()
    return [
        f"one{index}_{at}" if shape[at] == 1 else f"{STRETCHES}{first + count - 1 - at}"
        for at in range(first, first + count)
    ]


def _stretched(ranks: Iterable[int]) -> list[str]:
    """Return the labels of the result's broadcast dimensions."""
    return [f"{STRETCHES}{i}" for i in reversed(range(max(ranks, default=0)))]


def _batch_labels(n: Op) -> tuple[list[list[str]], list[str]] | None:
    ranks = [n.rank(0), n.rank(1)]
    if any(rank is None or rank < 2 for rank in ranks):
        return None
    known = [rank - 2 for rank in ranks if rank is not None]
    a = ["k", "m"] if n.attr("adj_x") else ["m", "k"]
    b = ["n", "k"] if n.attr("adj_y") else ["k", "n"]
    labels = [_stretching(n, i, 0, rank) + last for i, (rank, last) in enumerate(zip(known, (a, b), strict=True))]
    return labels, [*_stretched(known), "m", "n"]


def place_batch_matmul(n: Op) -> Placed:
    """Place BatchMatMul, V2 and V3."""
    found = _batch_labels(n)
    return whole(n) if found is None else contraction(n, *found)


def _einsum_labels(n: Op) -> tuple[list[list[str]], list[str]] | None:
    equation = n.attr("equation").decode().replace(" ", "")
    left, _, right = equation.partition("->")
    labels, extras = [], []
    for i, term in enumerate(left.split(",")):
        rank = n.rank(i)
        if rank is None:
            return None
        before, dots, after = term.partition("...")
        extra = rank - len(before) - len(after) if dots else 0
        extras.append(extra)
        labels.append([*before, *_stretching(n, i, len(before), extra), *after])
    before, dots, after = right.partition("...")
    return labels, [*before, *(_stretched(extras) if dots else []), *after]


def place_einsum(n: Op) -> Placed:
    """Place Einsum."""
    found = _einsum_labels(n)
    return whole(n) if found is None else contraction(n, *found)


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
            known = sizes.get(label)
            stretches = label in sizes and label.startswith(STRETCHES)
            sizes[label] = broadcast_dim(known, dim) if stretches else dim if known in (1, None) else known
    # A stretching dimension that no operand has is 1 in all of them.
    return (tuple(sizes.get(label, 1 if label.startswith(STRETCHES) else None) for label in output),)


def matmul_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Two for each element of the result and of the contracted dimension."""
    turned = any(attr(key, False) for key in ("transpose_a", "adj_x"))
    return 2.0 * math.prod(outputs[0]) * inputs[0][-2 if turned else -1]


def _einsum_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Two for each combination of labels; one where nothing is multiplied."""
    equation = attr("equation")
    left = (equation.decode() if isinstance(equation, bytes) else str(equation)).partition("->")[0]
    sizes: dict[str, int] = {}
    for term, shape in zip(left.split(","), inputs, strict=True):
        letters = term.replace("...", "")
        sizes.update(zip(letters, shape[len(shape) - len(letters) :], strict=True))
        sizes["..."] = max(sizes.get("...", 1), math.prod(shape[: len(shape) - len(letters)]))
    repeated = Counter(left.replace(",", ""))
    return (2.0 if len(inputs) > 1 and repeated else 1.0) * math.prod(sizes.values())


RULES = {
    "MatMul": Rule(place_matmul, shape_matmul, work=matmul_work),
    "Einsum": Rule(
        place_einsum,
        shape_einsum,
        work=_einsum_work,
        scratch=lambda attr, inputs: scratch_elements(attr("equation").decode(), inputs),
    ),
} | {
    op: Rule(place_batch_matmul, shape_batch_matmul, work=matmul_work)
    for op in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
}
