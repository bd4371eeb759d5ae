"""Compressors at the edges of their number types: overflow, NaN, infinity, nothing at all, and whatever comes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autograph_rewrite.codecs.builtin import LARGEST, largest_of_sum
from autograph_rewrite.ir.types import dtypes
from tests.support.compressing import COMPRESSORS, MODES, WITH_FEEDBACK, Sums, config, sums_item
from tests.support.covering import covering

SHAPE = (6, 7)
FLOAT = np.float32
Rows = np.ndarray


def rows_of(*values: float, shape: tuple[int, ...] = (8,)) -> Rows:
    """Return one row per replica, each of one value."""
    return np.stack([np.full(shape, value, FLOAT) for value in values])


@pytest.mark.parametrize("wire", [dtypes.HALF, dtypes.BFLOAT16])
@pytest.mark.parametrize("replicas", [*range(2, 12), 64, 100, 1000])
def test_as_many_largest_numbers_as_there_are_replicas_do_not_overflow(wire: int, replicas: int):
    kind = np.float16 if wire == dtypes.HALF else tf.bfloat16.as_numpy_dtype
    most = largest_of_sum(wire, replicas)
    one = np.array(most, kind)
    total = np.array(0, kind)
    for _ in range(replicas):
        total = total + one

    assert float(one) == most
    assert np.isfinite(total)
    assert LARGEST[wire][0] / replicas / 2.0 ** math.ceil(replicas / 128) < most <= LARGEST[wire][0] / replicas


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_fp16_is_scaled_so_that_the_sum_does_not_overflow(mode: str, replicas: int):
    with Sums(sums_item(), config(mode, "fp16", replicas)) as sums:
        applied = sums.step(rows_of(*[60_000.0] * replicas))

    np.testing.assert_allclose(applied, 60_000.0 * replicas, rtol=2**-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_what_does_not_fit_into_fp16_comes_in_later_steps(mode: str, replicas: int):
    with Sums(sums_item(), config(mode, "fp16_ef", replicas)) as sums:
        applied = [sums.step(rows_of(*[100_000.0] * replicas))]
        assert np.isfinite(applied[0]).all()
        applied += [sums.step(np.zeros((replicas, 8), FLOAT)) for _ in range(3 * replicas)]
        kept = sums.residual()

    np.testing.assert_allclose(sum(applied), 100_000.0 * replicas, rtol=1e-6)
    assert not kept.any()


@pytest.mark.parametrize(("compressor", "odd", "mode"), covering(COMPRESSORS, [math.inf, -math.inf, math.nan], MODES))
def test_what_is_not_finite_arrives_and_is_not_kept(mode: str, odd: float, compressor: str):
    rows = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(FLOAT)
    with Sums(sums_item(shape=SHAPE), config(mode, compressor)) as sums:
        sums.step(rows)
        before = sums.residual() if compressor in WITH_FEEDBACK else None
        broken = rows.copy()
        broken[1, 2, 3] = odd
        applied = sums.step(broken)
        assert not np.isfinite(applied[2, 3])
        if compressor != "powersgd":  # there it spreads
            assert np.isfinite(np.delete(applied.ravel(), 2 * SHAPE[1] + 3)).all()
        if before is not None:
            kept = sums.residual()
            assert np.isfinite(kept).all()
            assert kept[1, 2, 3] == before[1, 2, 3]
        assert np.isfinite(sums.step(rows)).all()


@pytest.mark.parametrize("mode", MODES)
def test_more_infinities_than_topk_sends_do_not_stay_either(mode: str):
    with Sums(sums_item(shape=SHAPE), config(mode, "topk")) as sums:
        assert not np.isfinite(sums.step(np.full((2, *SHAPE), np.inf, FLOAT))).all()
        assert not sums.residual().any()


@pytest.mark.parametrize("mode", MODES)
def test_topk_applies_the_largest_element_of_each_replica(mode: str):
    rows = np.array([[1, -5, 2, 0, 0, 0, 0, 0], [3, -4, 0, 0, 0, 7, 0, 0]], FLOAT)
    with Sums(sums_item(), config(mode, "topk")) as sums:
        assert sums.step(rows).tolist() == [0, -5, 0, 0, 0, 7, 0, 0]
        assert sums.residual().tolist() == [[1, 0, 2, 0, 0, 0, 0, 0], [3, -4, 0, 0, 0, 0, 0, 0]]
        assert sums.step(np.zeros((2, 8), FLOAT)).tolist() == [0, -4, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_powersgd_holds_a_matrix_of_rank_two_whole_whatever_its_scale(mode: str, scale: float):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(9, 2)) @ rng.normal(size=(2, 12)) * scale
    rows = np.stack([matrix, matrix * 3]).astype(FLOAT)
    with Sums(sums_item(shape=(9, 12)), config(mode, "powersgd")) as sums:
        for _ in range(3):
            applied = sums.step(rows)
        kept = sums.residual()

    np.testing.assert_allclose(applied / scale, 4 * matrix / scale, atol=2e-4)
    assert np.abs(kept).max() < 2e-4 * scale


@pytest.mark.parametrize("mode", MODES)
def test_powersgd_survives_zero_gradients_and_rank_one(mode: str):
    rng = np.random.default_rng(0)
    line = np.outer(rng.normal(size=9), rng.normal(size=12)).astype(FLOAT)
    with Sums(sums_item(shape=(9, 12)), config(mode, "powersgd")) as sums:
        assert not sums.step(np.zeros((2, 9, 12), FLOAT)).any()
        for _ in range(3):
            applied = sums.step(np.stack([line, line]))
            np.testing.assert_allclose(applied, 2 * line, atol=1e-5)
        assert not sums.step(np.zeros((2, 9, 12), FLOAT)).round(5).any()
        full = rng.normal(size=(2, 9, 12)).astype(FLOAT)
        applied = sums.step(full)
        np.testing.assert_allclose(applied + sums.residual().sum(axis=0), full.sum(axis=0), atol=1e-5)
        assert np.linalg.matrix_rank(applied, tol=1e-3) == 2


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99)


@pytest.fixture(scope="module", params=[f"{c} {mode}" for c in WITH_FEEDBACK for mode in MODES])
def compressed(request: pytest.FixtureRequest) -> Iterator[Sums]:
    """A session whose gradients are compressed; hypothesis' examples share it, residuals and all."""
    compressor, mode = request.param.split()
    with Sums(sums_item(shape=SHAPE), config(mode, compressor)) as sums:
        yield sums


