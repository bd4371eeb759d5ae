"""Collects the claims that a node is checked against: those of its operands after reshards, and of its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from autograph_rewrite.ir.claims import (
    OWN,
    SEGMENTS,
    SHARDS,
    Claim,
    Claims,
    Dim,
    Read,
    Stated,
    segment_rows,
    sizes_of_shards,
)
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes

BLOCK, BATCH, OPEN = "b", "B", "T:"
WHOLE = Read("replicated")


def is_local(dim: Dim) -> bool:
    """Return whether a size counts a block."""
    return isinstance(dim, tuple) and any(factor.startswith(BLOCK) for factor in dim[1])


def is_own(dim: Dim) -> bool:
    """Return whether a size is a placeholder symbol that was made for one value."""
    return isinstance(dim, tuple) and any("#" in factor for factor in dim[1])


def is_named_after(dim: Dim, node: Node, index: int) -> bool:
    """Return whether a size is a symbol made for a dimension of this result, so that it claims nothing."""
    own, opened = f"#{node.name}:{index}", f"{OPEN}{node.output(index).name}/"
    return isinstance(dim, tuple) and any(own in factor or factor.startswith(opened) for factor in dim[1])


def is_open(dim: Dim) -> bool:
    """Return whether a size depends on an open dimension."""
    return isinstance(dim, tuple) and any(factor.startswith(OPEN) for factor in dim[1])


def line_up(one: Dim, other: Dim, example: str = BLOCK) -> bool:
    """Return whether blocks of two sizes have equally many rows whenever the whole values do.

    Blocks of `b*T` and `b*U` rows do, since `B*T` is `B*U` only if T is U; of `b` and `b*T`, one may be a single row.

    Args:
        example: the symbol that counts examples: `BATCH` in sizes of whole values.
    """
    if one is None or other is None:
        return False
    if one == other:
        return True
    rest = [_per_example(dim, example) for dim in (one, other)]
    return None not in rest and 1 not in rest and any(map(is_open, rest))


def _per_example(dim: Dim, example: str) -> Dim:
    if not isinstance(dim, tuple) or example not in dim[1]:
        return None
    factors = list(dim[1])
    factors.remove(example)
    return (dim[0], tuple(factors)) if factors else dim[0]


def whole(dim: Dim, batch: int | None) -> Dim:
    """Return the size over the whole batch for the size of a block."""
    if not is_local(dim):
        return dim
    coefficient, factors = dim
    others = tuple(factor for factor in factors if not factor.startswith(BLOCK))
    (mine,) = (factor for factor in factors if factor.startswith(BLOCK))
    if rows := segment_rows(mine):
        return whole((coefficient * sum(rows), (*others, BLOCK)), batch)
    if sizes := sizes_of_shards(mine):
        return (coefficient * sum(sizes), others) if others else coefficient * sum(sizes)
    if mine == BLOCK and batch is not None:
        return (coefficient * batch, others) if others else coefficient * batch
    return coefficient, tuple(sorted((*others, BATCH + mine[1:])))


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of sizes; None where a size is not known."""
    coefficient, factors = 1, list[str]()
    for dim in dims:
        if dim is None:
            return None
        mine, more = (dim, ()) if isinstance(dim, int) else dim
        coefficient *= mine
        factors += more
    return (coefficient, tuple(sorted(factors))) if factors else coefficient


