"""Codecs of the user's own: registered or named by a configuration, verified, recorded, refused where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autograph_rewrite as ar
from autograph_rewrite import ConfigError, PassError, Plan, PlanError
from autograph_rewrite.codecs.codec import Array, Code, Codec, Gradient, Nodes, Shape
from autograph_rewrite.config.compressor_names import unregister_compressor
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from tests.support.compressing import MODES, Sums, config, graph_item, sums_item, train_graph
from tests.support.paths import ROOT


class Sign(Codec):
    """Sends signs and their mean size."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        return Code(dtypes.INT8, (math.prod(shape),)), Code(dtype, (1,))

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        flat = build.op("Reshape", gradient.value, build.numbers([-1], "line"), what="flat")
        size = build.op("Abs", flat, what="size")
        mean = build.op("Mean", size, build.numbers(0, "axis"), what="mean", keep_dims=True)
        mean = build.op("Mul", mean, build.const(self.factor, gradient.dtype, "factor"), what="scale")
        return build.op("Cast", build.op("Sign", flat, what="sign"), what="code", DstT=dtypes.INT8), mean

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        signs = build.op("Cast", codes[0], what="signs", DstT=gradient.dtype)
        return build.op("Mul", signs, codes[1], what="decoded")


class Wide(Codec):
    """Codes of many types and ranks, of odd sizes: the whole value among them."""

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        n = math.prod(shape)
        kinds = (dtypes.HALF, dtypes.INT8, dtypes.DOUBLE, dtypes.INT64)
        return (Code(dtypes.BFLOAT16, shape), *(Code(one, (n, 1)) for one in kinds), Code(dtypes.BOOL, (3,)))

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        shape = build.numbers([gradient.count, 1], "shape")
        column = build.op("Reshape", gradient.value, shape, what="column")
        kinds = (dtypes.HALF, dtypes.INT8, dtypes.DOUBLE, dtypes.INT64)
        casts = [build.op("Cast", column, what=f"as_{kind}", DstT=kind) for kind in kinds]
        first = build.op("Cast", gradient.value, what="first", DstT=dtypes.BFLOAT16)
        return (first, *casts, build.const([True, False, True], dtypes.BOOL, "flags"))

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """The mean of the five, all exact for small whole numbers, where the flags have arrived."""
        line = build.numbers([-1, gradient.count], "line")
        flat = [build.op("Reshape", one, line, what=f"flat_{i}") for i, one in enumerate(codes[:5])]
        parts = [build.op("Cast", one, what=f"wide_{i}", DstT=gradient.dtype) for i, one in enumerate(flat)]
        total = build.op("AddN", *parts, what="all", N=len(parts))
        flags = build.op("Cast", codes[5], what="flags_back", DstT=gradient.dtype)
        two = build.op("Sum", flags, build.numbers(1, "columns"), what="two", keep_dims=True)
        return build.op(
            "Mul", total, build.op("Mul", two, build.const(0.1, gradient.dtype, "tenth"), what="fifth"), what="mean"
        )


class Dropped(Codec):
    """Sends the whole gradient, cut to whole numbers; what is cut off is lost."""

    error_feedback = False
    adds = elementwise = True

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        return (Code(dtypes.HALF, (math.prod(shape),)),)

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        return (build.op("Cast", build.op("Floor", gradient.value, what="floor"), what="code", DstT=dtypes.HALF),)

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        return build.op("Cast", codes[0], what="wide", DstT=gradient.dtype)


class Said(Dropped):
    """The same, which says what it sends."""

    def sent(self, gradient: Array, members: int) -> Array:
        return np.floor(gradient)


