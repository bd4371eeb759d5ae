"""Evaluates symbolic sizes: the number of rows that `3*b` stands for, given the number of examples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autograph_rewrite.ir.claims import segment_rows, sizes_of_shards
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import BLOCK, EXAMPLES_OF_ALL, Dim

UNKNOWN = 1
"""Replaces a size about which nothing is known."""
EXAMPLES = 32
"""Examples of one replica, where neither the graph nor the caller states them."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """The values of symbols in one step.

    Attributes:
        batch: examples of all replicas together.
        replicas: how many share the batch.
        micro: how many micro-batches each replica runs, one after the other.
    """

    batch: int
    replicas: int
    micro: int = 1

    @property
    def block(self) -> int:
        """Examples in the largest micro-batch of a replica; sizes may differ by one."""
        return max(1, -(-self.batch // (self.replicas * self.micro)))

    def number(self, dim: Dim) -> int:
        """Return a size as a number."""
        if dim is None:
            return UNKNOWN
        if isinstance(dim, int):
            return max(dim, 0)
        return dim.coef * math.prod(self._factor(factor) for factor in dim.factors)

    def shape(self, fact: Fact) -> Shape:
        """Return the shape of one instance of a value; empty where its rank is unknown."""
        return tuple(self.number(dim) for dim in fact.shape or ())

    def nbytes(self, fact: Fact) -> int:
        """Return the bytes of one instance of a value."""
        return math.prod(self.shape(fact)) * dtypes.width(fact.dtype)

    def _factor(self, factor: str) -> int:
        if rows := segment_rows(factor):
            return sum(rows) * self.block
        if sizes := sizes_of_shards(factor):
            return max(sizes)
        if factor.partition("#")[0] == BLOCK:
            return self.block
        return self.batch if factor.partition("#")[0] == "B" or factor in EXAMPLES_OF_ALL.factors else UNKNOWN


def static_elements(fact: Fact) -> int:
    """Return how many elements a value has for one example; an unknown size counts as 1."""
    sizes = [dim if isinstance(dim, int) else dim.coef if dim is not None else 1 for dim in fact.shape or ()]
    return math.prod(sizes)


def static_bytes(fact: Fact) -> int:
    """Return the bytes of a value for one example; an unknown size counts as 1."""
    return static_elements(fact) * dtypes.width(fact.dtype)
