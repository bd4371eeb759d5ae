"""Contracts of integers that count examples: evaluated with numbers in place of symbols.

    Prod([b, 3, 4]) = 12*b      on replica 0, where b = 5: 60        on replica 1, where b = 7: 84

A claim is right where it says the same on every replica. Entries that nobody knows are the same
everywhere; they are drawn, so that what is claimed to be known cannot depend on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from autograph_rewrite.certify.contracts.seen import Seen, as_read, is_local, product, said
from autograph_rewrite.certify.execution import kernels
from autograph_rewrite.ir.claims import Claim, Dim, Read, segment_rows
from autograph_rewrite.ir.types import dtypes

MEASURES = frozenset(("Shape", "ShapeN", "Size", "Rank", "VariableShape", "TensorListElementShape"))
HANDED_ON = {"TensorListPushBack": (0, 1), "TensorListPopBack": (0,), "TensorListGetItem": (0,)}
"""Ops on lists of sizes, with the operands that hold sizes."""
INSTANCES = (0, 1)
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)
WHOLE = Read("replicated")


def are_sizes(seen: Seen) -> bool:
    """Return whether a node is about sizes: what it makes is known, or it measures."""
    return seen.node.op in MEASURES or any(claim.value is not None or claim.kind == "local" for claim in seen.results)


def judge_sizes(seen: Seen, *, folded: bool) -> str | None:
    """Return what is wrong with the sizes that a node makes.

    Args:
        seen: the node.
        folded: it is a constant after all, of the sizes of the whole.
    """
    for index, claim in enumerate(seen.results):
        local = any(is_local(entry) for entry in claim.value or ())
        if claim.kind not in ("local", "replicated") or local != (claim.kind == "local"):
            return f"result {index} is claimed {said(claim)}, and is {claim.value}"
    if seen.node.op in MEASURES:
        return _measured(seen)
    if seen.node.op in HANDED_ON:
        return _handed_on(seen)
    operands = tuple(as_read(claim, WHOLE, seen.batch) for claim in seen.operands) if folded else seen.operands
    differing = next((i for i, claim in enumerate(operands) if claim.kind in ("split", "partial")), None)
    if differing is not None:
        return f"input {differing} is {said(operands[differing])}, and sizes have to be known"
    if all(claim.value is None for claim in seen.results):
        return (
            None if all(claim.kind != "local" for claim in operands) else "it makes of a local size what nobody knows"
        )
    if seen.node.op == "ConcatOffset" and not _are_alike([claim.value or () for claim in operands]):
        return "blocks are cut along other dimensions, which its kernel compares"
    made = [_computed(seen, operands, instance) for instance in INSTANCES]
    return next((one for one in made if isinstance(one, str)), None) or _compare(seen, operands, made)


def _are_alike(operands: Sequence[Sequence[Dim]]) -> bool:
    """Return whether shapes count the same block wherever one does, but along the axis that the first operand names."""
    (axis,), *shapes = operands
    if not isinstance(axis, int):
        return True
    columns = [column for i, column in enumerate(zip(*shapes, strict=False)) if i != axis % len(shapes[0])]
    return all(len(set(column)) == 1 for column in columns if any(map(is_local, column)))


def _measured(seen: Seen) -> str | None:
    """Compare with the shape of what is measured, as this instance has it."""
    for index, made in enumerate(seen.results):
        shape = seen.operands[index].shape
        if made.value is None:
            if seen.operands[index].kind == "split":
                return f"input {index} is split, and of result {index} nothing is known"
            continue
        if seen.node.op == "TensorListElementShape" or shape is None:
            continue
        right = (len(shape),) if seen.node.op == "Rank" else (product(shape),) if seen.node.op == "Size" else shape
        if len(right) != len(made.value) or any(
            entry is not None and entry != dim for entry, dim in zip(made.value, right, strict=True)
        ):
            return f"result {index} is claimed to be {made.value}, of an operand of shape {shape}"
    return None


def _handed_on(seen: Seen) -> str | None:
    """Lists of equal sizes give back what they hold, and take nothing else."""
    sources = [seen.operands[i] for i in HANDED_ON[seen.node.op]]
    for index, source in enumerate(sources):
        is_empty = source.kind == "any" and not source.zero and len(sources) > 1
        for made in seen.results:
            if not is_empty and (source.kind != made.kind or source.value != made.value):
                return f"it is claimed to be {made.value}, of {source.value} (input {index})"
    return None


def _computed(seen: Seen, operands: Sequence[Claim], instance: int) -> list[list[int]] | str:
    """Return what an instance makes, flat; or why it can't."""
    inputs = [_number(seen, i, claim, instance) for i, claim in enumerate(operands)]
    try:
        return [np.ravel(found).tolist() for found in kernels.run(seen.node, inputs)]
    except kernels.NoKernelError:
        return "nothing says how it makes sizes"
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return f"it can't compute with what is claimed of its inputs: {error}"


def _compare(seen: Seen, operands: Sequence[Claim], made: Sequence[Any]) -> str | None:
    """Compare with what is claimed; an entry that nobody knows is at least the same on every replica."""
    for index, claim in enumerate(seen.results):
        on_each = [one[index] for one in made]
        if claim.value is None:
            continue
        for instance, entries in zip(INSTANCES, on_each, strict=True):
            right = [
                number if entry is None else evaluate(entry, instance)
                for entry, number in zip(claim.value, on_each[0], strict=False)
            ]
            if len(claim.value) != len(entries) or right != entries:
                return f"result {index} is claimed to be {claim.value}, of {[one.value for one in operands]}"
    return None


def _number(seen: Seen, index: int, claim: Claim, instance: int) -> Any:
    """Return what an instance of an operand holds, with numbers drawn for what is not known."""
    dtype = dtypes.numpy_dtype(seen.node.inputs[index].dtype)
    shape = [evaluate(dim, instance, f"{index}/{i}") for i, dim in enumerate(claim.shape or ())]
    if claim.value is None:
        return np.full(shape if prod(shape) < 4096 else (1,) * len(shape), _drawn(f"{index}"), dtype)
    entries = [evaluate(entry, instance, f"{index}/{i}") for i, entry in enumerate(claim.value)]
    known = claim.shape is not None and None not in claim.shape and prod(shape) == len(entries)
    return np.array(entries, dtype).reshape(shape if known else (len(entries),))


def evaluate(dim: Dim, instance: int, near: str = "") -> int:
    """Return a size on one instance.

    Args:
        dim: a symbolic size.
        instance: on which one.
        near: names the dimension where nothing is known of it.
    """
    if isinstance(dim, int):
        return dim
    if dim is None:
        return _drawn(near)
    coefficient, factors = dim
    return int(coefficient) * prod(_symbol(factor, instance) for factor in factors)


def _symbol(name: str, instance: int) -> int:
    if name.startswith("B"):
        return sum(_symbol(f"b{name[1:]}", one) for one in INSTANCES)
    if rows := segment_rows(name):
        return sum(rows) * _symbol("b", instance)
    return _drawn(f"{name}/{instance}" if name.startswith("b") else name)


def _drawn(key: str) -> int:
    return PRIMES[zlib.crc32(key.encode()) % len(PRIMES)]