class SharedScale(Codec):
    """Agrees on a scale first, then sends whole numbers, which may be added; counts its steps."""

    adds = True

    def rounds(self, shape: Shape, dtype: int) -> tuple[tuple[Code, ...], ...]:
        return (Code(dtype, (1,)),), (Code(dtypes.INT32, shape),)

    def state(self, shape: Shape) -> dict[str, Shape]:
        return {"steps": (1,)}

    def encode_round(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> tuple[Value, ...]:
        if not received:
            flat = build.op("Reshape", gradient.value, build.numbers([-1], "line"), what="flat")
            size = build.op("Abs", flat, what="size")
            return (build.op("Max", size, build.numbers(0, "axis"), what="largest", keep_dims=True),)
        number = build.op("Round", build.op("DivNoNan", gradient.value, received[0], what="divided"), what="number")
        return (build.op("Cast", number, what="code", DstT=dtypes.INT32),)

    def receive(self, build: Nodes, gradient: Gradient, total: Value) -> Value:
        return build.op("Mul", total, build.const(1 / 127, gradient.dtype, "step"), what="scale")

    def decode(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        return build.op("Mul", build.op("Cast", codes[1], what="wide", DstT=gradient.dtype), codes[0], what="decoded")

    def update(self, build: Nodes, gradient: Gradient, received: Sequence[Value]) -> dict[str, Value]:
        one = build.const([1.0], gradient.dtype, "one")
        return {"steps": build.op("AddV2", gradient.state["steps"], one, what="next")}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for name in ("sign", "wide", "dropped", "said", "two", "Sign", "Half"):
        unregister_compressor(name)


@pytest.mark.parametrize("mode", MODES)
def test_a_registered_codec_trains_and_nothing_is_lost(mode: str):
    ar.register_compressor("sign", Sign())
    new = ar.rewrite(graph_item(), config(mode, "sign"))
    account, residuals = train_graph(new, 24)

    assert np.mean(account.losses[-4:]) < 0.7 * np.mean(account.losses[:4])
    assert account.error(residuals) < 1e-5
    assert ar.verify(graph_item(), config(mode, "sign"), steps=2).ok


def test_a_codec_that_keeps_more_than_it_may_is_found():
    ar.register_compressor("sign", Sign(factor=-3.0))
    report = ar.verify(graph_item(), config("mirrored", "sign"), steps=2)

    assert not report.ok
    assert "keeps too much back" in str(report)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(7,), (3, 3), (8,)])
def test_codes_of_every_type_and_size_arrive_as_they_were(mode: str, shape: tuple[int, ...], monkeypatch: Any):
    monkeypatch.setattr(
        "autograph_rewrite.resolve.compression.round_bytes", lambda codes: 1
    )  # it sends more than there is
    ar.register_compressor("wide", Wide())
    rows = np.arange(2 * math.prod(shape), dtype=np.float32).reshape(2, *shape) - 5
    with Sums(sums_item(shape=shape), config(mode, "wide")) as sums:
        np.testing.assert_allclose(sums.step(rows), rows.sum(axis=0), rtol=1e-6)
        assert np.abs(sums.residual()).max() < 1e-5


def test_a_codec_that_sends_something_else_than_it_says_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sign, "codes", lambda self, shape, dtype: (Code(dtypes.INT8, shape),))
    ar.register_compressor("sign", Sign())
    with pytest.raises(PassError, match="'sign' encodes as int8, float32, but says that it sends int8"):
        ar.rewrite(graph_item(), config("mirrored", "sign"))


def test_without_error_feedback_a_codec_says_what_it_sends_or_is_not_checked():
    for name, codec, rows in (("dropped", Dropped(), 0), ("said", Said(), 1)):
        ar.register_compressor(name, codec)
        report = ar.verify(sums_item(), config("mirrored", name), steps=2)
        assert len([row for row in report.rows if row.kind == "compressed"]) == rows
        assert report.ok, str(report)


