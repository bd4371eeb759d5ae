"""How much to do: everything (minutes), or a tiny run that only shows that the benchmarks work (tests)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """The size of a run.

    Attributes:
        tiny: small models and few repetitions.
    """

    tiny: bool = False

    def rounds(self, wanted: int) -> int:
        """Return how many rounds to do where `wanted` are needed for a good median."""
        return 1 if self.tiny else wanted

    def some(self, wanted: Sequence[T]) -> Sequence[T]:
        """Return which of several equally good cases to do."""
        return wanted[:1] if self.tiny else wanted

    def seconds(self, wanted: float) -> float:
        """Return for how long to repeat the calls of one round."""
        return 0.0 if self.tiny else wanted
