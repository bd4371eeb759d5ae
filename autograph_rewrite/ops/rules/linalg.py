"""Linear algebra and Fourier transforms work on the innermost dimensions; the batch dimensions stay split."""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.facts.symbolic_dims import are_same
from autograph_rewrite.ops.rules.base import Op, Rule
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import Placer, Signature, axes, every, shapes


def _diagonal(n: Op) -> Signature | None:
    """All dimensions before those of the matrices stay split."""
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
    # Padding with something other than zero is not linear; only the old ops have no padding.
    linear = (0,) if n.op in ("MatrixDiag", "MatrixDiagPart") else ()
    return Signature((source,) + (None,) * (len(n.inputs) - 1), (result,), linear=linear)


def shape_diagonal(n: Op) -> tuple[Shape | None, ...]:
    """Return the shape for main diagonals from the operand; for other diagonals as stated."""
    shape, (known,) = n.shape(0), shapes(n, _diagonal(n))
    if not shape or any(n.ints(i) != (0,) for i in ([1] if "V" in n.op and "Set" not in n.op else [])):
        return (known,)
    if n.op.startswith("MatrixSetDiag"):
        return (shape,)
    if n.op.startswith("MatrixDiagPart"):
        return ((*shape[:-2], shape[-1]),) if len(shape) > 1 and are_same(*shape[-2:]) else (known,)
    is_square = all(n.ints(i) == (-1,) for i in ([2, 3] if "V" in n.op else []))
    return ((*shape, shape[-1]),) if is_square else (known,)


def _values_and_vectors(n: Op) -> str:
    """All but the last two dimensions stay split; vectors that are not requested are empty."""
    vectors = 2 if n.op == "Svd" else 1
    asked = n.attr("compute_uv" if n.op == "Svd" else "compute_v")
    return f"... . . -> ... .{', ... . .' * vectors if asked else ', *' * vectors}"


RULES = {
    **every(factors(_values_and_vectors), "Svd SelfAdjointEigV2 Eig"),
    **every(
        Rule(Placer(_diagonal), shape_diagonal),
        "MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3",
        "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3",
    ),
    # Stacks of systems stay split, and so do the columns of the right-hand sides: each is a separate system.
    **lines("""
... . ., ... . column -> ... . column; linear 1 : MatrixSolve TridiagonalSolve MatrixSolveLs
... . ., ... . column -> ... . column; linear 1; stretches ... column : MatrixTriangularSolve
... . ., ... . column -> ... . column; linear 1; stretches ... column; fragile ... column : BandedTriangularSolve
... . . -> ... . . : Cholesky MatrixInverse MatrixExponential MatrixLogarithm MatrixSquareRoot
... . ., ... . . -> ... . . : CholeskyGrad
... . . -> ... : MatrixDeterminant
... . . -> ..., ... : LogMatrixDeterminant
... . . -> ... . ., ... . . : Qr
... . . -> ... . ., ... . : Lu
... -c, ... -c -> ... -c; linear 0 1 : Cross
... -r -c, *, * -> ... -r -c; linear 0 : MatrixBandPart BatchMatrixBandPart
... . -> ... .; linear 0 : FFT IFFT RFFT IRFFT
... . . -> ... . .; linear 0 : FFT2D IFFT2D RFFT2D IRFFT2D
... . . . -> ... . . .; linear 0 : FFT3D IFFT3D RFFT3D IRFFT3D
whole : Diag DiagPart TridiagonalMatMul
"""),
}
