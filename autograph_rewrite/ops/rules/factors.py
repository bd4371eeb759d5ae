"""Factors: how the dimensions of an op's operands and results belong together, as text.

MatMul    m k, k n -> m n | k         cut m or n: blocks        cut k: contributions to a sum

n d    a name for each dimension: what has one name has one size, and is cut together
-d     the same of a dimension that cannot be cut;  .  one that cannot be cut, and has no name
...    any number of dimensions; in all operands and results that have them they are the same
*      an operand that is read whole; a result that is the same whatever is cut
# n d  a vector of sizes, whose entries are those of the named dimensions
| n    the op sums over n, so that a block gives a contribution
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from autograph_rewrite.ops.rules.base import Op, Rule
from autograph_rewrite.ops.rules.signature import Labels, Placer, Signature, axes, shapes

_REST = "..."
_WORD = re.compile(r"-?[A-Za-z_]\w*|\.\.\.|[.*#]")
Term = tuple[str, ...] | None
"""The names of one operand or result; None for one that is read whole."""


class Factors(NamedTuple):
    """A text, read.

    Attributes:
        operands: the names of each.
        results: the names of each.
        summed: names over which a result without them is a sum.
        sizes: operands that state sizes.
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    summed: tuple[str, ...]
    sizes: frozenset[int]

    def width(self, ranks: Sequence[int | None]) -> int | None:
        """Return how many dimensions `...` stands for, 0 where it does not occur; None where that is not known.

        Args:
            ranks: of the operands; None for one that is not known, or that states sizes.
        """
        spread = [(term, rank) for term, rank in zip(self.operands, ranks, strict=False) if term and _REST in term]
        widths = {rank - len(term) + 1 for term, rank in spread if rank is not None}
        if not spread:
            return 0
        return widths.pop() if len(widths) == 1 and min(widths) >= 0 else None

    def signature(self, width: int, linear: tuple[int, ...], fragile: Sequence[str], *, additive: bool) -> Signature:
        """Return the same with a label for each dimension.

        Args:
            width: how many `...` stands for.
            linear: operands in each of which the op is linear while the others stay fixed.
            fragile: names along which the kernel refuses a block without rows.
            additive: it is linear in all its operands together.
        """
        return Signature(
            tuple(None if term is None else _labels(term, width) for term in self.operands),
            tuple(None if term is None else _labels(term, width) for term in self.results),
            frozenset(_labels(self.summed, width)),
            linear,
            additive,
            self.sizes,
            fragile=frozenset(_labels(fragile, width)),
        )


def read(text: str) -> Factors:
    """Return what a text says.

    Raises:
        ValueError: with what is wrong with it.
    """
    if text.count("->") != 1:
        raise ValueError(f"'{text}' has no arrow from operands to results")
    left, _, right = text.partition("->")
    right, _, summed = right.partition("|")
    operands = tuple(_term(one, is_operand=True) for one in left.split(","))
    results = tuple(_term(one) for one in right.split(","))
    sizes = frozenset(i for i, one in enumerate(left.split(",")) if "#" in one.split())
    found = Factors(operands, results, _term(summed) or (), sizes)
    require_known(found, [word for term in (*results, found.summed) for word in term or ()])
    return found


def require_known(factors: Factors, words: Sequence[str]) -> None:
    """Refuse names that no operand has.

    Raises:
        ValueError: there is one.
    """
    known = {word for term in factors.operands for word in term or ()} | {"."}
    if strange := sorted(set(words) - known):
        raise ValueError(f"no operand has the dimension '{strange[0]}'; one that only a result has is written .")


def factors(
    text: str, *, linear: tuple[int, ...] = (), fragile: str = "", additive: bool = False, broadcast: bool = False
) -> Rule:
    """Return the rule of an op whose factors are a text.

    Args:
        text: in the notation of this module.
        linear: operands in each of which the op is linear while the others stay fixed.
        fragile: names along which the kernel refuses a block without rows.
        additive: the op is linear in all its operands together.
        broadcast: a dimension of size one stretches to the size of its name.
    """
    found, refused = read(text), fragile.split()

    def describe(n: Op) -> Signature | None:
        width = found.width([None if i in found.sizes else fact.rank for i, fact in enumerate(n.inputs)])
        if width is None:
            return None
        return found.signature(width, linear, refused, additive=additive)._replace(broadcast=broadcast)

    spreads = any(_REST in (term or ()) for term in (*found.operands, *found.results))
    constant = None if spreads else found.signature(0, linear, refused, additive=additive)
    if constant is not None:
        constant = constant._replace(broadcast=broadcast)
    return Rule(Placer(describe, constant, text), lambda n: shapes(n, describe(n)))


def spread(term: Sequence[str], width: int) -> Labels:
    """Return names with so many in the place of `...`."""
    return tuple(name for word in term for name in (axes(width, _REST) if word == _REST else (word,)))


def _term(text: str, *, is_operand: bool = False) -> Term:
    words = text.split()
    if wrong := [word for word in words if not _WORD.fullmatch(word)]:
        raise ValueError(f"'{wrong[0]}' is no name of a dimension")
    if "*" in words and len(words) > 1:
        raise ValueError(f"'{text.strip()}': * stands alone")
    if "#" in words[is_operand:]:
        raise ValueError(f"'{text.strip()}': # stands before the names of an operand")
    named = [word for word in words if word != "."]
    if len(set(named)) < len(named):
        raise ValueError(f"'{text.strip()}' has a name twice: a block of the diagonal is not the diagonal of a block")
    return None if words == ["*"] else tuple(word for word in words if word != "#")


def _labels(term: Sequence[str], width: int) -> Labels:
    return tuple("" if word == "." else word for word in spread(term, width))