@pytest.mark.parametrize("mode", MODES)
def test_a_codec_may_have_several_exchanges_and_a_state(mode: str, monkeypatch: Any):
    monkeypatch.setattr("autograph_rewrite.resolve.compression.round_bytes", lambda codes: 1)
    ar.register_compressor("two", SharedScale())
    rows = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    with Sums(sums_item(), config(mode, "two")) as sums:
        applied = [sums.step(rows) for _ in range(3)]
        steps = sums.session.read_variable("w/autograph_steps")
        kept = sums.residual().sum(axis=0)
    np.testing.assert_allclose(np.sum(applied, axis=0) + kept, 3 * rows.sum(axis=0), rtol=1e-5)
    assert steps.tolist() == [[3.0], [3.0]]
    assert ar.verify(sums_item(), config(mode, "two"), steps=2).ok


@pytest.mark.parametrize("suffix", [".yaml", ".pb"])
def test_a_plan_records_a_codec_and_is_followed_with_the_same_code_only(suffix: str, tmp_path: Path):
    ar.register_compressor("sign", Sign())
    item = graph_item()
    new = ar.rewrite(item, config("mirrored", "sign"))
    path = tmp_path / f"plan{suffix}"
    new.report.plan.save(path)
    plan = Plan.load(path)

    assert plan == new.report.plan
    assert {edge.compressor.partition("@")[0] for edge in plan.edges} == {"none", "sign"}
    assert ar.rewrite(item, plan).graph_bytes == new.graph_bytes
    ar.register_compressor("sign", Sign(factor=2.0))
    with pytest.raises(PlanError, match="has other code"):
        ar.rewrite(item, plan)
    unregister_compressor("sign")
    with pytest.raises(PlanError, match=r"'sign', which is not registered.*\n.*ar.register_compressor"):
        ar.rewrite(item, plan)


def test_the_name_without_the_digest_is_what_people_read():
    ar.register_compressor("sign", Sign())
    new = ar.rewrite(graph_item(), config("mirrored", "sign"))

    assert "w1 (sign)" in ar.explain(new)
    assert "@" not in ar.explain(new).replace("@ ", "")
    assert "w1 by sign" in str(ar.verify(graph_item(), config("mirrored", "sign"), steps=1))


def test_a_configuration_may_name_the_class_of_a_file_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AUTOGRAPH_REWRITE_ALLOW_CODE", raising=False)
    path = tmp_path / "half.py"
    path.write_text(
        "from autograph_rewrite.codecs.builtin import Cast16\n"
        "from autograph_rewrite.ir.types import dtypes\n\n"
        "class Half(Cast16):\n"
        "    def __init__(self):\n"
        "        super().__init__(dtypes.HALF, error_feedback=True)\n"
    )
    settings = {**config("mirrored"), "variables": [{"match": "w.*", "compressor": f"{path}:Half"}]}
    with pytest.raises(ConfigError, match="only if you allow it"):
        ar.rewrite(graph_item(), settings)
    ar.allow_code(path)
    new = ar.rewrite(graph_item(), settings)
    assert {edge.owner for edge in new.report.edges if edge.compressor.startswith("Half@")} == {"w1", "w2"}
    settings["variables"] = [{"match": "w.*", "compressor": f"{path}:Third"}]
    with pytest.raises(ConfigError, match="has no class 'Third'"):
        ar.rewrite(graph_item(), settings)


def test_names_that_mean_something_else_and_what_is_no_codec_are_refused():
    with pytest.raises(ConfigError, match="'topk' is a compressor of this package"):
        ar.register_compressor("topk", Sign())
    with pytest.raises(ConfigError, match="'a b' is no name"):
        ar.register_compressor("a b", Sign())
    with pytest.raises(ConfigError, match="which is no codec"):
        ar.register_compressor("sign", Sign)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compressor.* must be none.*int8_ef.*not 'sgn'"):
        ar.rewrite(graph_item(), config("mirrored", "sgn"))


def test_the_docs_name_what_a_codec_has():
    text = (ROOT / "docs/writing_compressors.md").read_text()
    missing = [
        name for name in vars(Codec) if not name.startswith("_") and name != "spreads" and f"`{name}" not in text
    ]
    assert not missing
