"""Contractions (MatMul, BatchMatMul, Einsum): contracting the split dimension gives a partial result.

Every dimension gets a label, which both sides of a contraction share. A split label that the output has stays split, a
split label that is summed over makes the output partial, and whole operands with the label are sliced.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from autograph_rewrite.ops.rules.base import Attr, Numbers, Op
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import every

# The copies that an einsum makes while it runs: its kernel multiplies matrices, and transposes other layouts.
#
#     bd,edf->ebf     in 0: free b, contracted d       as it is
#                     in 1: free e, contracted d, free f     e f d: a copy
#                     result b e f                           e b f: a copy
#
# Source: `einsum_op_impl.h` of TensorFlow. Dimensions are ordered as batch, free, contracted, reduced; an operand whose
# contracted dimensions precede its free ones is multiplied as an adjoint, without a copy.


Shape = Sequence[int]
_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)


def scratch_elements(equation: str, inputs: Sequence[Shape]) -> int:
    """Return how many elements an einsum copies while it runs; 0 where the equation has an ellipsis."""
    left, _, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in equation or len(terms) != len(inputs) or any(len(set(term)) < len(term) for term in (*terms, out)):
        return 0
    if any(len(term) != len(shape) for term, shape in zip(terms, inputs, strict=True)):
        return 0
    named = [zip(term, shape, strict=True) for term, shape in zip(terms, inputs, strict=True)]
    sizes = {label: size for pairs in named for label, size in pairs}
    order = {label: i for i, label in enumerate(dict.fromkeys("".join((*terms, out))))}
    kinds = {label: _kind(label, terms, out) for label in order}
    copied, result = 0, [label for label in order if kinds[label] == _BATCH]
    for term in terms:
        wanted = sorted(term, key=lambda label: (kinds[label], order[label]))
        swapped = sorted(
            term, key=lambda label: ((_BATCH, _CONTRACTED, _FREE, _REDUCED).index(kinds[label]), order[label])
        )
        if list(term) != swapped and _moves(term, wanted, sizes):
            copied += math.prod(sizes[label] for label in term)
        result += [label for label in wanted if kinds[label] == _FREE]
    if _moves(result, [label for label in out if label in sizes], sizes):
        copied += math.prod(sizes[label] for label in result)
    return copied


def _kind(label: str, terms: Sequence[str], out: str) -> int:
    everywhere = len(terms) > 1 and all(label in term for term in terms)
    if label in out:
        return _BATCH if everywhere else _FREE
    return _CONTRACTED if everywhere else _REDUCED


def _moves(have: Sequence[str], want: Sequence[str], sizes: dict[str, int]) -> bool:
    """Return whether a transposition moves elements: the position of a dimension of size 1 does not matter."""
    return [label for label in have if sizes[label] > 1] != [label for label in want if sizes[label] > 1]


def _product(n: Op) -> str:
    """Rows of the first and columns of the second stay split, as do stacks of matrices, which broadcast."""
    a = "k m" if n.attr("transpose_a", False) or n.attr("adj_x", False) else "m k"
    b = "n k" if n.attr("transpose_b", False) or n.attr("adj_y", False) else "k n"
    stack = "" if n.op == "MatMul" else "... "
    return f"{stack}{a}, {stack}{b} -> {stack}m n | k"


def _equation(n: Op) -> str:
    """The equation has the labels; a label that one operand has twice cannot be split, as blocks lose the diagonal."""
    left, _, right = n.attr("equation").decode().replace(" ", "").partition("->")
    terms = [re.findall(r"\.\.\.|\w", term) for term in (*left.split(","), right)]
    twice = {label for term in terms for label, count in Counter(term).items() if count > 1}
    *operands, result = (" ".join("." if label in twice else label for label in term) or "()" for term in terms)
    summed = {label for term in terms[:-1] for label in term} - set(terms[-1]) - twice
    return f"{', '.join(operands)} -> {result} | {' '.join(sorted(summed))}"


def matmul_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Count two operations for each element of the result and of the contracted dimension."""
    turned = any(attr(key, False) for key in ("transpose_a", "adj_x"))
    return 2.0 * math.prod(outputs[0]) * inputs[0][-2 if turned else -1]


def _einsum_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Count two operations for each combination of labels; one where nothing is multiplied."""
    equation = attr("equation")
    left = (equation.decode() if isinstance(equation, bytes) else str(equation)).partition("->")[0]
    sizes: dict[str, int] = {}
    for term, shape in zip(left.split(","), inputs, strict=True):
        letters = term.replace("...", "")
        sizes.update(zip(letters, shape[len(shape) - len(letters) :], strict=True))
        sizes["..."] = max(sizes.get("...", 1), math.prod(shape[: len(shape) - len(letters)]))
    repeated = Counter(left.replace(",", ""))
    return (2.0 if len(inputs) > 1 and repeated else 1.0) * math.prod(sizes.values())


_MATRICES = factors(_product, linear=(0, 1), stretches="...", integers=True)._replace(work=matmul_work)

RULES = {
    **every(_MATRICES, "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3"),
    "Einsum": factors(_equation, linear=(0, 1), stretches="...", integers=True)._replace(
        work=_einsum_work, scratch=lambda attr, inputs: scratch_elements(attr("equation").decode(), inputs)
    ),
}
