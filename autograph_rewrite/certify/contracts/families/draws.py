"""Factors of random ops: drawn once for all replicas, unless the configuration lets each draw its own block."""

from __future__ import annotations

from collections.abc import Callable

from autograph_rewrite.certify.contracts.factors import Factors, Names
from autograph_rewrite.certify.contracts.families.moves import letters
from autograph_rewrite.certify.contracts.patterns import Contract, factors_of
from autograph_rewrite.certify.contracts.seen import Seen

PARAMETERS = {
    "StatelessRandomGammaV2": (2,), "StatelessRandomGammaV3": (4,), "StatelessRandomPoisson": (2,),
    "StatelessRandomBinomial": (2, 3),
}  # fmt: skip
"""The operands that say how to draw each element."""


def independent(contract: Callable[[Seen], Factors | None]) -> Contract:
    """Return a contract that holds where blocks may draw for themselves; elsewhere all is whole."""
    return lambda seen: contract(seen) if any(text.startswith("random") for text in seen.inexact) else None


def _by_shape(seen: Seen) -> Factors | None:
    """As many as the first operand says."""
    target = seen.value(0)
    if target is None:
        return None
    names = letters(len(target))
    return Factors((names, *(None,) * (len(seen.operands) - 1)), (names,), sizes=frozenset((0,)))


def _spread(seen: Seen) -> Factors | None:
    """As many as the first operand says, with parameters that are broadcast to it."""
    target = seen.value(0)
    if target is None:
        return None
    names = letters(len(target))
    operands: list[Names | None] = [names, *[None] * (len(seen.operands) - 1)]
    for index in PARAMETERS[seen.node.op]:
        shape = seen.operands[index].shape
        if shape is None:
            return None
        mine = names[len(names) - len(shape) :]
        operands[index] = tuple("" if seen.stretches(index, at) else name for at, name in enumerate(mine))
    return Factors(tuple(operands), (names,), sizes=frozenset((0,)))


def _by_parameters(seen: Seen) -> Factors | None:
    """Some for each of the parameters, which are the last dimensions."""
    rank, samples = seen.rank(1), seen.operands[0].shape
    if rank is None or not samples or not isinstance(samples[0], int):
        return None
    names = letters(rank)
    return Factors((None, names), (("",) * samples[0] + names,))


def _by_rows(seen: Seen) -> Factors | None:
    """Some for each row of logits."""
    return factors_of(seen, "n.,*->n.")


by_shape, by_parameters = independent(_by_shape), independent(_by_parameters)
by_rows, spread = independent(_by_rows), independent(_spread)
