"""Seeded arrays: initial values by variable name, batches by step; equal in every process."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .case import Array

Draw = Callable[[np.random.RandomState, tuple[int, ...]], Array]


def generator(*key: object) -> np.random.RandomState:
    """Return a generator that depends on `key` only."""
    return np.random.RandomState(zlib.crc32("/".join(map(str, key)).encode()))


def normal(rng: np.random.RandomState, shape: tuple[int, ...]) -> Array:
    """Draw standard normal numbers."""
    return rng.standard_normal(shape)


def integers(high: int) -> Draw:
    """Draw from range(high); a low `high` gives many repetitions."""
    return lambda rng, shape: rng.randint(0, high, shape)


def mask(keep: float) -> Draw:
    """Draw ones with probability `keep`, else zeros; the first element is always one, so no mask is empty."""

    def draw(rng: np.random.RandomState, shape: tuple[int, ...]) -> Array:
        bits = rng.uniform(size=shape) < keep
        bits.flat[0] = True
        return bits

    return draw


@dataclass(frozen=True)
class Input:
    """One batch input: a placeholder or an argument."""

    name: str
    dtype: str  # "float" stands for the dtype of the options
    shape: tuple[int, ...]  # of one example
    draw: Draw = normal
    axis: int = 0  # where the batch dimension is inserted

    def batched(self, batch: int | None) -> tuple[int | None, ...]:
        """Return the shape of a whole batch."""
        return (*self.shape[: self.axis], batch, *self.shape[self.axis :])

    def concrete(self, float_dtype: str) -> str:
        """Return the dtype with `float` resolved."""
        return float_dtype if self.dtype == "float" else self.dtype

    def sample(self, float_dtype: str, seed: int, step: int, batch: int) -> Array:
        """Return the array of one step."""
        shape = (*self.shape[: self.axis], batch, *self.shape[self.axis :])
        return self.draw(generator(seed, "data", self.name, step), shape).astype(self.concrete(float_dtype))


def samples(inputs: Sequence[Input], float_dtype: str, seed: int, step: int, batch: int) -> tuple[Array, ...]:
    """Return one array per input for one step."""
    return tuple(each.sample(float_dtype, seed, step, batch) for each in inputs)


def stable_name(path: str) -> str:
    """Return the path of a Keras variable without the number that Keras gives to its unnamed parts.

    The numbers count through the process: Nadam's product is `variable_7` today, and a dropout layer's seed
    stands in `seed_generator_3`.
    """
    return re.sub(r"\b(variable|seed_generator)_\d+", r"\1", path)


def initial(seed: int, name: str, shape: Sequence[int], scale: float, offset: float, dtype: str) -> Array:
    """Return the initial value of the variable called `name`."""
    return (offset + scale * generator(seed, "variable", name).standard_normal(tuple(shape))).astype(dtype)
