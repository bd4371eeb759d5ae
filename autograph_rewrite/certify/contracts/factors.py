"""Factors: names for the dimensions of operands and results, as in Shardy's sharding rules; one name, one split.

    MatMul   (m k)(k n) -> (m n), k is folded       cut m: blocks of rows      cut k: contributions to a sum

A dimension without a name ("") can't be cut. At most one factor is cut: it is named by the first operand that is split,
or by the entry of a shape operand that counts a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autograph_rewrite.certify.contracts.seen import Seen, is_local, is_named_after, line_up, said
from autograph_rewrite.ir.claims import Claim, Dim
from autograph_rewrite.ir.types import dtypes

Names = tuple[str, ...]


@dataclass(frozen=True)
class Factors:
    """How the dimensions of operands and results belong together.

    Attributes:
        operands: names of each operand's dimensions; None for one that is read whole.
        results: names of each result's dimensions; None for one that is the same in every block.
        folded: names over which a result without them combines.
        fold: how.
        linear: operands in each of which the op is linear while the others are replicated.
        added: operands in which it is linear together, as a sum is in its terms.
        moves: elements of `added` are only moved, so that contributions of any kind may be combined afterwards.
        sizes: operands that are shapes; their names are those of the dimensions that their entries state.
        zeros: operands of which each makes everything zero if it is.
        apart: what is cut has other numbers of rows in operands and results.
        is_zero: everything is zero, whatever the operands are.
        counts: results that count elements, and are the same on every replica.
    """

    operands: tuple[Names | None, ...]
    results: tuple[Names | None, ...]
    folded: frozenset[str] = frozenset()
    fold: str = "sum"
    linear: tuple[int, ...] = ()
    added: frozenset[int] = frozenset()
    moves: bool = False
    sizes: frozenset[int] = frozenset()
    zeros: tuple[int, ...] = ()
    apart: bool = False
    is_zero: bool = False
    counts: frozenset[int] = frozenset()


class Cut(NamedTuple):
    """The factor that is cut: its name, and the size that each operand says it has."""

    name: str
    sizes: tuple[Dim, ...]


def judge(seen: Seen, factors: Factors | str | None) -> str | None:
    """Return what is wrong with the claims of a node that has these factors; None where nothing is.

    Args:
        seen: the node.
        factors: of it; None where it has to read and to make whole values, or what is wrong already.
    """
    if factors is None or isinstance(factors, str):
        return judge_whole(seen) if factors is None else factors
    if any(claim.kind == "partial" and 0 in (claim.shape or ()) for claim in seen.operands):  # of nothing
        seen = replace(seen, operands=tuple(_of_nothing(claim) for claim in seen.operands))
    if len(factors.results) != len(seen.results):
        return f"it has {len(seen.results)} results, not {len(factors.results)}"
    if len(factors.operands) != len(seen.operands):
        return f"it has {len(seen.operands)} operands, not {len(factors.operands)}"
    if any(claim.kind == "partial" for claim in seen.operands):
        problem, expected = _of_contributions(seen, factors)
    elif any(claim.differs for claim in seen.operands):
        problem, expected = _of_blocks(seen, factors)
    else:
        problem, expected = None, [Claim("replicated")] * len(seen.results)
    return problem or _compare(seen, expected) or _sizes(seen, factors) or _zeros(seen, factors)


def _of_nothing(claim: Claim) -> Claim:
    is_empty = claim.kind == "partial" and 0 in (claim.shape or ())
    return claim._replace(kind="replicated", op="") if is_empty else claim


def judge_whole(seen: Seen) -> str | None:
    """Return what is wrong with an op that has to see everything."""
    for index, claim in enumerate(seen.operands):
        if claim.differs:
            return f"input {index} is {said(claim)}, and it has to read all of it"
    zero = next((i for i, claim in enumerate(seen.results) if claim.zero), None)
    if zero is not None:
        return f"result {zero} is claimed to be zero, and nothing says so"
    return _compare(seen, [Claim("replicated")] * len(seen.results))


def _compare(seen: Seen, expected: Sequence[Claim]) -> str | None:
    for index, (claim, right) in enumerate(zip(seen.results, expected, strict=True)):
        if claim[:3] == right[:3] or (right.kind == "replicated" and claim.kind == "any" and _is_handle(seen, index)):
            continue
        if right.kind == "replicated" and claim.kind == "partial" and claim.op == "sum" and claim.zero:
            continue
        read = ", ".join(said(operand) for operand in seen.operands) or "nothing"
        return f"result {index} is claimed {said(claim)}; of {read} it makes {said(right)}"
    return None


def _is_handle(seen: Seen, index: int) -> bool:
    return seen.node.output_dtypes[index] in (dtypes.VARIANT, dtypes.RESOURCE)


# -- contributions


def _of_contributions(seen: Seen, factors: Factors) -> tuple[str | None, Sequence[Claim]]:
    """Contributions stay contributions where the op is linear in them, and nothing else differs."""
    partial = [i for i, claim in enumerate(seen.operands) if claim.kind == "partial"]
    first = seen.operands[partial[0]]
    other = next((i for i, claim in enumerate(seen.operands) if claim.differs and claim[:3] != first[:3]), None)
    if other is not None:
        return f"input {partial[0]} is {said(first)}, and input {other} {said(seen.operands[other])}", ()
    exact = factors.moves or (first.op == "sum" and all(seen.is_inexact(i) for i in partial))
    together = factors.added.issuperset(partial) and all(
        i in partial or seen.operands[i].zero or seen.operands[i].kind == "any" for i in factors.added
    )
    alone = len(partial) == 1 and partial[0] in factors.linear
    if not exact or not (together or alone):
        return f"input {partial[0]} is {said(first)}, in which it is not linear", ()
    made = Claim("partial", 0, first.op)
    return None, [Claim("replicated") if i in factors.counts else made for i in range(len(seen.results))]


# -- blocks


def _of_blocks(seen: Seen, factors: Factors) -> tuple[str | None, Sequence[Claim]]:
    """Blocks make blocks where all operands with the factor are cut along it, and contributions where it is folded."""
    index, name = _first(seen, factors)
    if not name:
        return f"input {index} is {said(seen.operands[index])}, along which it can't be cut", ()
    sizes: list[Dim] = []
    for i, (claim, names) in enumerate(zip(seen.operands, factors.operands, strict=True)):
        problem = _cut(claim, names, name, i in factors.sizes, sizes)
        if problem:
            return f"input {i} {problem} (input {index} is {said(seen.operands[index])})", ()
    if len(sizes) > 1 and not factors.apart and not all(line_up(size, sizes[0]) for size in sizes):
        return f"blocks of {', '.join(map(str, sizes))} are not known to be the same rows", ()
    return None, [_made(names, name, factors) for names in factors.results]


def _first(seen: Seen, factors: Factors) -> tuple[int, str]:
    """Return the first operand that differs, and which factor that cuts."""
    for index, (claim, names) in enumerate(zip(seen.operands, factors.operands, strict=True)):
        if not claim.differs:
            continue
        if names is None:
            return index, ""
        if claim.kind == "split":
            return index, names[claim.dim] if claim.dim < len(names) else ""
        at = [i for i, entry in enumerate(claim.value or ()) if is_local(entry)]
        fits = index in factors.sizes and len(at) == 1 and at[0] < len(names)
        return index, names[at[0]] if fits else ""
    raise AssertionError("none differs")


def _cut(claim: Claim, names: Names | None, name: str, is_size: bool, sizes: list[Dim]) -> str | None:
    """Return what is wrong with an operand where a factor is cut; add the size of its block to `sizes`."""
    at = [i for i, mine in enumerate(names or ()) if mine == name]
    if not at:
        return f"is {said(claim)}, and has no such dimension" if claim.differs else None
    if len(at) > 1:
        return "has that dimension twice"
    if is_size:
        local = [i for i, entry in enumerate(claim.value or ()) if is_local(entry)]
        if claim.kind != "local" or local != at:
            return "has to state the size of a block, and that only"
        sizes.append((claim.value or ())[at[0]])
        return None
    if claim.kind == "any":  # an empty container
        return None
    if claim.kind != "split" or claim.dim != at[0]:
        return f"is {said(claim)}, and should be split({at[0]})"
    sizes.append(claim.shape[at[0]] if claim.shape is not None and at[0] < len(claim.shape) else None)
    return None


def _made(names: Names | None, name: str, factors: Factors) -> Claim:
    if names is None:
        return Claim("replicated")
    if names.count(name) > 1:  # a block of rows would have the columns of all rows
        return Claim("nothing that is right")
    if name in names:
        return Claim("split", names.index(name))
    return Claim("partial", 0, factors.fold) if name in factors.folded else Claim("nothing that is right")


# -- sizes and zeros


def _sizes(seen: Seen, factors: Factors) -> str | None:
    """Return where a dimension of a result is said to have another size than the operands that name it."""
    known: dict[str, list[Dim]] = {}
    for i, (claim, names) in enumerate(zip(seen.operands, factors.operands, strict=True)):
        dims = claim.value if i in factors.sizes else claim.shape
        if names is None or dims is None or len(dims) != len(names) or claim.kind == "any":
            continue
        for name, dim in zip(names, dims, strict=True):
            if name and dim is not None and dim != -1:
                known.setdefault(name, []).append(dim)
    for i, (claim, names) in enumerate(zip(seen.results, factors.results, strict=True)):
        if names is None or claim.shape is None or claim.kind == "any":
            continue
        if len(claim.shape) != len(names):
            return f"result {i} is claimed to have {len(claim.shape)} dimensions, and has {len(names)}"
        for at, (name, dim) in enumerate(zip(names, claim.shape, strict=True)):
            problem = _size(
                dim, [] if factors.apart else known.get(name, []), claim.kind == "split" and claim.dim == at, seen, i
            )
            if problem:
                return f"dimension {at} of result {i} {problem}"
    return None


def _size(dim: Dim, known: Sequence[Dim], is_cut: bool, seen: Seen, index: int) -> str | None:
    if is_cut != is_local(dim) and not (is_cut and dim is None):
        return f"is claimed to have {dim} rows, and is {'cut' if is_cut else 'whole'}"
    if dim is None or not known or is_named_after(dim, seen.node, index):
        return None
    alike = [one for one in known if isinstance(one, int) == isinstance(dim, int)]
    if alike and dim not in alike:
        return f"is claimed to be {dim}, of an operand with {alike[0]}"
    return None


def _zeros(seen: Seen, factors: Factors) -> str | None:
    """Return where a result is claimed to be zero for no reason."""
    if factors.is_zero:
        return None
    one = {*factors.linear, *factors.zeros}
    by_one = any(claim.zero for i, claim in enumerate(seen.operands) if i in one)
    by_all = bool(factors.added) and all(seen.operands[i].zero for i in factors.added)
    for index, claim in enumerate(seen.results):
        if claim.zero and not (by_one or by_all):
            return f"result {index} is claimed to be zero, and nothing says so"
    return None
