"""Contractions (MatMul, BatchMatMul, Einsum): contracting the split dimension gives a partial result.

Every dimension gets a label; both sides of a contraction share theirs. A split label that the output keeps stays split,
one that is summed away makes the output partial, and operands that are whole but have the label are sliced.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from autograph_rewrite.ops.rules.base import Attr, Numbers, Op
from autograph_rewrite.ops.rules.einsum_scratch import scratch_elements
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import every


def _product(n: Op) -> str:
    """Rows of the first and columns of the second stay split, as do stacks of matrices, which broadcast."""
    a = "k m" if n.attr("transpose_a", False) or n.attr("adj_x", False) else "m k"
    b = "n k" if n.attr("transpose_b", False) or n.attr("adj_y", False) else "k n"
    stack = "" if n.op == "MatMul" else "... "
    return f"{stack}{a}, {stack}{b} -> {stack}m n | k"


def _equation(n: Op) -> str:
    """The equation says it; a dimension that one operand has twice cannot be cut: its diagonal would lie elsewhere."""
    left, _, right = n.attr("equation").decode().replace(" ", "").partition("->")
    terms = [re.findall(r"\.\.\.|\w", term) for term in (*left.split(","), right)]
    twice = {label for term in terms for label, count in Counter(term).items() if count > 1}
    *operands, result = (" ".join("." if label in twice else label for label in term) or "()" for term in terms)
    summed = {label for term in terms[:-1] for label in term} - set(terms[-1]) - twice
    return f"{', '.join(operands)} -> {result} | {' '.join(sorted(summed))}"


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


_MATRICES = factors(_product, linear=(0, 1), stretches="...", integers=True)._replace(work=matmul_work)

RULES = {
    **every(_MATRICES, "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3"),
    "Einsum": factors(_equation, linear=(0, 1), stretches="...", integers=True)._replace(
        work=_einsum_work, scratch=lambda attr, inputs: scratch_elements(attr("equation").decode(), inputs)
    ),
}
