"""Judges a node by running it on samples: on whole values, and on the data of each of two replicas under its claims.

    x: split(0), [b, 4]     Reshape(x, [-1, 2])      whole 3 x 4 ──► 6 x 2
    claimed split(0)                                 blocks of 2 and 1 rows ──► the first 4 rows, the other 2

Each trial draws new numbers for unknown sizes, among them numbers that occur in the claims, until the kernel can run.
Integers that count examples are judged in the same way, with numbers instead of symbols.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

import numpy as np

from autograph_rewrite.certify import kernels
from autograph_rewrite.certify.samples import COMBINE, Array, Sample, TooLargeError, draw
from autograph_rewrite.certify.seen import Seen, is_local, is_named_after, said
from autograph_rewrite.ir.claims import Claim, Claims, Dim
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import get_op

INSTANCES = (0, 1)
BATCHES = (3, 5, 4)
TRIALS, ENOUGH = 40, 6
"""How many samples are tried at most, and after how many fitting ones the trials end."""
PRIMES = (2, 3, 5, 7, 11, 13)
SIZES = frozenset(("shape", "dims", "size", "num_segments", "multiples", "element_shape"))
"""Operands that are sizes; other integer operands apart from the data are positions."""
DATA = frozenset(("T", "Tparams", "dtype"))
LARGE = 32
LIMITS = 1e30
"""Larger numbers are limits of a type: the results of reductions without elements."""


class Trial(Sample):
    """Data for one node.

    Args:
        number: of the trial; each trial draws other sizes.
    """

    def __init__(self, seen: Seen, number: int) -> None:
        self._number = number
        values = {f"{number}/{i}": _with_shape(claim) for i, claim in enumerate(seen.operands)}
        types = {name: value.dtype for name, value in zip(values, seen.node.inputs, strict=True)}
        dims = [
            dim for claim in (*seen.operands, *seen.results) for dim in (*(claim.shape or ()), *(claim.value or ()))
        ]
        stated = {dim for dim in dims if isinstance(dim, int) and 1 < dim <= LARGE}
        self._sizes_seen = sorted({2, 3, 4, 2 * max(stated, default=3), *stated})  # a slice may end beyond all of them
        self._places = dict(zip(values, _places(seen), strict=True))
        self._rank = max([claim.dim + 1 for claim in seen.operands] + [1 + number % 3])
        batch = seen.batch if seen.batch is not None else BATCHES[number % 3]
        super().__init__(Claims(values, {}, {}, len(INSTANCES)), types, {}, batch, {})
        if number % 2:  # a block of one row, which some ops broadcast
            self.examples = [np.arange(batch - 1), np.arange(batch - 1, batch)]

    def free(self, key: str) -> int:
        """Return a number for a size that is unknown."""
        if self._number == 0:
            return PRIMES[zlib.crc32(key.encode()) % len(PRIMES)]
        if self._number == 1:
            return 3
        return self._sizes_seen[zlib.crc32(f"{key}/{self._number}".encode()) % len(self._sizes_seen)]

    def _draw(self, name: str, claim: Claim, instance: int | None) -> Any:
        if claim.shape is None:
            claim = claim._replace(shape=(None,) * self._rank)
        if claim.axes is not None:
            return np.array(sorted(claim.axes[self._number % 2]), dtypes.numpy_dtype(self._types[name]))
        drawn, place = np.asarray(super()._draw(name, claim, instance)), self._places[name]
        if drawn.dtype.kind in "iu" and place:
            return drawn % (2, 5)[self._number % 2] if place == "where" else 2 + drawn % 3
        return drawn

    def _drawn(self, key: str, shape: tuple[int, ...], dtype: int) -> Any:
        """Return small numbers, and booleans whose reductions differ."""
        if dtype == dtypes.BOOL:
            return draw(key, shape, dtypes.INT32) % 10 < (5, 9, 1)[self._number % 3]
        drawn = draw(key, shape, dtype)
        return np.fmod(drawn, 64) if drawn.dtype.kind == "f" else drawn


def _with_shape(claim: Claim) -> Claim:
    """Return a claim with a shape if its contents are known: without one, they are a vector."""
    is_known = claim.shape is not None and all(isinstance(dim, int) for dim in claim.shape)
    if claim.value is None or (is_known and len(claim.value) == prod(claim.shape or ())):
        return claim
    return claim._replace(shape=(len(claim.value),))


def _places(seen: Seen) -> list[str]:
    """Return for each operand "where" for positions, "size" for sizes, "" for data."""
    arguments = [(arg, bool(arg.number_attr or arg.type_list_attr)) for arg in get_op(seen.node.op).inputs]
    several = sum(many for _, many in arguments)
    each = (len(seen.operands) - len(arguments) + several) // several if several else 0
    found: list[str] = []
    for arg, many in arguments:
        place = "" if arg.type_attr in DATA else "size" if arg.name in SIZES else "where"
        found += [place] * (each if many else 1)
    return found


class MisfitError(Exception):
    """The kernel ran on no sample, or no result had the claimed sizes; the message says why."""


def judge_by_running(seen: Seen) -> str | None:
    """Return the problem with the claims of a node.

    Raises:
        TooLargeError: its values are too large to be drawn, and smaller sizes do not fit.
    """
    with np.errstate(all="ignore"):
        try:
            return _judge(seen)
        except MisfitError as error:
            return str(error)
        except TooLargeError as error:
            for smaller in (by_rank, odd_part):
                with suppress(MisfitError, TooLargeError):
                    return _judge(_shrunk(seen, smaller))
            raise error


def _judge(seen: Seen) -> str | None:
    of_blocks = any(claim.value is None for claim in seen.results)  # else the results are sizes of a block
    fitting, problem = 0, ""
    for number in range(TRIALS):
        trial = Trial(seen, number)
        try:
            own = [_run(seen, trial, instance) for instance in INSTANCES]
            whole = _run(seen, trial, None) if of_blocks else own[0]
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            problem = f"it can't compute with what is claimed of its inputs: {error}"
            if of_blocks and _fits(seen, trial):
                return problem
            continue
        if misfit := _misfit(seen, whole):
            problem = misfit
            continue
        fitting += 1
        for index in range(len(seen.results)):
            if wrong := _wrong(seen, trial, index, whole[index], [one[index] for one in own]):
                return f"result {index} is claimed {wrong}"
        if fitting == ENOUGH:
            break
    if not fitting:
        raise MisfitError(problem)
    return None


def _run(seen: Seen, trial: Trial, instance: int | None) -> list[Array]:
    inputs = [trial.whole(name) if instance is None else trial.own(name, instance) for name in trial.claims.values]
    return [np.asarray(made) for made in kernels.run(seen.node, inputs)]


def _misfit(seen: Seen, whole: Sequence[Array]) -> str | None:
    """Return the result of a sample that has not the claimed size, which may be due to the drawn numbers."""
    for index, (claim, made) in enumerate(zip(seen.results, whole, strict=True)):
        for at, dim in enumerate(claim.shape or ()):
            is_cut = claim.kind == "split" and claim.dim == at
            if made.ndim != len(claim.shape or ()) or (isinstance(dim, int) and not is_cut and dim != made.shape[at]):
                return f"result {index} is claimed to have the shape {claim.shape}, and has {made.shape}"
    return None


def _fits(seen: Seen, trial: Trial) -> bool:
    """Return whether the op can be run on the whole."""
    with suppress(ArithmeticError, LookupError, TypeError, ValueError):
        _run(seen, trial, None)
        return True
    return False


def _wrong(seen: Seen, trial: Trial, index: int, whole: Array, own: Sequence[Array]) -> str | None:
    """Return the part of a result's claim that is wrong."""
    claim = seen.results[index]
    for instance, mine in enumerate(own):
        if claim.shape is not None:
            sizes = [
                there if dim is None or is_named_after(dim, seen.node, index) else trial.size(dim, instance, "")
                for dim, there in zip(claim.shape, mine.shape, strict=False)
            ]
            if len(claim.shape) != mine.ndim or sizes != list(mine.shape):
                return f"to have the shape {claim.shape}, of {[operand.shape for operand in seen.operands]}"
        if claim.value is not None:
            entries, known = mine.ravel().tolist(), own[0].ravel().tolist()
            said_to_be = [
                k if e is None else trial.size(e, instance, "") for e, k in zip(claim.value, known, strict=False)
            ]
            if len(claim.value) != len(entries) or entries != said_to_be:
                return f"to be {claim.value}, of {[operand.value for operand in seen.operands]}"
    if claim.zero and whole.any():
        return "to be zero, and nothing says so"
    if claim.kind == "local":
        return None if any(map(is_local, claim.value or ())) else f"a local size, and is {claim.value}"
    return None if _holds(claim, trial, whole, own) else f"{said(claim)}, of {', '.join(map(said, seen.operands))}"


