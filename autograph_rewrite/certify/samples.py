"""Draws sample data: for each value a random global tensor, and the data that each instance holds under its claim.

    %dw: partial(sum), [3, 4]     whole = own(0) + own(1)            exactly: all numbers are integers
    %x:  split(0), [b, 4]         own(r) = rows of block r of whole

Each element is a whole number, with as many bits as the sums in its type allow, so that sums are exact and a lost,
doubled, averaged or narrowed contribution shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from autograph_rewrite.certify.kernels import UnknownError
from autograph_rewrite.ir.claims import Claim, Claims, Dim, segment_rows, sizes_of_shards
from autograph_rewrite.ir.types import dtypes

Array = np.ndarray[Any, Any]
BITS = {dtypes.DOUBLE: 40, dtypes.FLOAT: 18, dtypes.HALF: 7, dtypes.BFLOAT16: 5}
LARGEST = 300_000
"""Most elements of a value for which data is drawn."""
COMBINE: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
COMBINE |= {"all": np.logical_and, "any": np.logical_or}


class TooLargeError(UnknownError):
    """A value has too many elements to draw data for it."""


class Token:
    """A value without elements, such as a handle or a list; equal only to itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Sample:
    """Data for one size of the batch.

    Args:
        types: element types by value name.
        same: by value name, the value that it is a copy of.
        lengths: by symbol of a size that must count the batch, the rows of each example.
        of_replicas: values that all micro-batches of a replica share.
    """

    def __init__(
        self,
        claims: Claims,
        types: Mapping[str, int],
        same: Mapping[str, str],
        batch: int,
        lengths: Mapping[str, int],
        of_replicas: Container[str] = (),
    ) -> None:
        self._of_replicas = of_replicas
        self.claims, self._types, self._same, self.batch, self._lengths = claims, types, same, batch, lengths
        self.instances = claims.instances
        self.examples = _examples(batch, claims)
        self._whole: dict[str, Any] = {}
        self._own: dict[tuple[str, int], Any] = {}

    def count(self, name: str) -> int:
        """Return how many instances a value has."""
        return self.instances // self.claims.micro if name in self._of_replicas else self.instances

    def size(self, dim: Dim, instance: int | None, near: str) -> int:
        """Return a size on one instance, or over the whole batch.

        Args:
            instance: None for the size over the global batch.
            near: a name for a dimension whose size is unknown.
        """
        if isinstance(dim, int):
            return dim
        if dim is None:
            return self.free(near)
        coefficient, factors = dim
        return int(coefficient) * reduce(lambda a, b: a * b, (self._symbol(f, instance) for f in factors), 1)

    def _symbol(self, name: str, instance: int | None) -> int:
        if name.startswith("B"):
            return self._symbol(f"b{name[1:]}", None)
        if name in self._lengths:
            return self._lengths[name] * self.batch
        if not name.startswith("b"):
            return self.free(name)
        if instance is None:
            return sum(sizes_of_shards(name)) or sum(self._symbol(name, r) for r in range(self.instances))
        if rows := segment_rows(name):
            return sum(rows) * self._symbol("b", instance)
        if sizes := sizes_of_shards(name):
            return sizes[instance]
        return len(self.examples[instance]) if name == "b" else self._own_rows(name, instance)

    def _own_rows(self, name: str, instance: int) -> int:
        return 1 + zlib.crc32(f"{name}/{instance}".encode()) % 3

    def _drawn(self, key: str, shape: tuple[int, ...], dtype: int) -> Any:
        return draw(key, shape, dtype)

    def free(self, key: str) -> int:
        """Return a number for a size that is unknown."""
        return 2 + zlib.crc32(key.encode()) % 3

    def whole(self, name: str) -> Any:
        """Return the whole value.

        Raises:
            TooLargeError: it has too many elements.
        """
        if name not in self._whole:
            self._whole[name] = self._make_whole(name)
        return self._whole[name]

    def own(self, name: str, instance: int) -> Any:
        """Return the data of one instance; it raises like `whole`."""
        key = (name, instance)
        if key not in self._own:
            self._own[key] = self._make_own(name, instance)
        return self._own[key]

    def _make_whole(self, name: str) -> Any:
        claim = self.claims.values[name]
        dtype = self._types[name]
        if dtype in (dtypes.VARIANT, dtypes.RESOURCE) or dtype > dtypes.REF_OFFSET:
            return Token(self._same.get(name, name))
        if claim.value is not None and claim.shape is not None:
            return self._sizes(claim, dtype, None, name)
        if name in self._same:
            return self.whole(self._same[name])
        if claim.kind == "split" and self.has_rows_of_its_own(claim):
            parts = [self._draw(name, claim, r) for r in range(self.count(name))]
            return np.concatenate(parts, claim.dim)
        drawn = self._draw(name, claim, None)
        return np.zeros_like(drawn) if claim.zero else drawn

    def _sizes(self, claim: Claim, dtype: int, instance: int | None, name: str) -> Array:
        entries = [self.size(entry, instance, f"{name}/{i}") for i, entry in enumerate(claim.value or ())]
        shape = [self.size(dim, instance, name) for dim in claim.shape or ()]
        return np.array(entries, dtypes.numpy_dtype(dtype)).reshape(shape)

    def has_rows_of_its_own(self, claim: Claim) -> bool:
        """Return whether the rows of a block do not depend on the number of its examples."""
        dim = claim.shape[claim.dim] if claim.shape is not None and claim.dim < len(claim.shape) else None
        return not isinstance(dim, tuple) or not ("b" in dim[1] or any(map(segment_rows, dim[1])))

    def _draw(self, name: str, claim: Claim, instance: int | None) -> Any:
        shape = []
        for i, dim in enumerate(claim.shape or ()):
            if instance is not None and i == claim.dim and not isinstance(dim, tuple):
                shape.append(self._own_rows(name, instance))
            else:
                shape.append(self.size(dim, instance, f"{name}/{i}"))
        if int(np.prod(shape)) > LARGEST:
            raise TooLargeError(f"'{name}' is too large")
        return self._drawn(f"{name}/{instance}/{self.batch}", tuple(shape), self._types[name])

    def _make_own(self, name: str, instance: int) -> Any:
        claim = self.claims.values[name]
        if self._types[name] in (dtypes.VARIANT, dtypes.RESOURCE):
            return Token(f"{self._same.get(name, name)}@{instance}") if claim.differs else self.whole(name)
        if claim.kind == "local":
            if claim.value is not None and claim.shape is not None:
                return self._sizes(claim, self._types[name], instance, name)
            return self._draw(name, claim, None) + instance
        if claim.kind == "split":
            return self.block(self.whole(name), claim, instance, name)
        if claim.kind == "partial":
            return self._contribution(name, claim, instance)
        return self.whole(name)

    def block(self, whole: Any, claim: Claim, instance: int, name: str) -> Any:
        """Return the rows of a whole value that an instance has."""
        if self.has_rows_of_its_own(claim):
            dim = claim.shape[claim.dim] if claim.shape is not None else None
            sizes = [
                self.size(dim, r, name) if isinstance(dim, tuple) else self._own_rows(name, r)
                for r in range(self.count(name))
            ]
            begin = sum(sizes[:instance])
            return np.take(whole, np.arange(begin, begin + sizes[instance]), claim.dim)
        assert claim.shape is not None
        coefficient, factors = claim.shape[claim.dim]
        segments = next((rows for factor in factors if (rows := segment_rows(factor))), ())
        if segments:
            rest = tuple(factor for factor in factors if not segment_rows(factor))
            per_row = self.size((coefficient, rest), instance, name)
            return self.rows(whole, claim.dim, 0, instance, [per_row * rows for rows in segments])
        others = list(factors)
        others.remove("b")
        return self.rows(whole, claim.dim, self.size((coefficient, tuple(others)), instance, name), instance)

    def rows(self, whole: Any, dim: int, unit: int, instance: int, segments: Sequence[int] = ()) -> Any:
        """Return the rows of a whole value that belong to the examples of an instance.

        Args:
            segments: rows of each example in each part of the whole, instead of `unit`.
        """
        which, before = [], 0
        for rows in segments or (unit,):
            which.append((before + self.examples[instance][:, None] * rows + np.arange(rows)).reshape(-1))
            before += rows * self.batch
        return np.take(whole, np.concatenate(which).astype(np.int64), dim)

    def _contribution(self, name: str, claim: Claim, instance: int) -> Any:
        whole, key = self.whole(name), self._same.get(name, name)
        shape, dtype = np.shape(whole), self._types[name]
        if claim.op not in COMBINE:  # a varying value
            return self._drawn(f"{key}/own/{instance}", shape, dtype)
        if claim.op == "sum":
            if not instance:
                others = [self.own(name, r) for r in range(1, self.count(name))]
                return reduce(np.subtract, others, whole)
            return np.zeros_like(whole) if claim.zero else self._drawn(f"{key}/{instance}/{self.batch}", shape, dtype)
        holds = self._drawn(f"{key}/holds/{self.batch}", shape, dtypes.INT32) % self.count(name) == instance
        if claim.op in ("all", "any"):
            neutral = np.full(shape, claim.op == "all")
        elif claim.op == "prod":
            neutral = np.ones_like(whole)
        else:
            away = np.abs(self._drawn(f"{key}/away/{instance}/{self.batch}", shape, dtype)) // 4
            neutral = whole - away if claim.op == "max" else whole + away
        return np.where(holds, whole, neutral).astype(np.asarray(whole).dtype)


def draw(key: str, shape: tuple[int, ...], dtype: int) -> Any:
    """Return whole numbers, drawn with the key as seed."""
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    if dtype == dtypes.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == dtypes.STRING:
        return np.array([f"{key}/{i}" for i in range(int(np.prod(shape)))], object).reshape(shape)
    kind = np.float32 if dtype == dtypes.BFLOAT16 else dtypes.numpy_dtype(dtype)
    if np.dtype(kind).kind in "iu":
        return rng.integers(0, 50, shape).astype(kind)
    top = 1 << BITS.get(dtype, 18)
    return (2 * rng.integers(-top // 2, top // 2, shape) + 1).astype(kind)


def _examples(batch: int, claims: Claims) -> list[Array]:
    """Return the example numbers of each instance: contiguous blocks, the first ones longer, or interleaved parts."""
    size, extra = divmod(batch, claims.instances)
    limits = [r * size + min(r, extra) for r in range(claims.instances + 1)]
    if not claims.interleaved:
        return [np.arange(a, b) for a, b in pairwise(limits)]
    of_replicas = pairwise(limits[:: claims.micro])
    return [np.arange(begin + part, end, claims.micro) for begin, end in of_replicas for part in range(claims.micro)]
