"""Linear algebra and Fourier transforms work on the innermost dimensions; the batch dimensions stay split."""

from __future__ import annotations

from collections.abc import Callable

from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.facts.symbolic_dims import are_same
from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import (
    Labels,
    Placer,
    Signature,
    axes,
    every,
    shapes,
    signed,
    without,
)

Describe = Callable[[Op], Signature | None]


def batched(inner: int, outputs: tuple[int, ...], linear: tuple[int, ...] = ()) -> Describe:
    """Return the signature of an op on stacks of blocks.

    Args:
        inner: dimensions of one block of each input; inputs of a lower rank than the first are parameters.
        outputs: dimensions of one block of each output.
        linear: inputs in which the op is linear.
    """

    def describe(n: Op) -> Signature | None:
        """The dimensions in front of one block stay split."""
        rank = n.rank(0)
        if rank is None or rank < inner:
            return None
        stack = axes(rank - inner)
        inputs: list[Labels | None] = [stack + ("",) * inner]
        for fact in n.inputs[1:]:
            is_block = fact.rank == rank and rank > 1
            inputs.append(stack + ("",) * inner if is_block else None)
        return Signature(tuple(inputs), tuple(stack + ("",) * k for k in outputs), linear=linear)

    return describe


def _solve(n: Op) -> Signature | None:
    """Stacks of systems stay split, and so do the columns of the right-hand sides: each is a system of its own."""
    rank = n.rank(0)
    if rank is None or rank < 2 or n.rank(1) != rank:
        return None
    stack = axes(rank - 2)
    sides = (*stack, "", "column")
    return Signature(((*stack, "", ""), sides) + (None,) * (len(n.inputs) - 2), (sides,), linear=(1,))


def _broadcast_solve(n: Op) -> Signature | None:
    """The same, where the stacks of the two operands broadcast."""
    ranks = n.rank(0), n.rank(1)
    if ranks[0] is None or ranks[1] is None or min(ranks[0], ranks[1]) < 2:
        return None
    rank = max(ranks[0], ranks[1])
    stack = axes(rank - 2)
    sides = (*stack[rank - ranks[1] :], "", "column")
    inputs = ((*stack[rank - ranks[0] :], "", ""), sides)
    return Signature(inputs, ((*stack, "", "column"),), linear=(1,), broadcast=True)


def _banded_solve(n: Op) -> Signature | None:
    """Like a triangular solve, but its kernel refuses empty blocks."""
    found = _broadcast_solve(n)
    return None if found is None else found._replace(fragile=frozenset(found.outputs[0] or ()))


def _diagonal(n: Op) -> Signature | None:
    """All dimensions in front of the matrices stay split."""
    static, rank = n.static[0], n.rank(0)
    if static is None or not rank:
        return None
    stack = axes(min(rank, len(static)) - 1)
    if n.op.startswith("MatrixSetDiag"):
        stack = axes(rank - 2)
        diagonal = n.rank(1)
        if diagonal is None or diagonal < len(stack) + 1:
            return None
        second = stack + ("",) * (diagonal - len(stack))
        opened = (*stack, "", "")
        return Signature((opened, second) + (None,) * (len(n.inputs) - 2), (opened,), additive=True)
    if n.op.startswith("MatrixDiagPart"):
        stack = axes(rank - 2)
    elif len(stack) + 2 != len(static):
        stack = axes(len(static) - 2)
    source = stack + ("",) * (rank - len(stack))
    result = stack + ("",) * (len(static) - len(stack))
    return Signature((source,) + (None,) * (len(n.inputs) - 1), (result,), linear=_linear_diagonal(n))


def shape_diagonal(n: Op) -> tuple[Shape | None, ...]:
    """Square matrices of main diagonals, the main diagonals of matrices, and matrices with others."""
    shape, (known,) = n.shape(0), shapes(n, _diagonal(n))
    if not shape or any(n.ints(i) != (0,) for i in ([1] if "V" in n.op and "Set" not in n.op else [])):
        return (known,)
    if n.op.startswith("MatrixSetDiag"):
        return (shape,)
    if n.op.startswith("MatrixDiagPart"):
        return ((*shape[:-2], shape[-1]),) if len(shape) > 1 and are_same(*shape[-2:]) else (known,)
    is_square = all(n.ints(i) == (-1,) for i in ([2, 3] if "V" in n.op else []))
    return ((*shape, shape[-1]),) if is_square else (known,)


def _linear_diagonal(n: Op) -> tuple[int, ...]:
    """Padding with something other than zero is not linear; only the old ops have no padding."""
    return (0,) if n.op in ("MatrixDiag", "MatrixDiagPart") else ()


def _band(n: Op) -> Signature | None:
    """All but the last two dimensions stay split."""
    rank = n.rank(0)
    if rank is None or rank < 2:
        return None
    labels = without(axes(rank), -1, -2)
    return Signature((labels, None, None), (labels,), linear=(0,))


def _cross(n: Op) -> Signature | None:
    """All but the last dimension stay split."""
    rank = n.rank(0)
    if not rank:
        return None
    labels = without(axes(rank), -1)
    return Signature((labels, labels), (labels,), linear=(0, 1))


def _decomposition(values: tuple[int, ...], vectors: tuple[int, ...], flag: str) -> Rule:
    """Values, and vectors only if `flag` asks for them: otherwise their outputs are empty."""
    describe = batched(2, values + vectors)

    def on_request(n: Op) -> Signature | None:
        """All but the last two dimensions stay split."""
        found = describe(n)
        if found is None or n.attr(flag):
            return found
        return found._replace(outputs=found.outputs[: len(values)] + (None,) * len(vectors))

    return signed(on_request)


def _transform(inner: int) -> Rule:
    return signed(batched(inner, (inner,), linear=(0,)))


WHOLE = Rule(whole, lambda n: n.static)

RULES: dict[str, Rule] = {
    **every(
        factors("... . . -> ... . ."),
        "Cholesky MatrixInverse MatrixExponential MatrixLogarithm MatrixSquareRoot",
    ),
    "MatrixSolve": signed(_solve),
    "MatrixTriangularSolve": signed(_broadcast_solve),
    "BandedTriangularSolve": signed(_banded_solve),
    "TridiagonalSolve": signed(_solve),
    "MatrixSolveLs": signed(_solve),
    "CholeskyGrad": factors("... . ., ... . . -> ... . ."),
    "MatrixDeterminant": factors("... . . -> ..."),
    "LogMatrixDeterminant": factors("... . . -> ..., ..."),
    "Qr": factors("... . . -> ... . ., ... . ."),
    "Svd": _decomposition((1,), (2, 2), "compute_uv"),
    "SelfAdjointEigV2": _decomposition((1,), (2,), "compute_v"),
    "Eig": _decomposition((1,), (2,), "compute_v"),
    "Lu": factors("... . . -> ... . ., ... ."),
    "Cross": signed(_cross),
    "MatrixBandPart": signed(_band),
    "BatchMatrixBandPart": signed(_band),
    **every(
        Rule(Placer(_diagonal), shape_diagonal),
        "MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3",
        "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3",
    ),
    **every(_transform(1), "FFT IFFT RFFT IRFFT"),
    **every(_transform(2), "FFT2D IFFT2D RFFT2D IRFFT2D"),
    **every(_transform(3), "FFT3D IFFT3D RFFT3D IRFFT3D"),
    **every(WHOLE, "Diag DiagPart TridiagonalMatMul"),
}
