"""Loops: of what an iteration saves for its gradient the state alone is kept, and the cell is computed again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import PlanError, VerifyError
from autograph_rewrite.passes import rematerialize
from autograph_rewrite.resolve.remat import loops
from benchmarks.cost import allocated, traced
from benchmarks.remat import Built
from tests.passes.rematerialize.test_rematerialize import MICRO, MIRRORED, ONE, SQRT, TWO, assert_same, rewritten
from tests.support.recomputed import Forward, feeds
from tests.support.training import make_item, placeholder, variable

WIDTH = 4


def weights(name: str, *shape: int) -> Any:
    return variable(name, np.random.default_rng(sum(map(ord, name))).normal(size=shape) * 0.4)


def lstm(time: int = 5, width: int = WIDTH, layers: int = 2, dropout: float = 0.0) -> Forward:
    """Return layers of LSTM cells, each a loop."""

    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, time, width), placeholder("y", None, width)
        given = tf.TensorArray(tf.float64, time).unstack(tf.transpose(x, [1, 0, 2]))
        zeros = tf.zeros_like(x[:, 0])
        for layer in range(layers):
            kernel, bias = weights(f"k{layer}", 2 * width, 4 * width), weights(f"b{layer}", 4 * width)

            def cell(i: Any, h: Any, c: Any, made: Any, given: Any = given, w: Any = kernel, b: Any = bias) -> Any:
                with tf.name_scope("cell"):
                    parts = tf.split(tf.concat([given.read(i), h], 1) @ w + b, 4, 1)
                    c = tf.sigmoid(parts[0]) * c + tf.sigmoid(parts[1]) * tf.tanh(parts[2])
                    h = tf.sigmoid(parts[3]) * tf.tanh(c, name="squashed")
                    h = tf.nn.dropout(h, dropout, seed=3) if dropout else h
                return i + 1, h, c, made.write(i, h)

            start = [tf.constant(0), zeros, zeros, tf.TensorArray(tf.float64, time)]
            _, h, _, given = tf.while_loop(lambda i, *_: i < time, cell, start)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    return forward


def plain_rnn() -> Mapping[str, Any]:
    """Return a loop whose cell makes its state alone, with nothing between that gradients need."""
    x, y = placeholder("x", None, 5, WIDTH), placeholder("y", None, WIDTH)
    w = weights("w", WIDTH, WIDTH)
    _, h = tf.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(h @ w + x[:, i])), [tf.constant(0), x[:, 0]])
    return {"loss": tf.reduce_mean((h - y) ** 2)}


FEEDS = feeds((5, WIDTH), (WIDTH,))


def loops_of(new: ar.GraphItem) -> list[Any]:
    return [one for one in new.report.recomputed.segments if any("while" in name for name in one.nodes)]


@pytest.mark.parametrize(
    "remat",
    [
        SQRT,
        {"policy": "save_matmuls"},
        {"policy": "scopes", "scopes": [".*/cell"]},
        {"policy": "names", "names": [".*/squashed"]},
    ],
    ids=lambda remat: remat["policy"],
)
def test_a_loop_of_cells_trains_to_the_same_variables(remat: Any) -> None:
    item = make_item(lstm())
    new = rewritten(item, ONE, remat)
    found = loops_of(new)
    assert len(found) == 2
    assert all(one.saved_bytes > 0 and one.added_flops > 0 for one in found)
    squashed = [name for one in found for name in one.nodes if name.endswith("squashed")]
    assert len(squashed) == (0 if remat["policy"] == "names" else 2)
    assert_same(item, new, FEEDS)


@pytest.mark.parametrize("config", [TWO, MIRRORED, MICRO], ids=["shared", "mirrored", "micro"])
def test_each_replica_and_micro_batch_computes_its_cells_again(config: Any) -> None:
    item = make_item(lstm())
    new = rewritten(item, config, SQRT)
    assert len(loops_of(new)) == 2
    assert_same(item, new, FEEDS)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_layers_of_keras_are_such_loops(cell: str) -> None:
    import keras

    given = keras.Input((6, 3), dtype="float64")
    layer = getattr(keras.layers, cell)(5, dtype="float64")
    model = keras.Model(given, keras.layers.Dense(2, dtype="float64")(layer(given)))
    model.compile("sgd", "mse")
    item = ar.GraphItem.from_keras(model, tf.TensorSpec((None, 6, 3), tf.float64), tf.TensorSpec((None, 2), tf.float64))
    config = {**ONE, "remat": SQRT}
    assert len(loops_of(ar.rewrite(item, config))) == 1
    assert ar.verify(item, config, steps=2).max_error == 0.0


def test_a_mask_that_is_drawn_in_a_loop_is_kept() -> None:
    item = make_item(lstm(dropout=0.4))
    new = rewritten(item, ONE, SQRT)
    found = loops_of(new)
    assert len(found) == 2
    assert not any("andom" in name or "GreaterEqual" in name for one in found for name in one.nodes)
    assert_same(item, new, FEEDS)


def test_a_cell_waits_for_the_gradient_of_its_state() -> None:
    new = ar.rewrite(make_item(lstm()), {**ONE, "remat": SQRT})
    first = [node for node in new.graph if "remat/" in node.name and node.op == "ConcatV2"]
    assert len(first) == 2
    assert all(any("grad" in control.name for control in node.controls) for node in first)


def test_what_would_save_nothing_or_is_no_list_is_left_alone_with_a_note() -> None:
    item = make_item(plain_rnn)
    new = rewritten(item, ONE, SQRT)
    assert not loops_of(new)
    assert_same(item, new, FEEDS)
    old = make_item(lstm(), version=1)
    new = rewritten(old, ONE, SQRT)
    assert not loops_of(new)
    assert loops.NOT_LISTS in str(new.report)
    assert_same(old, new, FEEDS)


def test_a_budget_that_loops_alone_can_meet_is_met() -> None:
    item = make_item(lstm(time=16))
    with pytest.raises(PlanError) as caught:
        ar.rewrite(item, {**ONE, "remat": {"policy": "budget:1"}}, batch=64)
    found = re.findall(r"at least ([\d,]+) B .*without it ([\d,]+) B", str(caught.value))[0]
    least, plain = (int(number.replace(",", "")) for number in found)
    new = ar.rewrite(item, {**ONE, "remat": {"policy": f"budget:{least}"}}, batch=64)
    peaks = new.report.recomputed.peaks
    assert peaks.after <= least
    assert loops_of(new)
    assert least < plain == peaks.before


def test_what_is_measured_falls_as_predicted() -> None:
    time, width, batch = 64, 16, 128
    item, rng = make_item(lstm(time, width)), np.random.default_rng(0)
    feed = {"x": rng.normal(size=(batch, time, width)), "y": rng.normal(size=(batch, width))}
    predicted, measured = [], []
    for config in (ONE, {**ONE, "remat": SQRT}):
        new = ar.rewrite(item, config, batch=batch)
        measured.append(min(allocated(stats, new) for stats in traced(new, Built(item, ("out_loss:0",)), feed, 3)))
        predicted.append(ar.simulate(item, ar.build_plan(item, config), batch=batch).devices[0].peak_bytes)
    assert measured[1] < 0.45 * measured[0]
    assert measured[0] - measured[1] == pytest.approx(predicted[0] - predicted[1], rel=0.15)


def test_the_certificate_finds_a_list_that_holds_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(cell: Any, value: Any) -> None:
        cell.kept[value].push.set_input(1, next(iter(cell.dropped)).value)

    monkeypatch.setattr(rematerialize, "_put_instead", put)
    with pytest.raises(VerifyError, match="does not read what"):
        rewritten(make_item(lstm()), ONE, SQRT)
