"""What the certificate computes with numpy is what TensorFlow's kernels compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.certify import kernels
from autograph_rewrite.certify.kernels import KERNELS
from tests.rules.nodes import node_of
from tests.rules.runner import run
from tests.rules.sample import DEFAULT_SIZES
from tests.rules.samples import SAMPLES


def _sizes(*entries: int) -> np.ndarray:
    return np.array(entries, np.int32)


NUMBERS = np.array([[5, -3, 2], [-7, 2, 0]], np.int32)
OTHERS = np.array([[2, 2, -2], [3, -2, 1]], np.int32)
FLAGS = np.array([[True, False, True], [False, False, True]])

Case = tuple[str, Sequence[np.ndarray], Mapping[str, Any]]
CASES: tuple[Case, ...] = (
    *((op, (NUMBERS, OTHERS), {}) for op in ("FloorDiv", "FloorMod", "Maximum", "Minimum", "Mul", "BitwiseAnd", "Sub")),
    *((op, (NUMBERS, OTHERS), {}) for op in ("Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "Add", "AddV2")),
    *((op, (FLAGS, FLAGS[::-1]), {}) for op in ("LogicalAnd", "LogicalOr")),
    ("RealDiv", (np.float32([1, 2, 0]), np.float32([0.3, -3, 0])), {}),
    ("AddN", (NUMBERS, OTHERS, NUMBERS), {}),
    ("Cast", (np.float32([1.7, -1.7, 3]),), {"DstT": 3}),
    ("Cast", (np.float64([1 / 3]),), {"DstT": 1}),
    ("Shape", (NUMBERS,), {}),
    ("Shape", (NUMBERS,), {"out_type": 9}),
    ("ShapeN", (NUMBERS, OTHERS[0]), {}),
    ("Size", (NUMBERS,), {}),
    ("Range", (np.int32(2), np.int32(11), np.int32(3)), {}),
    ("InvertPermutation", (_sizes(2, 0, 3, 1),), {}),
    ("Where", (FLAGS,), {}),
    ("OnesLike", (NUMBERS,), {}),
    ("ReverseV2", (NUMBERS, _sizes(1)), {}),
    ("GatherV2", (NUMBERS, _sizes(2, 0, 2), np.int32(1)), {}),
    *(
        ("BroadcastGradientArgs", (_sizes(*a), _sizes(*b)), {})
        for a, b in (
            ((5, 3), (5, 3)), ((5, 3), (3,)), ((5, 1), (5, 3)), ((1, 5), (5,)), ((), (4, 2)), ((1, 2), (1, 1)),
            ((1, 2), (1, 2)), ((7, 1, 3), (2, 1)),
        )
    ),
    ("BroadcastArgs", (_sizes(5, 1, 3), _sizes(4, 1)), {}),
    ("ConcatOffset", (np.int32(1), _sizes(5, 3), _sizes(5, 4), _sizes(5, 2)), {}),
    ("DynamicStitch", (_sizes(0, 3), _sizes(2, 1), _sizes(7, 8), _sizes(5, 6)), {}),
    ("DynamicStitch", (_sizes(0, 2), np.int32([[1, 3]]), np.float32([[1, 2], [3, 4]]), np.ones((1, 2, 2), "f")), {}),
    *((op, (NUMBERS, _sizes(0)), {}) for op in ("Sum", "Prod", "Max", "Min")),
    *((op, (FLAGS, _sizes(1)), {"keep_dims": True}) for op in ("All", "Any")),
)  # fmt: skip
"""Integers, sizes and flags, and ops of which the tests of rules have no sample."""


def _sampled(op: str) -> list[Case]:
    found = []
    for sample in SAMPLES:
        if sample.op == op and sample.compare == "values":
            values, attrs = sample.inputs(sample.letters[0], DEFAULT_SIZES[sample.letters[0]])
            found.append((op, values, attrs))
    return found


FRAMED = frozenset(("Enter",))  # runs in a loop only; it hands on what it reads


@pytest.mark.parametrize("op", sorted(set(KERNELS) - FRAMED))
def test_a_kernel_computes_what_tensorflow_does(op: str) -> None:
    compared = 0
    for _, values, attrs in [*(case for case in CASES if case[0] == op), *_sampled(op)]:
        plain = [np.asarray(value) for value in values]
        try:
            found = kernels.run(node_of(op, plain, attrs), plain)
        except kernels.NoKernelError:  # some attributes are left out
            continue
        expected = run(op, plain, attrs)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert np.shape(mine) == theirs.shape, (attrs, values)
            assert np.asarray(mine).dtype == theirs.dtype, (attrs, values)
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, err_msg=f"{attrs} {values}")
        compared += 1
    assert compared


def test_an_op_without_a_kernel_says_so() -> None:
    node = node_of("Tanh", [np.float32([1])], {})
    with pytest.raises(kernels.NoKernelError):
        kernels.run(node, [np.float32([1])])
