"""Samples of elementwise ops: unary, binary with broadcasting, linear ones, selections, casts."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograph_rewrite.ops.rules import elementwise
from autograph_rewrite.ops.traits import ops_with
from tests.rules.sample import Draw, Make, Sample, Sizes, known

F32 = np.float32
INTS = ("Invert", "PopulationCount", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift")
BOOLS = ("LogicalNot", "LogicalAnd", "LogicalOr")
COMPLEX = ("Real", "Imag", "Conj", "ComplexAbs", "Angle")
NOT_BROADCAST = (*(op for op in elementwise.LINEAR_IN if op.endswith("Grad")), "Betainc", "ApproximateEqual")
ABOVE_ONE = ("Acosh", "Digamma", "Polygamma", "Zeta")
NOT_BINARY = ("Betainc", "ClipByValue")
WITHOUT_KERNEL = ("Copy", "CopyHost")


def _contents(op: str, r: Draw, *shape: int) -> np.ndarray:
    if op in INTS:
        return r.ints(7, *shape, low=1)
    if op in BOOLS:
        return r.bools(*shape)
    if op in COMPLEX:
        return r(*shape, dtype=np.complex128)
    values = r.unit(*shape)
    return values + 1 if op in ABOVE_ONE else values


def _unary(op: str) -> Sample:
    attrs: dict[str, Any] = {"message": "bad"} if op.startswith("CheckNumerics") else {}
    if op in COMPLEX and op != "Conj":
        attrs["Tout"] = 2
    return Sample(op, "ab", lambda d, r: [_contents(op, r, d["a"], d["b"])], attrs, "ab")


def _same_shapes(op: str, count: int = 2) -> Sample:
    return Sample(op, "ab", lambda d, r: [_contents(op, r, d["a"], d["b"]) for _ in range(count)], {}, "ab")


def _broadcasts(op: str) -> list[Sample]:
    """Both sides alike, a vector, a scalar, a column, and both sides stretched."""

    def pair(left: str, right: str) -> Make:
        def sides(d: Sizes, r: Draw) -> list[np.ndarray]:
            shapes = [[1 if x == "1" else d[x] for x in side] for side in (left, right)]
            return [_contents(op, r, *shape) for shape in shapes]

        return sides

    attrs = {"Tout": 18} if op == "Complex" else {}
    pairs = (("abc", "abc"), ("abc", "c"), ("", "ab"), ("ab", "a1"), ("1b", "a1"), ("bc", "abc"))
    return [Sample(op, "".join(sorted({*a, *b} - {"1"})), pair(a, b), attrs, "ab"[: len(a)]) for a, b in pairs]


def _some(op: str, *makes: Make, letters: str = "ab", **attrs: Any) -> list[Sample]:
    return [Sample(op, letters, make, attrs, letters) for make in makes]


BINARY = (*elementwise.LINEAR_IN, *elementwise.NONLINEAR_BINARY, *elementwise.AFFINE)

SAMPLES = [
    *(_unary(op) for op in (*elementwise.UNARY, *elementwise.LINEAR_UNARY)),
    *(_unary(op) for op in sorted(ops_with("forwards").difference(("RefIdentity", *WITHOUT_KERNEL)))),
    *(_unary(op) for op in ("ZerosLike",)),
    *(_same_shapes(op) for op in (*NOT_BROADCAST, "AccumulateNV2") if op not in ("Betainc", "AccumulateNV2")),
    *(_same_shapes(op, 3) for op in ("AddN", "Betainc", "IdentityN")),
    *(
        sample
        for op in BINARY
        if op not in (*NOT_BROADCAST, *NOT_BINARY, "AddN", "AccumulateNV2")
        for sample in _broadcasts(op)
    ),
    *_some(
        "ClipByValue",
        lambda d, r: [r(d["a"], d["b"]), np.float64(-0.5), np.float64(0.5)],
        lambda d, r: [r(d["a"], d["b"]), -r.unit(d["a"], d["b"]), r.unit(d["a"], d["b"])],
    ),
    *_some(
        "SelectV2",
        lambda d, r: [r.bools(d["a"], d["b"]), r(d["a"], d["b"]), r(d["a"], d["b"])],
        lambda d, r: [r.bools(d["a"], 1), r(d["a"], d["b"]), r(1, d["b"])],
        lambda d, r: [r.bools(), r(d["a"], d["b"]), r(d["b"])],
    ),
    *_some(
        "Select",
        lambda d, r: [r.bools(d["a"], d["b"]), r(d["a"], d["b"]), r(d["a"], d["b"])],
        lambda d, r: [r.bools(), r(d["a"], d["b"]), r(d["a"], d["b"])],
    ),
    Sample("Select", "ab", lambda d, r: [r.bools(d["a"]), r(d["a"], d["b"]), r(d["a"], d["b"])], {}, "a"),
    Sample("Cast", "ab", lambda d, r: [r(d["a"], d["b"], dtype=F32)], {"DstT": 2}, "ab", tolerance=1e-5),
    *_some("Cast", lambda d, r: [r(d["a"], d["b"])], DstT=9),
    *_some("Cast", lambda d, r: [r.bools(d["a"], d["b"])], DstT=2),
    *_some("Cast", lambda d, r: [r(d["a"], d["b"], dtype=np.complex128)], DstT=2),
    Sample("Cast", "a", lambda d, r: [known([d["a"], 3])], {"DstT": 9}),
    Sample("Mul", "a", lambda d, r: [known([d["a"]]), known([4])]),
]  # fmt: skip

NOT_RUN = {
    "AccumulateNV2": "graphs only",
    "Copy": "debugger only",
    "CopyHost": "debugger only",
}
