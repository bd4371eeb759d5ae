"""Samples of tensor lists (the handle stands for its elements) and of randomness drawn block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autograph_rewrite.ops.traits import operands, ops_with
from tests.rules.sample import Draw, Make, Sample, Sizes, elements, known

ELEMENT = {"element_dtype": 2}
ANY_SHAPE = known(-1)


def _list(d: Sizes, r: Draw, length: int = 3) -> np.ndarray:
    return elements(r(length, d["a"], d["b"]))


def _shape(d: Sizes) -> np.ndarray:
    return known([d["a"], d["b"]])


def _open_shape(d: Sizes) -> np.ndarray:
    return known([-1, d["b"]])


def _reads(op: str, *rest: np.ndarray, attrs: dict[str, Any] | None = None) -> list[Sample]:
    """Read with no element shape, with the exact one, and with one whose first size is open."""

    def with_shape(shape: Any) -> Make:
        return lambda d, r: [_list(d, r), *rest, shape(d)]

    shapes = (lambda d: ANY_SHAPE, _shape, _open_shape)
    whole = ELEMENT | (attrs or {})
    return [Sample(op, "ab", with_shape(s), whole, "a" if s is _open_shape else "ab") for s in shapes]


def _unstacks(op: str, *rest: np.ndarray) -> list[Sample]:
    def with_shape(shape: Any) -> Make:
        def make(d: Sizes, r: Draw) -> list[np.ndarray]:
            tensor = r(3, d["a"], d["b"])
            stated = shape(d)
            return [tensor, *rest[:1], stated, *rest[1:]]

        return make

    return [Sample(op, "ab", with_shape(s), {}, "ab") for s in (lambda d: ANY_SHAPE, _shape)]


LISTS = [
    *_reads("TensorListGetItem", known(1)),
    *_reads("TensorListPopBack"),
    *_reads("TensorListStack", attrs={"num_elements": 3}),
    *_reads("TensorListGather", known([2, 0])),
    *_unstacks("TensorListFromTensor"),
    *_unstacks("TensorListScatter", known([2, 0, 1])),
    *_unstacks("TensorListScatterV2", known([2, 0, 1]), known(3)),
    Sample("TensorListFromTensor", "t", lambda d, r: [r(d["t"], 2), ANY_SHAPE]),
    Sample("TensorListPushBack", "ab", lambda d, r: [_list(d, r), r(d["a"], d["b"])], {}, "ab"),
    Sample("TensorListSetItem", "ab", lambda d, r: [_list(d, r), known(1), r(d["a"], d["b"])], {}, "ab"),
    Sample("TensorListResize", "ab", lambda d, r: [_list(d, r), known(2)], {}, "ab"),
    Sample("TensorListLength", "ab", lambda d, r: [_list(d, r)], {}, "ab"),
    Sample(
        "TensorListScatterIntoExistingList", "ab",
        lambda d, r: [_list(d, r), r(2, d["a"], d["b"]), known([2, 0])], {}, "ab",
    ),
    Sample("TensorListConcatLists", "ab", lambda d, r: [_list(d, r), _list(d, r)], ELEMENT, "ab"),
    Sample("TensorListConcat", "ab", lambda d, r: [_list(d, r)], ELEMENT, "b"),
    Sample("TensorListConcatV2", "ab", lambda d, r: [_list(d, r), ANY_SHAPE, known([0], np.int64)], ELEMENT, "b"),
    Sample("TensorListSplit", "b", lambda d, r: [r(4, d["b"]), ANY_SHAPE, known([2, 2], np.int64)], ELEMENT, "b"),
]  # fmt: skip


def _drawn(op: str, *rest: np.ndarray, **attrs: Any) -> Sample:
    """The shape counts the batch in one entry."""
    return Sample(
        op, "ab", lambda d, r: [known([d["a"], d["b"]]), *rest], attrs, "", compare="shapes", random="independent"
    )


SEED = np.asarray([1, 2])
KEY, COUNTER, ALGORITHM = np.asarray([1], np.uint64), np.asarray([1, 2], np.uint64), np.asarray(1, np.int32)
LOW, HIGH = np.asarray(0, np.int32), np.asarray(9, np.int32)

DRAWN_WITH: dict[str, dict[str, Any]] = {
    "StatelessRandomPoisson": {"dtype": 1},
    "StatelessRandomBinomial": {"dtype": 2},
}
SPREADS = (lambda d: (), lambda d: (d["b"],), lambda d: (d["a"], d["b"]))
"""The shapes of parameters that are broadcast to [a, b]."""


def _spread(op: str, shape: Callable[[Sizes], tuple[int, ...]]) -> Sample:
    """The shape counts the batch, and each element is drawn with a parameter of its own, or one for several."""
    seeds = (KEY, COUNTER, ALGORITHM) if op.endswith("V3") else (SEED,)

    def make(d: Sizes, r: Draw) -> list[np.ndarray]:
        parameters = [r.unit(*shape(d)) for _ in operands(op, "random_parameters")]
        return [known([d["a"], d["b"]]), *seeds, *parameters]

    return Sample(op, "ab", make, DRAWN_WITH.get(op, {}), compare="shapes", random="independent")


RANDOM = [
    *(_drawn(op, dtype=1) for op in ("RandomUniform", "RandomStandardNormal", "TruncatedNormal")),
    _drawn("RandomUniformInt", LOW, HIGH),
    *(_drawn(f"Stateless{kind}", SEED, dtype=1) for kind in ("RandomUniform", "RandomNormal", "TruncatedNormal")),
    _drawn("StatelessRandomUniformInt", SEED, LOW, HIGH, dtype=3),
    _drawn("StatelessRandomUniformFullInt", SEED, dtype=3),
    *(
        _drawn(f"Stateless{kind}V2", KEY, COUNTER, ALGORITHM, dtype=1)
        for kind in ("RandomUniform", "RandomNormal", "TruncatedNormal")
    ),
    _drawn("StatelessRandomUniformIntV2", KEY, COUNTER, ALGORITHM, LOW, HIGH, dtype=3),
    _drawn("StatelessRandomUniformFullIntV2", KEY, COUNTER, ALGORITHM, dtype=3),
    *(
        Sample(
            op,
            "ab",
            lambda d, r: [known([2]), r.unit(d["a"], d["b"])],
            {},
            "ab",
            compare="shapes",
            random="independent",
        )
        for op in ("RandomGamma", "RandomPoissonV2")
    ),
    *(_spread(op, shape) for op in sorted(ops_with("random_parameters")) for shape in SPREADS),
    Sample("Multinomial", "a", lambda d, r: [r(d["a"], 4), known(3)], {}, "a", compare="shapes", random="independent"),
]

SAMPLES = [*LISTS, *RANDOM]

EMPTY = "an empty list has no contents: see the tests of lists"
NOT_RUN = {
    "EmptyTensorList": EMPTY,
    "TensorListReserve": EMPTY,
    "TensorListElementShape": "the engine reads it off the facts, as it does shapes",
}
