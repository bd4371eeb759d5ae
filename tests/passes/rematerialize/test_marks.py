"""ar.recompute_grad and ar.checkpoint_name: nothing in plain TensorFlow, segments and kept tensors in a rewrite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.load.marks import names_given
from tests.passes.rematerialize.test_rematerialize import MICRO, ONE, SMALL, TWO, assert_same, rewritten
from tests.support.recomputed import executed
from tests.support.training import make_item, placeholder, train, variable


def forward(*, marked: bool, named: bool = False) -> Any:
    """Return four blocks of two layers, each of which is computed again."""

    def block(h: Any, i: int) -> Any:
        first = tf.tanh(h @ variable(f"a{i}", np.eye(4) * 0.6 + 0.1))
        return tf.tanh(first @ variable(f"b{i}", np.eye(4) * 0.5 - 0.1))

    def build() -> Mapping[str, Any]:
        h, y = placeholder("x", None, 4), placeholder("y", None, 4)
        for i in range(4):
            with tf.name_scope(f"unit_{i}"):
                h = (ar.recompute_grad(block) if marked else block)(h, i)
                h = ar.checkpoint_name(h, "out") if named else h
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    return build


def test_in_plain_tensorflow_they_do_nothing() -> None:
    marked, plain = (train(make_item(forward(marked=one, named=one)), SMALL) for one in (True, False))
    for name, value in plain.variables.items():
        np.testing.assert_array_equal(marked.variables[name], value)
    assert float(ar.checkpoint_name(tf.constant(2.0), "two")) == 2.0
    assert [int(one) for one in ar.checkpoint_name((tf.constant(1), tf.constant(2)), "pair")] == [1, 2]
    assert int(ar.recompute_grad(lambda a, b=1: a + b)(tf.constant(2), b=3)) == 5


@pytest.mark.parametrize("config", [ONE, TWO, MICRO], ids=["one", "two", "micro"])
def test_what_is_marked_is_computed_again(config: Mapping[str, Any]) -> None:
    item = make_item(forward(marked=True))
    new = ar.rewrite(item, config)
    assert_same(item, new, SMALL)
    segments = new.report.recomputed.segments
    assert len(segments) == 4
    for i, segment in enumerate(segments):
        assert all(name.startswith(f"unit_{i}/recompute_grad/") for name in segment.nodes)
    assert not ar.rewrite(make_item(forward(marked=False)), config).report.recomputed.segments


def test_tensorflow_runs_what_is_marked_again() -> None:
    item = make_item(forward(marked=True))
    assert executed(ar.rewrite(item, ONE), SMALL[0])["Tanh"] > 8
    assert executed(ar.rewrite(item, {**ONE, "remat": {"policy": "none"}}), SMALL[0])["Tanh"] == 8


def test_a_configuration_decides_in_their_place() -> None:
    item = make_item(forward(marked=True))
    new = rewritten(item, ONE, {"policy": "every:1"})
    assert new.report.recomputed.segments != ar.rewrite(item, ONE).report.recomputed.segments
    assert_same(item, new, SMALL)


def test_marked_stages_and_plans() -> None:
    item = make_item(forward(marked=True))
    cut = "unit_1/recompute_grad/Tanh_1"
    config = {**ONE, "pipeline": {"stages": 2, "microbatches": 2, "boundaries": [cut]}}
    new = ar.rewrite(item, config)
    assert new.report.recomputed.segments
    assert_same(item, new, [{key: value[:4] for key, value in SMALL[0].items()}])
    plan = ar.build_plan(item, config)
    assert plan.remat is not None
    assert plan.remat.policy == "marked"
    assert ar.Plan.from_yaml(plan.to_yaml()).remat == plan.remat


def test_what_is_named_is_kept() -> None:
    item = make_item(forward(marked=False, named=True))
    new = rewritten(item, ONE, {"policy": "names", "names": ["out"]})
    kept = {value for segment in new.report.recomputed.segments for value in segment.kept}
    assert kept == {f"unit_{i}/checkpoint_name/out" for i in range(3)}
    assert len(new.report.recomputed.segments) == 4
    assert_same(item, new, SMALL)


def test_names() -> None:
    assert names_given("model/checkpoint_name/h") == ("h",)
    assert names_given("checkpoint_name/h_12") == ("h_12", "h")
    assert names_given("my_checkpoint_name/h") == ()
    assert names_given("checkpoint_name/h/inner") == ()
    with pytest.raises(GraphError, match="cannot name a tensor"):
        ar.checkpoint_name(tf.constant(1.0), "a b")


def test_a_function_with_a_marked_layer() -> None:
    weights = [tf.Variable(np.eye(4) * 0.5 + 0.1 * i) for i in range(6)]
    start = [w.numpy() for w in weights]
    layer = ar.recompute_grad(lambda h, w: tf.tanh(tf.nn.softplus(h @ w)))

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = layer(h, w)
            loss = tf.reduce_mean((h - y) ** 2)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    x, y = (tf.constant(SMALL[0][key]) for key in ("x", "y"))
    expected = float(step(x, y))
    after = [w.numpy() for w in weights]
    for w, value in zip(weights, start, strict=True):
        w.assign(value)
    new = ar.distribute(step, {"devices": ["CPU:0"]})
    assert float(new(x, y)) == pytest.approx(expected, rel=1e-12)
    for w, value in zip(weights, after, strict=True):
        np.testing.assert_allclose(w.numpy(), value, 1e-12, 1e-12)
    assert len(new.items[0].report.recomputed.segments) == 6
