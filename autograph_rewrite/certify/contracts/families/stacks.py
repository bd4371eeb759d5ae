"""Factors of ops on batches of matrices: the batch dimensions are free."""

from __future__ import annotations

from autograph_rewrite.certify.contracts.factors import Factors
from autograph_rewrite.certify.contracts.families.moves import letters
from autograph_rewrite.certify.contracts.patterns import factors_of
from autograph_rewrite.certify.contracts.seen import Seen
from autograph_rewrite.ir.types import dtypes


def decomposition(seen: Seen) -> Factors | None:
    """Values, and vectors where they are asked for; otherwise those are empty."""
    flag = "compute_uv" if seen.node.op == "Svd" else "compute_v"
    vectors = "@.." if seen.node.attr(flag) else "*"
    return factors_of(seen, ",".join(["@..->@.", *[vectors] * (len(seen.results) - 1)]))


def diagonal(seen: Seen) -> Factors | None:
    """Matrices of diagonals, and diagonals of matrices; several of them take a dimension more."""
    rank, made = seen.rank(0), seen.results[0].shape
    if rank is None or made is None:
        return None
    is_part = "Part" in seen.node.op
    names = letters((rank if is_part else len(made)) - 2)
    operands = (names + ("",) * (rank - len(names)), *(None,) * (len(seen.operands) - 1))
    linear = (0,) if seen.node.op in ("MatrixDiag", "MatrixDiagPart") else ()  # others pad with what they are given
    return Factors(operands, (names + ("",) * (len(made) - len(names)),), linear=linear)


def set_diagonal(seen: Seen) -> Factors | None:
    """Matrices with other diagonals: linear in both together."""
    rank, diagonals = seen.rank(0), seen.rank(1)
    if rank is None or diagonals is None or diagonals < rank - 1:
        return None
    names = letters(rank - 2)
    matrix = (*names, "", "")
    operands = (matrix, names + ("",) * (diagonals - len(names)), *(None,) * (len(seen.operands) - 2))
    return Factors(operands, (matrix,), added=frozenset((0, 1)))


def bitcast(seen: Seen) -> Factors | None:
    """The same bits: narrower elements add a last dimension, wider ones use it up."""
    widths = [dtypes.numpy_dtype(kind) for kind in (seen.node.inputs[0].dtype, seen.node.output_dtypes[0])]
    if widths[0] is None or widths[1] is None:
        return None
    before, after = widths[0].itemsize, widths[1].itemsize
    text = "@->@" if before == after else "@->@." if before > after else "@.->@"
    return factors_of(seen, text)