@dataclass(frozen=True)
class Seen:
    """One node with its claims.

    Attributes:
        node: only its op, attributes and element types are used.
        operands: claims of the operands, after reshards.
        inexact: the differences from one device that the configuration allows.
        guessed: (operand, dimension) pairs that are sliced although the whole may have other rows, or a single one.
        stated: the user's description of a custom op.
    """

    node: Node
    operands: tuple[Claim, ...]
    results: tuple[Claim, ...]
    batch: int | None = None
    inexact: tuple[str, ...] = ()
    guessed: frozenset[tuple[int, int]] = frozenset()
    stated: Stated | None = None

    def stretches(self, index: int, dim: int) -> bool:
        """Return whether a dimension of an operand has one row, or may have, that stretches to other operands."""
        return (self.operands[index].shape or ())[dim] == 1 or (index, dim) in self.guessed

    def rank(self, index: int) -> int | None:
        """Return the number of dimensions of an operand."""
        shape = self.operands[index].shape
        return None if shape is None else len(shape)

    def value(self, index: int) -> tuple[Dim, ...] | None:
        """Return the contents of an operand, where they are known."""
        return self.operands[index].value if index < len(self.operands) else None

    def ints(self, index: int) -> tuple[int, ...] | None:
        """Return the contents of an operand where all are plain integers."""
        value = self.value(index)
        return value if value is not None and all(isinstance(entry, int) for entry in value) else None

    def axis(self, index: int, rank: int) -> int | None:
        """Return the non-negative dimension that an operand names, in a tensor of a rank."""
        value = self.ints(index)
        return value[0] % rank if value is not None and len(value) == 1 and -rank <= value[0] < rank else None

    def attr(self, key: str, default: Any = None) -> Any:
        """Return an attribute of the node."""
        return self.node.attr(key, default)

    def reading_whole(self) -> Seen:
        """Return the node with each operand read whole."""
        return replace(self, operands=tuple(as_read(claim, WHOLE, self.batch) for claim in self.operands))

    def is_inexact(self, index: int) -> bool:
        """Return whether an operand consists of floating point numbers."""
        return dtypes.base(self.node.inputs[index].dtype) in dtypes.INEXACT


def as_read(claim: Claim, read: Read, batch: int | None) -> Claim:
    """Return the claim of a value as a node reads it."""
    if read == OWN:
        return claim
    if read.kind == "entry":
        value = list(claim.value or ())
        value[read.dim : read.dim + 1] = [read.size]
        return claim._replace(kind="local", value=tuple(value))
    shape = None if claim.shape is None else tuple([whole(dim, batch) for dim in claim.shape])
    value_of_all = None if claim.value is None else tuple([whole(entry, batch) for entry in claim.value])
    if read.kind == "split":
        if shape is not None:
            shape = (*shape[: read.dim], _block(read), *shape[read.dim + 1 :])
        return Claim("split", read.dim, "", shape, None, claim.zero)
    if read.kind == "partial":
        return Claim("partial", 0, "sum", shape, None, claim.zero)
    return Claim("replicated", 0, "", shape, value_of_all, claim.zero)


def _block(read: Read) -> Dim:
    """Return the size of the block that a read takes."""
    if read.shards:
        return read.unit, (f"{SHARDS}{','.join(map(str, read.shards))}",)
    if not read.segments:
        return read.unit, (BLOCK,)
    common = gcd(*read.segments)
    named = ",".join(str(rows // common) for rows in read.segments)
    return common, (f"{SEGMENTS}{named}]",)


def see(node: Node, claims: Claims) -> Seen:
    """Return a node with its claims."""
    values: Mapping[str, Claim] = claims.values
    operands, guessed = [], set()
    for index, value in enumerate(node.inputs):
        source, read = values[value.name], claims.reads.get((node.name, index), OWN)
        if value.node.name in claims.carriers:  # the carrier has already converted the value
            first = value.node
            source, read = values[first.inputs[0].name], claims.reads.get((first.name, 0), OWN)
        operands.append(as_read(source, read, claims.batch))
        if read.kind == "split" and not _has_rows(source, read, claims.batch):
            guessed.add((index, read.dim))
    made = [values[node.output(i).name] for i in range(len(node.output_dtypes))]
    if node.name in claims.carriers:
        made = [as_read(made[0], claims.reads.get((node.name, 0), OWN), claims.batch)]
    stated = claims.stated.get(node.op)
    return Seen(node, tuple(operands), tuple(made), claims.batch, tuple(claims.inexact), frozenset(guessed), stated)


def _has_rows(claim: Claim, read: Read, batch: int | None) -> bool:
    """Return whether a value is known to have the rows of all the blocks that it is sliced into."""
    size = claim.shape[read.dim] if claim.shape is not None else None
    return size is not None and whole(size, batch) == whole(_block(read), batch)


def said(claim: Claim) -> str:
    """Return a placement in words."""
    if claim.kind == "split":
        return f"split({claim.dim})"
    if claim.kind == "partial":
        return f"partial({claim.op})"
    return "a local size" if claim.kind == "local" else claim.kind