@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_what_is_applied_and_kept_is_what_there_was(compressed: Sums, data: st.DataObject):
    count = math.prod(SHAPE)
    few = data.draw(st.lists(numbers, min_size=2, max_size=2 * count))
    gradients = np.resize(np.array(few, FLOAT), (2, *SHAPE))
    before = data.draw(st.sampled_from(["as it is", "zero", "random"]))
    if before != "as it is":
        rows = np.zeros((2, *SHAPE), FLOAT)
        if before == "random":
            rows = np.resize(np.array(data.draw(st.lists(numbers, min_size=1, max_size=9)), FLOAT), rows.shape)
        compressed.session.write_variable("w/autograph_residual", rows)
    old = compressed.residual().astype(np.float64)
    applied = compressed.step(gradients).astype(np.float64)
    new = compressed.residual().astype(np.float64)

    total = gradients.astype(np.float64) + old
    # Rounding of float32, in units of what was added; a product of factors has that of its largest element.
    size = np.abs(gradients) + np.abs(old)
    size = size.max() if "w/autograph_q" in compressed.item.state else size.sum(axis=0)
    assert np.isfinite(new).all()
    assert (np.abs(applied + new.sum(axis=0) - total.sum(axis=0)) <= 2e-6 * size + 1e-37).all()
