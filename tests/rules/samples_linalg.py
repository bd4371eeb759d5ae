"""Samples of linear algebra, transforms, images and texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.rules.sample import Draw, Sample, Sizes, known

F32 = np.float32
C128 = np.complex128


def _matrices(d: Sizes, r: Draw) -> np.ndarray:
    return r.definite(d["a"], d["b"], 3, 3)


def _stacks(op: str, tolerance: float = 1e-9, undefined: tuple[int, ...] = (), **attrs: Any) -> Sample:
    return Sample(op, "ab", lambda d, r: [_matrices(d, r)], attrs, "ab", tolerance=tolerance, undefined=undefined)


def _diagonals(op: str, k: Any) -> Sample:
    return Sample(op, "ab", lambda d, r: [r(d["a"], d["b"], 3, 3), known(k), np.float64(0)], {}, "ab")


def _solve(op: str, matrices: Any, *more: Any, **attrs: Any) -> Sample:
    """Return a solve with columns c."""
    return Sample(op, "abc", lambda d, r: [matrices(d, r), r(d["a"], d["b"], 3, d["c"]), *more], attrs, "abc")


LINALG = [
    *(_stacks(op) for op in ("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant")),
    *(_stacks(op, 1e-7) for op in ("Qr", "SelfAdjointEigV2", "Svd", "Lu")),
    _stacks("SelfAdjointEigV2", 1e-7, (1,), compute_v=False),
    _stacks("Svd", 1e-7, (1, 2), compute_uv=False),
    _stacks("Eig", 1e-7, (1,), Tout=18, compute_v=False),
    _stacks("Eig", 1e-7, Tout=18),
    *(
        Sample(op, "ab", lambda d, r: [_matrices(d, r).astype(C128)], {}, "ab", tolerance=1e-7)
        for op in ("MatrixLogarithm",)
    ),
    _stacks("MatrixSquareRoot", 1e-7),
    Sample("CholeskyGrad", "ab", lambda d, r: [_matrices(d, r), _matrices(d, r)], {}, "ab"),
    _solve("MatrixSolve", _matrices, adjoint=True),
    _solve("MatrixSolveLs", _matrices, np.float64(0)),
    _solve("MatrixTriangularSolve", _matrices),
    Sample("MatrixTriangularSolve", "abc", lambda d, r: [_matrices(d, r), r(d["b"], 3, d["c"])], {}, "ac"),
    Sample("MatrixTriangularSolve", "c", lambda d, r: [r.definite(3, 3), r(3, d["c"])], {"lower": False}, "c"),
    Sample("MatrixTriangularSolve", "ab", lambda d, r: [r.definite(3, 3), r(d["a"], d["b"], 3, 2)], {}, "ab"),
    Sample("MatrixTriangularSolve", "ab", lambda d, r: [r.definite(d["a"], 1, 3, 3), r(1, d["b"], 3, 2)], {}, "ab"),
    Sample("BandedTriangularSolve", "ac", lambda d, r: [r.unit(d["a"], 2, 3), r(d["a"], 3, d["c"])], {}, "", "ac"),
    Sample("TridiagonalSolve", "ac", lambda d, r: [r.unit(d["a"], 3, 4) + 1, r(d["a"], 4, d["c"])], {}, "ac"),
    Sample("Cross", "ab", lambda d, r: [r(d["a"], d["b"], 3), r(d["a"], d["b"], 3)], {}, "ab"),
    Sample("MatrixBandPart", "ab", lambda d, r: [r(d["a"], d["b"], 3, 4), known(1), known(-1)], {}, "ab"),
    Sample("MatrixDiag", "ab", lambda d, r: [r(d["a"], d["b"], 3)], {}, "ab"),
    Sample("MatrixDiagPart", "ab", lambda d, r: [r(d["a"], d["b"], 3, 3)], {}, "ab"),
    Sample("MatrixSetDiag", "ab", lambda d, r: [r(d["a"], d["b"], 3, 3), r(d["a"], d["b"], 3)], {}, "ab"),
    *(
        Sample(
            f"MatrixDiag{v}", "ab",
            lambda d, r: [r(d["a"], d["b"], 3), known(0), known(-1), known(-1), np.float64(0)], {}, "ab",
        )
        for v in ("V2", "V3")
    ),
    Sample(
        "MatrixDiagV3", "a",
        lambda d, r: [r(d["a"], 2, 3), known([0, 1]), known(-1), known(-1), np.float64(1)], {}, "a",
    ),
    *(_diagonals(f"MatrixDiagPart{v}", k) for v in ("V2", "V3") for k in (0, [0, 1])),
    *(
        Sample(
            f"MatrixSetDiag{v}", "ab", lambda d, r: [r(d["a"], d["b"], 3, 3), r(d["a"], d["b"], 3), known(0)], {}, "ab",
        )
        for v in ("V2", "V3")
    ),
    Sample("MatrixSetDiagV3", "a", lambda d, r: [r(d["a"], 3, 3), r(d["a"], 2, 3), known([0, 1])], {}, "a"),
    *(Sample(op, "ab", lambda d, r: [r(d["a"], d["b"], 4, dtype=C128)], {}, "ab") for op in ("FFT", "IFFT")),
    *(Sample(op, "a", lambda d, r: [r(d["a"], 4, 4, dtype=C128)], {}, "a") for op in ("FFT2D", "IFFT2D")),
    *(Sample(op, "a", lambda d, r: [r(d["a"], 2, 2, 2, dtype=C128)], {}, "a") for op in ("FFT3D", "IFFT3D")),
    Sample("RFFT", "a", lambda d, r: [r(d["a"], 4), known([4])], {"Tcomplex": 18}, "a"),
    Sample("IRFFT", "a", lambda d, r: [r(d["a"], 3, dtype=C128), known([4])], {"Treal": 2}, "a"),
    Sample("RFFT2D", "a", lambda d, r: [r(d["a"], 4, 4), known([4, 4])], {"Tcomplex": 18}, "a"),
    Sample("IRFFT2D", "a", lambda d, r: [r(d["a"], 4, 3, dtype=C128), known([4, 4])], {"Treal": 2}, "a"),
    Sample("RFFT3D", "a", lambda d, r: [r(d["a"], 2, 2, 4), known([2, 2, 4])], {"Tcomplex": 18}, "a"),
    Sample("IRFFT3D", "a", lambda d, r: [r(d["a"], 2, 2, 3, dtype=C128), known([2, 2, 4])], {"Treal": 2}, "a"),
]  # fmt: skip


def _photo(op: str, *rest: Any, **attrs: Any) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        return [r.unit(d["n"], 4, 4, 3, dtype=F32), *rest]

    return Sample(op, "n", make, attrs, "n", tolerance=1e-5)


def _resized_back(op: str, *rest: Any) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        return [r(d["n"], 2, 2, 3, dtype=F32), r(d["n"], 4, 4, 3, dtype=F32), *rest]

    return Sample(op, "n", make, {}, "n", tolerance=1e-4)


SCALE = (np.asarray([0.5, 0.5], F32), np.asarray([0.0, 0.0], F32))
PATCHES = {"rates": [1, 1, 1, 1], "ksizes": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}


def _boxes(d: Sizes, r: Draw) -> list[np.ndarray]:
    corners = np.sort(r.unit(d["n"], 4, 1, 2, 2, dtype=F32), axis=-2).reshape(d["n"], 4, 1, 4)
    half = np.float32(0.5)
    return [corners, r.unit(d["n"], 4, 2, dtype=F32), known(2), known(3), half, np.float32(0.1)]


IMAGES = [
    *(
        _photo(op, known([2, 3]))
        for op in ("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ResizeNearestNeighbor")
    ),
    Sample("ResizeNearestNeighborGrad", "n", lambda d, r: [r(d["n"], 2, 2, 3), known([4, 4])], {}, "n"),
    *(_resized_back(op) for op in ("ResizeBilinearGrad", "ResizeBicubicGrad")),
    _photo("ScaleAndTranslate", known([2, 2]), *SCALE),
    _resized_back("ScaleAndTranslateGrad", *SCALE),
    _photo("ExtractImagePatches", **PATCHES),
    Sample(
        "ExtractVolumePatches", "n", lambda d, r: [r(d["n"], 4, 4, 4, 2)],
        {"ksizes": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}, "n",
    ),
    Sample("SpaceToDepth", "n", lambda d, r: [r(d["n"], 4, 4, 3)], {"block_size": 2}, "n"),
    Sample("DepthToSpace", "n", lambda d, r: [r(d["n"], 2, 2, 4)], {"block_size": 2}, "n"),
    Sample(
        "ImageProjectiveTransformV2", "n", lambda d, r: [r(d["n"], 4, 4, 3), r.unit(1, 8, dtype=F32), known([4, 4])],
        {"interpolation": "NEAREST"}, "n",
    ),
    Sample(
        "ImageProjectiveTransformV3", "n",
        lambda d, r: [r(d["n"], 4, 4, 3), r.unit(d["n"], 8, dtype=F32), known([4, 4]), F32(0)],
        {"interpolation": "BILINEAR", "fill_mode": "CONSTANT"}, "n",
    ),
    Sample("CombinedNonMaxSuppression", "n", _boxes, {}, "n"),
    _photo("AdjustContrastv2", F32(0.5)),
    _photo("AdjustHue", F32(0.5)),
    _photo("AdjustSaturation", F32(0.5)),
    _photo("RGBToHSV"),
    _photo("HSVToRGB"),
    Sample(
        "DrawBoundingBoxes", "n", lambda d, r: [r.unit(d["n"], 4, 4, 3, dtype=F32), _boxes(d, r)[0][:, :, 0]], {}, "n",
    ),
    Sample(
        "DrawBoundingBoxesV2", "n",
        lambda d, r: [r.unit(d["n"], 4, 4, 3, dtype=F32), _boxes(d, r)[0][:, :, 0], r.unit(1, 3, dtype=F32)], {}, "n",
    ),
]  # fmt: skip


def _words(r: Draw, *shape: int) -> np.ndarray:
    numbers = r.ints(1000, *shape, low=100)
    return np.asarray([str(n).encode() for n in numbers.ravel()], object).reshape(shape)


def _texts(op: str, *rest: Any, **attrs: Any) -> Sample:
    return Sample(op, "ab", lambda d, r: [_words(r, d["a"], d["b"]), *rest], attrs, "ab")


TEXTS = [
    _texts("StringToNumber"),
    _texts("StringToHashBucket", num_buckets=7),
    _texts("StringToHashBucketFast", num_buckets=7),
    _texts("StringToHashBucketStrong", num_buckets=7, key=[1, 2]),
    *(_texts(op) for op in ("StringLower", "StringUpper", "StringStrip", "StringLength", "EncodeBase64")),
    _texts("RegexReplace", np.asarray(b"1", object), np.asarray(b"x", object)),
    _texts("RegexFullMatch", np.asarray(b".*1", object)),
    _texts("StaticRegexReplace", pattern="1", rewrite="x"),
    _texts("StaticRegexFullMatch", pattern=".*1"),
    _texts("UnicodeTranscode", input_encoding="UTF-8", output_encoding="UTF-8"),
    _texts("DecodeCompressed"),
    _texts("DecodePaddedRaw", known(4), out_type=4),
    Sample("DecodeBase64", "a", lambda d, r: [np.full(d["a"], b"MTIz", object)], {}, "a"),
    Sample("UnicodeScript", "ab", lambda d, r: [r.ints(200, d["a"], d["b"], low=60)], {}, "ab"),
    Sample("AsString", "ab", lambda d, r: [r.ints(9, d["a"], d["b"])], {}, "ab"),
    Sample("Bucketize", "ab", lambda d, r: [r(d["a"], d["b"])], {"boundaries": [0.0, 0.5]}, "ab"),
    Sample("StringJoin", "ab", lambda d, r: [_words(r, d["a"], d["b"]) for _ in range(2)], {}, "ab"),
    Sample("StringJoin", "ab", lambda d, r: [_words(r, d["a"], d["b"]), np.asarray(b"-", object)], {}, "ab"),
]

BITS = [
    Sample("Bitcast", "ab", lambda d, r: [r(d["a"], d["b"])], {"type": 9}, "ab"),
    Sample("Bitcast", "ab", lambda d, r: [r.ints(9, d["a"], d["b"])], {"type": 4}, "ab"),
    Sample("Bitcast", "ab", lambda d, r: [r.ints(9, d["a"], d["b"], 2)], {"type": 9}, "ab"),
    Sample("Bitcast", "b", lambda d, r: [r.ints(9, 2).reshape(2)], {"type": 9}),
]

SAMPLES = [*LINALG, *IMAGES, *TEXTS, *BITS]
NOT_RUN = {
    "BatchMatrixBandPart": "TensorFlow removed it; only old graphs have it",
    "MatrixExponential": "TensorFlow removed it; only old graphs have it",
}