def _holds(claim: Claim, trial: Trial, whole: Array, own: Sequence[Array]) -> bool:
    if claim.kind == "replicated":
        return all(_alike(mine, whole) for mine in own)
    if claim.kind == "split" and claim.dim < whole.ndim:
        if trial.has_rows_of_its_own(claim):
            return _alike(np.concatenate(own, claim.dim), whole)
        return all(_alike(mine, trial.block(whole, claim, r, "")) for r, mine in enumerate(own))
    combine = COMBINE.get(claim.op)
    return claim.kind == "partial" and combine is not None and _alike(reduce(combine, own), whole)


def _alike(one: Array, other: Array) -> bool:
    """Return whether two results are equal up to rounding."""
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "fc":
        return np.array_equal(one, other)
    close = 1e-2 if one.dtype.itemsize == 2 else 1e-5
    size = np.abs(other, where=np.isfinite(other), out=np.zeros(other.shape))
    return np.allclose(one, other, close, close * float(size.max(initial=0, where=size < LIMITS)), equal_nan=True)


def _shrunk(seen: Seen, smaller: Callable[[Sequence[int]], dict[int, int]]) -> Seen:
    """Return a node with smaller sizes instead of large ones."""
    every = (*seen.operands, *seen.results)
    sizes = {abs(n[0] if isinstance(n, tuple) else n or 0) for c in every for n in (*(c.shape or ()), *(c.value or ()))}
    new = smaller(sorted(sizes - {0}))

    def of(dims: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
        each = [(new[d[0]], d[1]) if isinstance(d, tuple) else new.get(d, d) for d in dims or ()]
        return None if dims is None else tuple(each)

    def claim_of(claim: Claim) -> Claim:
        return claim._replace(shape=of(claim.shape), value=of(claim.value))

    operands, results = (tuple(map(claim_of, claims)) for claims in (seen.operands, seen.results))
    return replace(seen, operands=operands, results=results, batch=None if seen.batch is None else new.get(seen.batch))


def by_rank(sizes: Sequence[int]) -> dict[int, int]:
    """Return smaller sizes in the same order."""
    return {size: min(size, 8 + rank) for rank, size in enumerate(sizes)}


def odd_part(sizes: Sequence[int]) -> dict[int, int]:
    """Return smaller sizes that are products of each other where the sizes are: their odd parts."""
    return {size: size // (size & -size) for size in sizes}
