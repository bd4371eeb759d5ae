"""Factors in einsum-like notation: operands, results, and the reduced factors after a bar.

@mk,@kn->@mn|k      a letter is a factor, @ are as many more dimensions as there are, aligned as numpy broadcasts
=.,=.->=.           the same, where no operand stretches
#n...,....,n...->n...   # a shape, of which the entries are named; . a dimension that can't be cut
@.,*->@.,@.         * read whole, whatever its rank; in a result: the same in every block
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.seen import Seen
from autograph_rewrite.ir.claims import Claim, Stated

Contract = Callable[[Seen], Factors | str | None]


def factors_of(
    seen: Seen,
    text: str,
    *,
    linear: tuple[int, ...] = (),
    added: tuple[int, ...] = (),
    moves: bool = False,
    zeros: tuple[int, ...] = (),
) -> Factors | None:
    """Return the factors that a text says a node has; None where its operands have other ranks.

    Args:
        seen: claims about the node.
        text: such as `mk,kn->mn|k`; `@` or `=` stands for any number of leading dimensions.
        linear: operands in each of which the op is linear while the others are replicated.
        added: operands in which it is linear together, as a sum is in its terms.
        moves: elements of `added` are only moved.
        zeros: operands of which each makes everything zero if it is.
    """
    left, _, right = text.replace("=", "@").partition("->")
    right, _, folded = right.partition("|")
    terms, made = left.split(","), right.split(",")
    if len(terms) != len(seen.operands):
        return None
    spread = sum("@" in term for term in terms)
    widths = [_width(seen, i, term) for i, term in enumerate(terms)]
    if any(width is None or width < 0 for width in widths):
        return unnamed(seen, linear=linear, added=added, moves=moves, zeros=zeros)
    known = [width for width in widths if width is not None]
    most = max(known, default=0)
    operands = tuple(_names(seen, i, term, known[i], spread > 1 and "=" not in text) for i, term in enumerate(terms))
    results = tuple(None if term == "*" else _expand(term, most) for term in made)
    sums = {name for name in folded if name != "@"} | ({f"@{i}" for i in range(most)} if "@" in folded else set())
    return Factors(
        operands,
        results,
        frozenset(sums),
        linear=linear,
        added=frozenset(added),
        moves=moves,
        sizes=frozenset(i for i, term in enumerate(terms) if term.startswith("#")),
        zeros=zeros,
    )


def unnamed(
    seen: Seen,
    *,
    linear: tuple[int, ...] = (),
    added: tuple[int, ...] = (),
    moves: bool = False,
    zeros: tuple[int, ...] = (),
) -> Factors | None:
    """Return what holds of an op whatever its dimensions are; None where something is cut.

    Args:
        seen: claims about the node.
        linear: operands in each of which the op is linear while the others are replicated.
        added: operands in which it is linear together, as a sum is in its terms.
        moves: elements of `added` are only moved.
        zeros: operands of which each makes everything zero if it is.
    """
    if any(claim.kind in ("split", "local") for claim in seen.operands):
        return None
    names = ((None,) * len(seen.operands), (None,) * len(seen.results))
    return Factors(*names, linear=linear, added=frozenset(added), moves=moves, zeros=zeros)


def pattern(text: str, *, linear: tuple[int, ...] = (), added: tuple[int, ...] = ()) -> Contract:
    """Return the contract that a text states.

    Args:
        text: as `factors_of` reads it.
        linear: operands in each of which the op is linear while the others are replicated.
        added: operands in which it is linear together, as a sum is in its terms.
    """
    return lambda seen: factors_of(seen, text, linear=linear, added=added)


def stated(said: Stated) -> Contract:
    """Return the contract of an op that only the user knows, in the notation of `ar.register_op`.

    `n ... d, d -> n ... d` is `n=d,d->n=d` here.
    """
    letters: dict[str, str] = {}
    spare = iter(string.ascii_letters)

    def letter(word: re.Match[str]) -> str:
        if word[0] == "..." or word[0] == "." or word[0].startswith("-"):
            return "=" if word[0] == "..." else "."
        return letters.setdefault(word[0], next(spare, "."))

    text = re.sub(r"\s", "", re.sub(r"\.\.\.|-?\b[A-Za-z_]\w*|\.", letter, said.factors))
    terms = text.partition("->")[0].split(",")
    added = tuple(i for i, term in enumerate(terms) if term != "*" and not term.startswith("#"))
    return pattern(text, linear=said.linear, added=added if said.additive else ())


def _width(seen: Seen, index: int, term: str) -> int | None:
    """Return how many dimensions the @ of an operand stands for; None where its rank is not known, or does not fit."""
    claim = seen.operands[index]
    if term == "*":
        return 0
    dims = claim.value if term.startswith("#") else claim.shape
    letters = term.removeprefix("#")
    if dims is None:
        return _guess(seen, claim, letters)
    return len(dims) - len(letters) + 1 if "@" in letters else 0 if len(dims) == len(letters) else None


def _guess(seen: Seen, claim: Claim, letters: str) -> int | None:
    """Return a width that does as well as any: what is alone keeps its places."""
    if "@" not in letters:
        return 0
    made = seen.results[0].shape if seen.results else None
    return (len(made) if made is not None else claim.dim + 1) if letters == "@" and len(seen.operands) == 1 else None


def _names(seen: Seen, index: int, term: str, width: int, stretches: bool) -> Names | None:
    if term == "*":
        return None
    names = _expand(term.removeprefix("#"), width)
    shape = seen.operands[index].shape
    if not stretches or term.startswith("#") or shape is None:
        return names
    return tuple("" if name[:1] == "@" and seen.stretches(index, at) else name for at, name in enumerate(names))


def _expand(term: str, width: int) -> Names:
    names: list[str] = []
    for letter in term:
        names += [f"@{i}" for i in reversed(range(width))] if letter == "@" else ["" if letter == "." else letter]
    return tuple(names)
