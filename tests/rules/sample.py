"""Sample: how to make inputs for one op, with every size named by a letter, so that any of them can be the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEFAULT_SIZES = {letter: 2 + i % 3 for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}


class Known(np.ndarray):
    """Integers that the graph states (a constant, or computed from shapes), as opposed to data."""


class Elements(np.ndarray):
    """The elements of a tensor list, stacked: the input is the list's handle."""


def known(values: Any, dtype: Any = np.int32) -> np.ndarray:
    """Return integers as a stated operand."""
    return np.asarray(values, dtype).view(Known)


def elements(values: np.ndarray) -> np.ndarray:
    """Return a tensor list that holds the rows of `values`."""
    return np.asarray(values).view(Elements)


class Draw:
    """Reproducible contents."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.RandomState(seed)

    def __call__(self, *shape: int, dtype: Any = np.float64) -> np.ndarray:
        """Return normally distributed numbers."""
        values = self.rng.standard_normal(shape)
        if np.issubdtype(dtype, np.complexfloating):
            values = values + 1j * self.rng.standard_normal(shape)
        return np.asarray(values).astype(dtype)

    def unit(self, *shape: int, dtype: Any = np.float64) -> np.ndarray:
        """Return numbers in (0, 1)."""
        return np.asarray(self.rng.uniform(0.05, 0.95, shape)).astype(dtype)

    def ints(self, high: int, *shape: int, low: int = 0, dtype: Any = np.int32) -> np.ndarray:
        """Return integers below `high`."""
        return np.asarray(self.rng.randint(low, high, shape)).astype(dtype)

    def bools(self, *shape: int) -> np.ndarray:
        """Return truth values."""
        return np.asarray(self.rng.uniform(size=shape) < 0.5)

    def definite(self, *shape: int, dtype: Any = np.float64) -> np.ndarray:
        """Return symmetric positive definite matrices of shape [..., k, k]."""
        a = self.rng.standard_normal(shape)
        return np.asarray(a @ np.swapaxes(a, -1, -2) + np.eye(shape[-1])).astype(dtype)


Sizes = Mapping[str, int]
Make = Callable[[Sizes, Draw], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Sample:
    """One way to call an op.

    Attributes:
        op: the op type.
        letters: the sizes that `make` uses; each is the batch in turn.
        make: the inputs for given sizes.
        attrs: attributes; a callable value is computed from the sizes.
        stays: letters along which the op has to work on blocks (the rule must not fall back to whole values).
        stays_static: further such letters, where the batch is static.
        sizes: sizes other than the defaults.
        compare: "values", or "shapes" for what is drawn at random.
        tolerance: relative and absolute.
        random: the semantics of randomness to test.
        undefined: outputs that the kernel leaves undefined.
    """

    op: str
    letters: str
    make: Make
    attrs: Mapping[str, Any] = field(default_factory=dict)
    stays: str = ""
    stays_static: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    compare: str = "values"
    tolerance: float = 1e-9
    random: str = "exact"
    undefined: tuple[int, ...] = ()

    def inputs(self, batch_letter: str, batch: int) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return the inputs and attributes when `batch_letter` has the size `batch`."""
        chosen = {letter: DEFAULT_SIZES[letter] for letter in self.letters} | dict(self.sizes)
        chosen[batch_letter] = batch
        attrs = {key: value(chosen) if callable(value) else value for key, value in self.attrs.items()}
        return list(self.make(chosen, Draw())), attrs

    def __str__(self) -> str:
        shown = ",".join(f"{k}={v}" for k, v in self.attrs.items() if not callable(v))
        return f"{self.op}({shown})" if shown else self.op
