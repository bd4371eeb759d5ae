"""Samples of reductions, contractions, layout changes, pieces and sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from tests.rules.sample import Draw, Sample, Sizes, known


def tensor(letters: str, dtype: Any = np.float64) -> Any:
    """Return a maker of one tensor whose sizes are `letters`."""
    return lambda d, r: r(*(d[x] for x in letters), dtype=dtype)


def _reduced(op: str, axes: list[int], keep: bool) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        shape = (d["a"], d["b"], d["c"])
        data = r.bools(*shape) if op in ("All", "Any") else r(*shape)
        return [data, known(axes)]

    stays = "abc" if op in ("Sum", "Max", "Min", "Prod", "All", "Any", "Mean") else ""
    return Sample(op, "abc", make, {"keep_dims": keep}, stays)


REDUCTIONS = [
    _reduced(op, axes, keep)
    for op in ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
    for axes, keep in (([0], False), ([1, -1], True), ([-2], False), ([0, 1, 2], False), ([], False))
]
REDUCTIONS.append(Sample("L2Loss", "ab", lambda d, r: [r(d["a"], d["b"])], {}, "ab"))


def _matmul(a: bool, b: bool) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        left = r(d["k"], d["m"]) if a else r(d["m"], d["k"])
        return [left, r(d["n"], d["k"]) if b else r(d["k"], d["n"])]

    return Sample("MatMul", "mkn", make, {"transpose_a": a, "transpose_b": b}, "mkn")


def _batch_matmul(op: str, a: bool, b: bool, stack: tuple[str, str]) -> Sample:
    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        left, right = ([1 if x == "1" else d[x] for x in s] for s in stack)
        first = r(*left, d["k"], d["m"]) if a else r(*left, d["m"], d["k"])
        return [first, r(*right, d["n"], d["k"]) if b else r(*right, d["k"], d["n"])]

    letters = "".join(sorted(set("".join(stack)) - {"1"})) + "mkn"
    attrs = {"adj_x": a, "adj_y": b}
    return Sample(op, letters, make, attrs | ({"Tout": 2} if op.endswith("V3") else {}), letters)


def _einsum(equation: str, *shapes: str) -> Sample:
    letters = "".join(sorted(set("".join(shapes)) - {"1"}))
    right = equation.split("->")[1]
    once = "".join(x for x in letters if all(t.count(x) < 2 for t in (*equation.split("->")[0].split(","), right)))
    return Sample(
        "Einsum",
        letters,
        lambda d, r: [r(*(1 if x == "1" else d[x] for x in shape)) for shape in shapes],
        {"equation": equation},
        once if "..." not in equation or "1" in "".join(shapes) else right.replace(".", ""),
    )


CONTRACTIONS = [
    *(_matmul(a, b) for a, b in itertools.product((False, True), repeat=2)),
    *(_batch_matmul("BatchMatMulV2", a, b, ("ef", "ef")) for a, b in itertools.product((False, True), repeat=2)),
    *(
        _batch_matmul("BatchMatMulV2", False, b, s)
        for b in (False, True)
        for s in (("ef", "f"), ("", "e"), ("1f", "e1"))
    ),
    _batch_matmul("BatchMatMul", False, True, ("e", "e")),
    _batch_matmul("BatchMatMulV3", True, False, ("e", "e")),
    _einsum("ab,bc->ac", "ab", "bc"),
    _einsum("abc,acd->abd", "abc", "acd"),
    _einsum("...ij,...jk->...ik", "eij", "1jk"),
    _einsum("...ij,...jk->...ik", "1eij", "f1jk"),
    _einsum("i...,...j->j...i", "ie", "f1j"),
    _einsum("aecd,abcd->acbe", "aecd", "abcd"),
    _einsum("abc->cb", "abc"),
    _einsum("ab,cd->abcd", "ab", "cd"),
    _einsum("aa->a", "aa"),
    _einsum("aa->", "aa"),
    _einsum("a->aa", "a"),
    _einsum("abb->ab", "abb"),
    _einsum("ab->abb", "ab"),
    _einsum("abb,ac->cbb", "abb", "ac"),
    _einsum("a,b->aab", "a", "b"),
    _einsum("...ab,bc->...ac", "eab", "bc"),
    _einsum("...ab,...bc->...ac", "eab", "feb" + "c"),
]


def one(op: str, letters: str, *rest: Any, stays: str | None = None, **attrs: Any) -> Sample:
    """Return a sample of an op on one tensor, followed by stated operands."""

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        return [tensor(letters)(d, r), *(known(x(d) if callable(x) else x) for x in rest)]

    return Sample(op, "".join(sorted(set(letters))), make, attrs, letters if stays is None else stays)


LAYOUT = [
    replace(one("Reshape", "abc", lambda d: [-1, d["c"]], stays="a"), stays_static="c"),
    one("Reshape", "abc", lambda d: [d["a"] * d["b"], d["c"]], stays="a"),
    one("Reshape", "abc", lambda d: [d["a"], d["b"] * d["c"]], stays="ab"),
    one("Reshape", "abc", lambda d: [d["a"], -1], stays="ab"),
    one("Reshape", "abc", lambda d: [-1], stays="a"),
    one("Reshape", "abc", lambda d: [d["a"], 1, d["b"], d["c"]]),
    one("Reshape", "abc", lambda d: [d["c"], d["b"], d["a"]], stays=""),
    one("Transpose", "abc", [2, 0, 1]),
    one("ConjugateTranspose", "ab", [1, 0]),
    *(one("ExpandDims", "ab", axis) for axis in (0, 1, 2, -1)),
    Sample("Squeeze", "ac", lambda d, r: [r(1, d["a"], 1, d["c"])], {"squeeze_dims": [0, -2]}, "ac"),
    Sample("Squeeze", "ac", lambda d, r: [r(1, d["a"], 1, d["c"])], {}),
    Sample("BroadcastTo", "abc", lambda d, r: [r(d["c"]), known([d["a"], d["b"], d["c"]])], {}, "ab"),
    Sample("BroadcastTo", "abc", lambda d, r: [r(d["b"], 1), known([d["a"], d["b"], d["c"]])], {}, "ab"),
    Sample("BroadcastTo", "ab", lambda d, r: [r(), known([d["a"], d["b"]])]),
    Sample("Tile", "ab", lambda d, r: [r(d["a"], 1), known([1, d["b"]])], {}, "a"),
    Sample("Tile", "ab", lambda d, r: [r(d["a"], d["b"]), known([2, 1])], {}, "b"),
    Sample("Fill", "ab", lambda d, r: [known([d["a"], d["b"]]), r()]),
]
PIECES = [
    *(
        Sample("Pack", "ab", lambda d, r: [r(d["a"], d["b"]) for _ in range(3)], {"axis": axis}, "ab")
        for axis in (0, 1, 2, -1)
    ),
    Sample("Unpack", "ac", lambda d, r: [r(d["a"], 2, d["c"])], {"axis": 1, "num": 2}, "ac"),
    Sample("Unpack", "ac", lambda d, r: [r(d["a"], d["c"], 2)], {"axis": -1, "num": 2}, "ac"),
    Sample("Concat", "abc", lambda d, r: [known(1), r(d["a"], d["b"]), r(d["a"], d["c"])], {}, "a"),
    Sample("ConcatV2", "abc", lambda d, r: [r(d["a"], d["b"]), r(d["a"], d["c"]), known(-1)], {}, "a"),
    Sample("ConcatV2", "abc", lambda d, r: [r(d["b"], d["a"]), r(d["c"], d["a"]), known(0)], {}, "a"),
    Sample("Split", "ac", lambda d, r: [known(1), r(d["a"], 4, d["c"])], {"num_split": 2}, "ac"),
    Sample("Split", "ac", lambda d, r: [known(-1), r(d["a"], d["c"], 4)], {"num_split": 2}, "ac"),
    Sample("SplitV", "b", lambda d, r: [known([d["b"], 4]), known([1, -1]), known(0)], {"num_split": 2}),
    Sample(
        "SplitV", "ac", lambda d, r: [r(d["a"], 4, d["c"]), known([1, 3]), known(1)], {"num_split": 2}, "ac",
    ),
    Sample("Slice", "abc", lambda d, r: [r(d["a"], 4, d["c"]), known([0, 1, 0]), known([-1, 2, -1])], {}, "ac"),
    Sample("Slice", "ac", lambda d, r: [r(d["a"], 4, d["c"]), known([0, 1, 0]), known([d["a"], -1, d["c"]])], {}, "ac"),
    Sample("Slice", "a", lambda d, r: [r(d["a"], 4), known([1, 0]), known([-1, 4])]),
    Sample("Pad", "ac", lambda d, r: [r(d["a"], 2, d["c"]), known([[0, 0], [1, 2], [0, 0]])], {}, "ac"),
    Sample("Pad", "a", lambda d, r: [r(d["a"], 2), known([[0, 1], [1, 2]])]),
    Sample(
        "PadV2", "ac", lambda d, r: [r(d["a"], 2, d["c"]), known([[0, 0], [1, 2], [0, 0]]), np.float64(3)], {}, "ac",
    ),
    Sample(
        "MirrorPad", "ac", lambda d, r: [r(d["a"], 3, d["c"]), known([[0, 0], [1, 2], [0, 0]])],
        {"mode": "REFLECT"}, "ac",
    ),
    Sample(
        "MirrorPadGrad", "ac", lambda d, r: [r(d["a"], 6, d["c"]), known([[0, 0], [1, 2], [0, 0]])],
        {"mode": "REFLECT"}, "ac",
    ),
    Sample("ReverseV2", "abc", lambda d, r: [r(d["a"], d["b"], d["c"]), known([1, -1])], {}, "a"),
]  # fmt: skip


def _strided(begin: list[int], end: list[int], stride: list[int], stays: str, **masks: int) -> Sample:
    operands = [known(x) for x in (begin, end, stride)]
    return Sample("StridedSlice", "ac", lambda d, r: [r(d["a"], 4, d["c"]), *operands], masks, stays)


COMPUTED = np.array([0, 1, 0], np.int32), np.array([0, 3, 0], np.int32)
"""Bounds of which nothing is known, as of a place that is drawn at random."""


def _strided_gradient(begin: list[int], end: list[int], stays: str, **masks: int) -> Sample:

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        import tensorflow as tf

        steps = [1] * len(begin)
        whole = r(d["a"], 4, d["c"])
        part = tf.raw_ops.StridedSlice(input=whole, begin=begin, end=end, strides=steps, **masks).numpy()
        return [known([d["a"], 4, d["c"]]), known(begin), known(end), known(steps), r(*part.shape)]

    return Sample("StridedSliceGrad", "ac", make, masks, stays)


STRIDED = [
    _strided([0, 1], [0, 3], [1, 1], "ac", begin_mask=1, end_mask=1),
    _strided([0, 0, 0], [0, 4, 2], [1, 2, 1], "a", begin_mask=1, end_mask=1),
    _strided([0, -1], [0, 0], [1, 1], "ac", begin_mask=1, end_mask=1, shrink_axis_mask=2),
    _strided([0, 0], [0, 1], [1, 1], "ac", ellipsis_mask=1, new_axis_mask=2),
    _strided([0, 1], [0, 2], [1, 1], "a", ellipsis_mask=1),
    _strided([1], [0], [1], "c", end_mask=1),
    _strided([0], [0], [-1], "c", begin_mask=1, end_mask=1),
    _strided([0], [1], [1], "c", shrink_axis_mask=1),
    _strided([0, 0], [0, 0], [1, 1], "ac", begin_mask=3, end_mask=3),
    _strided([0, 0, 0], [0, 4, 0], [1, 1, 1], "ac", begin_mask=5, end_mask=5),
    Sample(
        "StridedSlice",
        "ac",
        lambda d, r: [r(d["a"], 4, d["c"]), *COMPUTED, known([1, 1, 1])],
        {"begin_mask": 5, "end_mask": 5},
        "ac",
    ),
    Sample(
        "StridedSlice",
        "a",
        lambda d, r: [r(d["a"], 9), known([0, 0]), known([0, d["a"]]), known([1, 1])],
        {"begin_mask": 1, "end_mask": 1},
        "a",
    ),
    Sample(
        "StridedSlice",
        "a",
        lambda d, r: [r(d["a"], 9), known([0, 0]), known([d["a"], d["a"]]), known([1, 1])],
        {"begin_mask": 1},
    ),
    Sample(
        "StridedSliceGrad",
        "ac",
        lambda d, r: [known([d["a"], 4, d["c"]]), *COMPUTED, known([1, 1, 1]), r(d["a"], 2, d["c"])],
        {"begin_mask": 5, "end_mask": 5},
        "ac",
    ),
    _strided_gradient([0, 1], [0, 3], "ac", begin_mask=1, end_mask=1),
    _strided_gradient([0, 1], [0, 2], "ac", begin_mask=1, end_mask=1, shrink_axis_mask=2),
    _strided_gradient([0, 0], [0, 1], "a", ellipsis_mask=1),
    _strided_gradient([0, 0], [0, 0], "c", end_mask=3, shrink_axis_mask=1),
]

ENSURED = [
    Sample("EnsureShape", "ac", lambda d, r: [r(d["a"], d["c"])], {"shape": lambda d: [None, d["c"]]}, "ac"),
    Sample("EnsureShape", "ac", lambda d, r: [r(d["a"], d["c"])], {"shape": lambda d: [d["a"], d["c"]]}, "ac"),
    Sample("EnsureShape", "ac", lambda d, r: [r(d["a"], d["c"])], {"shape": lambda d: [None, None]}, "ac"),
    Sample("EnsureShape", "a", lambda d, r: [r.ints(3, 2 * d["a"], 2)], {"shape": lambda d: [None, 2]}, "a"),
]

SAMPLES = [*ENSURED, *REDUCTIONS, *CONTRACTIONS, *LAYOUT, *PIECES, *STRIDED]

MEASURES = "the engine reads it off the facts: see the tests of propagation"
NOT_RUN = {
    "BroadcastGradientArgs": "it reads shapes and names dimensions (see tests/analysis/test_open_dimensions.py)",
    "Shape": MEASURES, "ShapeN": MEASURES, "Size": MEASURES, "Rank": MEASURES,
}  # fmt: skip
