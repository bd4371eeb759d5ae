"""`ar.verify` on compressed configurations: never a mismatch for what was asked for, always one for what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.codecs.builtin import BUILTIN, Cast16
from autograph_rewrite.codecs.codec import Codec
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.passes.base.rewriting import Site
from autograph_rewrite.passes.compression import compress
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable
from tests.support.compressing import COMPRESSORS, HALVES, MODES, WITH_FEEDBACK, Net, config, graph_item, sums_item
from tests.support.covering import covering

v1 = tf.compat.v1


def verified(mode: str, compressor: str, replicas: int = 2, **options: Any) -> Any:
    return ar.verify(graph_item(), {**config(mode, compressor, replicas), "timeout_seconds": 30}, **options)


@pytest.mark.parametrize(("compressor", "mode", "replicas"), covering(COMPRESSORS, MODES, [2, 4]))
def test_what_was_asked_for_is_right_and_is_said(compressor: str, mode: str, replicas: int):
    report = verified(mode, compressor, replicas, steps=2)

    assert report.ok, str(report)
    assert report.max_error < 1e-6
    assert f"{compressor} is lossy by choice" in str(report)
    assert {row.name for row in report.rows if row.kind == "compressed"} >= {f"w1 by {compressor}"}
    assert report.data()["ok"] is True


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_functions_can_be_verified_too(compressor: str):
    net = Net()
    item = ar.GraphItem.from_function(net.step, tf.TensorSpec([None, 6]), tf.TensorSpec([None, 4]))
    report = ar.verify(item, config("mirrored", compressor), steps=2)

    assert report.ok, str(report)
    assert any(row.kind == "compressed" for row in report.rows)


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_every_float_type_can_be_verified(compressor: str, dtype: Any):
    item = sums_item(shape=(8, 16), dtype=dtype)
    feeds = {"x": np.random.default_rng(0).normal(size=(5, 8, 16)).astype(dtype.as_numpy_dtype)}
    report = ar.verify(item, config("shared", compressor), steps=2, feeds=feeds)

    assert report.ok, str(report)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_gradients_that_are_not_finite_can_be_verified(compressor: str):
    feeds = {"x": np.random.default_rng(0).normal(size=(5, 8, 16)).astype(np.float32)}
    feeds["x"][1, 2, 3] = np.inf
    report = ar.verify(sums_item(shape=(8, 16)), config("mirrored", compressor), steps=2, feeds=feeds)

    assert all(row.ok for row in report.rows), str(report)


def test_what_compresses_nothing_says_so():
    settings = {**config("shared"), "variables": [{"match": "b1", "compressor": "powersgd"}]}
    report = ar.verify(graph_item(), settings, steps=1)

    assert report.ok
    assert "no gradient is compressed" in str(report)
    assert not [row for row in report.rows if row.kind == "compressed"]


@pytest.mark.parametrize("compressor", HALVES)
def test_a_sum_that_is_wrong_is_found(compressor: str, monkeypatch: pytest.MonkeyPatch):
    decode = Cast16.decode

    def twice(self: Cast16, build: Any, gradient: Any, codes: Any) -> Value:
        total = decode(self, build, gradient, codes)
        return build.op("AddV2", total, total, what="twice")

    monkeypatch.setattr(Cast16, "decode", twice)
    assert_wrong(verified("shared", compressor, steps=1))


@pytest.mark.parametrize("compressor", WITH_FEEDBACK)
def test_a_residual_that_does_not_last_is_found(compressor: str, monkeypatch: pytest.MonkeyPatch):
    becomes = AuxiliaryVariable.becomes

    def forgets(self: AuxiliaryVariable, after: Value, result: Value) -> None:
        zero = self._rewrite.add("ZerosLike", [after], Site("zero", EACH, after.node))
        becomes(self, zero.output(), result)

    monkeypatch.setattr(AuxiliaryVariable, "becomes", forgets)
    assert_wrong(verified("mirrored", compressor, steps=2), "was not kept")


@pytest.mark.parametrize("compressor", WITH_FEEDBACK)
def test_what_is_lost_is_found(compressor: str, monkeypatch: pytest.MonkeyPatch):
    record = compress.CompressedSum

    def lossy(edge: Any, value: Value, before: Value, after: Value, result: Value) -> Any:
        return record(edge, value, before, before, result)

    monkeypatch.setattr(compress, "CompressedSum", lossy)
    assert_wrong(verified("shared", compressor, steps=1))


@pytest.mark.parametrize("compressor", ["fp16_ef", "int8_ef"])
def test_a_compressor_that_sends_too_little_is_found(compressor: str, monkeypatch: pytest.MonkeyPatch):
    codec = BUILTIN[compressor]
    encode = type(codec).encode

    def nothing(self: Codec, build: Any, gradient: Any) -> tuple[Value, ...]:
        zeros = build.op("ZerosLike", gradient.value, what="nothing")
        return encode(self, build, replace(gradient, value=zeros))

    monkeypatch.setattr(type(codec), "encode", nothing)
    assert_wrong(verified("shared", compressor, steps=1), "keeps too much back")


def assert_wrong(report: Any, said: str = "") -> None:
    assert not report.ok
    assert {row.kind for row in report.wrong} == {"compressed"}
    assert said in str(report)
