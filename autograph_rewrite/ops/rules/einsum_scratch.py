"""The copies that an einsum makes while it runs: its kernel multiplies matrices, and transposes what lies otherwise.

    bd,edf->ebf     in 0: free b, contracted d       as it is
                    in 1: free e, contracted d, free f     e f d: a copy
                    result b e f                           e b f: a copy

As `einsum_op_impl.h` of TensorFlow does: dimensions are ordered as batch, free, contracted, reduced; an operand whose
contracted dimensions come before its free ones is multiplied as an adjoint, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]
_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)


def scratch_elements(equation: str, inputs: Sequence[Shape]) -> int:
    """Return how many elements an einsum copies while it runs; 0 where the equation has an ellipsis.

    Args:
        equation: such as "bd,edf->ebf".
        inputs: the shapes of the operands.
    """
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
    """Return whether a transposition moves elements: dimensions of one element may stand anywhere."""
    return [label for label in have if sizes[label] > 1] != [label for label in want if sizes[label] > 1]
