"""Reads factors: a text that states how the dimensions of an op's operands and results belong together.

MatMul    m k, k n -> m n | k         cut m or n: blocks        cut k: contributions to a sum

n d    a name for each dimension: dimensions of one name have one size, and are split together
-d     a named dimension that cannot be split;  .  a dimension that cannot be split, and has no name
...    any number of dimensions; in all operands and results that have them they are the same
*      an operand that is read whole; a result that is the same whatever is split
# n d  a vector of sizes, whose entries are those of the named dimensions
| n    the op sums over n, so that a block gives a contribution
()     a single number
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from autograph_rewrite.ops.rules.base import Op, Rule, stated, whole
from autograph_rewrite.ops.rules.signature import Labels, Placer, Signature, axes, signed

_REST = "..."
_WORD = re.compile(r"-?[A-Za-z_]\w*|\.\.\.|[.*#]")
Term = tuple[str, ...] | None
"""The names of one operand or result; None for `*`."""


class Factors(NamedTuple):
    """A parsed text.

    Attributes:
        summed: names over which the op sums if a result lacks them.
        sizes: operands that state sizes.
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    summed: tuple[str, ...]
    sizes: frozenset[int]

    def width(self, ranks: Sequence[int | None], *, stretches: bool = False) -> int | None:
        """Return how many dimensions `...` stands for, 0 where it does not occur; None where that is not known.

        Args:
            ranks: of the operands; None for an unknown rank, and for an operand that states sizes.
            stretches: `...` broadcasts, so that an operand may have only the last of its dimensions.
        """
        spread = [(term, rank) for term, rank in zip(self.operands, ranks, strict=False) if term and _REST in term]
        widths = {rank - len(term) + 1 for term, rank in spread if rank is not None}
        if not spread:
            return 0
        if min(widths, default=-1) < 0 or (stretches and any(rank is None for _, rank in spread)):
            return None
        return max(widths) if stretches or len(widths) == 1 else None

    def signature(self, ranks: Sequence[int | None], like: Signature) -> Signature | None:
        """Return the signature, with a label for each dimension; None where the number of dimensions is not known.

        Args:
            like: a signature with the other traits; labels in it are names of this text.
        """
        known = [None if i in self.sizes else rank for i, rank in enumerate(ranks)]
        width = self.width(known, stretches=_REST in like.stretches)
        if width is None:
            return None
        inputs = [None if term is None else _labels(term, width) for term in self.operands]
        if _REST in like.stretches:
            for i, (term, rank) in enumerate(zip(self.operands, ranks, strict=False)):
                if term and _REST in term and rank is not None:
                    inputs[i] = _labels(term, width, width + len(term) - 1 - rank)
        return like._replace(
            inputs=tuple(inputs),
            outputs=tuple(None if term is None else _labels(term, width) for term in self.results),
            summed=frozenset(_labels(self.summed, width)),
            sizes=self.sizes,
            fragile=frozenset(_labels(tuple(like.fragile), width)),
            stretches=frozenset(_labels(tuple(like.stretches), width)),
        )


@lru_cache(1024)
def read(text: str) -> Factors:
    """Parse a text.

    Raises:
        ValueError: the text is malformed; the message says why.
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
        ValueError: an operand lacks one of the words.
    """
    known = {word for term in factors.operands for word in term or ()} | {"."}
    if strange := sorted(set(words) - known):
        raise ValueError(f"no operand has the dimension '{strange[0]}'; one that only a result has is written .")


Text = str | Callable[[Op], str | None]
"""A text, or a function that returns the text for a node; None where the node has to work on whole values."""


def factors(
    text: Text,
    *,
    linear: tuple[int, ...] = (),
    fragile: str = "",
    additive: bool = False,
    stretches: str = "",
    integers: bool = False,
) -> Rule:
    """Return the rule of an op with factors.

    Args:
        linear: operands in each of which the op is linear while the others stay fixed.
        fragile: names along which the kernel refuses an empty block.
        additive: the op is linear in all its operands together.
        stretches: names whose dimensions broadcast: size one stretches to the size of the others.
        integers: sums of integers may also be partial.
    """
    stretching, refused = frozenset(stretches.split()), frozenset(fragile.split())
    like = Signature((), (), frozenset(), linear, additive, frozenset(), stretching, refused, integers)

    def describe(n: Op) -> Signature | None:
        said = text if isinstance(text, str) else text(n)
        return None if said is None else read(said).signature([fact.rank for fact in n.inputs], like)

    if not isinstance(text, str):
        describe.__doc__ = text.__doc__
        return signed(describe)
    spreads = any(_REST in (term or ()) for term in (*read(text).operands, *read(text).results))
    constant = None if spreads else read(text).signature((), like)
    return signed(describe)._replace(place=Placer(describe, constant, text))


WHOLE, ONCE = Rule(whole, stated), Rule(whole, stated, pinned=True)


def lines(text: str) -> dict[str, Rule]:
    """Return the rules of ops that a line describes: factors, further arguments of `factors`, and names of ops.

    n d, d -> n d; linear 0 1 : Scaled Tinted      a line may continue on the next line, which is indented
    whole : Unique                                  it reads whole values, on purpose
    once : Print                                    the same, and it runs once in each step
    # a comment
    """
    rules: dict[str, Rule] = {}
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        said, _, ops = line.partition(" : ")
        if not line.startswith("#"):
            rules |= dict.fromkeys(ops.split(), _line(said))
    return rules


def _line(said: str) -> Rule:
    text, *traits = said.split("; ")
    named = dict(trait.partition(" ")[::2] for trait in traits)
    if text in ("whole", "once"):
        return WHOLE if text == "whole" else ONCE
    linear = tuple(int(operand) for operand in named.get("linear", "").split())
    return factors(text, linear=linear, fragile=named.get("fragile", ""), stretches=named.get("stretches", ""))


def spread(term: Sequence[str], width: int, skipped: int = 0) -> Labels:
    """Return the names with `width` names in place of `...`, of which the first `skipped` are left out."""
    return tuple(name for word in term for name in (axes(width, _REST)[skipped:] if word == _REST else (word,)))


def _term(text: str, *, is_operand: bool = False) -> Term:
    words = text.replace("()", "").split()
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


def _labels(term: Sequence[str], width: int, skipped: int = 0) -> Labels:
    return tuple("" if word == "." else word for word in spread(term, width, skipped))
