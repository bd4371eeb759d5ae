"""Losses with statistics of the batch, in micro-batches: those of one device, or a refusal whose hint is true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import RewriteError
from tests.support.covering import covering
from tests.support.training import make_item, placeholder, train, variable

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(13, 4)), RNG.normal(size=(13, 3))
W, U = RNG.normal(size=(4, 3)) / 2, RNG.normal(size=(3, 3)) / 2
FEEDS = [{"x": X[:n], "y": Y[:n]} for n in (6, 13)]
LOCAL = {"batch_norm": "local"}
Loss = Callable[[Any, Any, Any], Any]
LOSSES: dict[str, Loss] = {}


def loss(made: Loss) -> Loss:
    LOSSES[made.__name__] = made
    return made


def square(z: Any) -> Any:
    return tf.reduce_mean(z**2)


def spread(z: Any) -> Any:
    """The deviation over the batch, in each column."""
    return tf.math.reduce_std(z, 0)


@loss
def two_terms(x: Any, y: Any, z: Any) -> Any:
    return square(z - y) + 0.1 * tf.nn.l2_loss(z)


@loss
def deviation(x: Any, y: Any, z: Any) -> Any:
    return tf.math.reduce_std(z)


@loss
def deviation_hinge(x: Any, y: Any, z: Any) -> Any:
    return tf.reduce_sum(tf.nn.relu(1.0 - spread(z))) + square(z)


@loss
def variance_hinge(x: Any, y: Any, z: Any) -> Any:
    return tf.reduce_sum(tf.nn.relu(2.0 - tf.nn.moments(z, [0])[1]))


@loss
def advantages(x: Any, y: Any, z: Any) -> Any:
    a = (y - tf.reduce_mean(y, 0)) / (spread(y) + 1e-8)
    return -tf.reduce_mean(a * z)


@loss
def scaled_by_the_maximum(x: Any, y: Any, z: Any) -> Any:
    return square(z - y / tf.reduce_max(tf.abs(y)))


@loss
def inputs_normalised(x: Any, y: Any, z: Any) -> Any:
    mean, variance = tf.nn.moments(y, [0])
    return square(z - tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3))


@loss
def summed_exponentials(x: Any, y: Any, z: Any) -> Any:
    return tf.reduce_sum(tf.reduce_logsumexp(z, 0)) + square(z - tf.reduce_mean(z, 0))


@loss
def whitened(x: Any, y: Any, z: Any) -> Any:
    mean, variance = tf.nn.moments(z, [0])
    return tf.reduce_mean(tf.sin((z - mean) * tf.math.rsqrt(variance + 1e-3)) * y)


@loss
def correlation(x: Any, y: Any, z: Any) -> Any:
    a, b = z - tf.reduce_mean(z, 0), y - tf.reduce_mean(y, 0)
    return tf.reduce_sum(a * b) / tf.sqrt(tf.reduce_sum(a * a) * tf.reduce_sum(b * b) + 1e-6)


@loss
def redundancy(x: Any, y: Any, z: Any) -> Any:
    a = (z - tf.reduce_mean(z, 0)) / (spread(z) + 1e-3)
    c = tf.matmul(a, a, transpose_a=True) / tf.cast(tf.shape(z)[0], z.dtype)
    return square(c - tf.eye(3, dtype=z.dtype))


@loss
def entropy_of_the_mean(x: Any, y: Any, z: Any) -> Any:
    p = tf.reduce_mean(tf.nn.softmax(z), 0)
    return tf.reduce_sum(p * tf.math.log(p)) + square(z)


@loss
def maximum(x: Any, y: Any, z: Any) -> Any:
    return tf.reduce_max(tf.abs(z))


@loss
def hardest(x: Any, y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.math.top_k(tf.reduce_sum((z - y) ** 2, 1), 2)[0])


@loss
def contrastive(x: Any, y: Any, z: Any) -> Any:
    return tf.reduce_mean(tf.nn.log_softmax(z @ tf.transpose(z))[:, 0])


def normalised(z: Any) -> tuple[Any, Any, Any]:
    """A batch normalisation with scale and offset; returned with its statistics."""
    mean, variance = tf.nn.moments(z, [0])
    scale, offset = variable("scale", np.ones(3)), variable("offset", np.zeros(3))
    return tf.nn.batch_normalization(z, mean, variance, offset, scale, 1e-3), mean, variance


@loss
def batch_norm(x: Any, y: Any, z: Any) -> Any:
    return square(normalised(z)[0] - y)


@loss
def batch_norm_and_a_loss_on_its_variance(x: Any, y: Any, z: Any) -> Any:
    out, _, variance = normalised(z)
    return square(out - y) + tf.reduce_sum(tf.nn.relu(2.0 - variance))


@loss
def batch_norm_and_another_deviation(x: Any, y: Any, z: Any) -> Any:
    out = normalised(z)[0] * y
    return square(out - y) + tf.reduce_sum(spread(out))


NORMALISED = frozenset(("batch_norm", "batch_norm_and_another_deviation"))
"""Those of which `batch_norm: local` makes another quantity."""
FREE = frozenset(("two_terms", "advantages", "scaled_by_the_maximum", "inputs_normalised"))
"""Those that need nothing of the whole batch but what can be had beforehand: they are refused nowhere."""
FORMS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "copies": lambda micro: {"microbatches": micro},
    "loop": lambda micro: {"microbatches": micro, "accumulation": {"form": "loop"}},
    "stages": lambda micro: {"pipeline": {"stages": 2, "microbatches": micro, "boundaries": ["hidden"]}},
}


@lru_cache(maxsize=32)
def one(name: str) -> tuple[ar.GraphItem, Any]:
    """Return the item of a loss, and what one device makes of it."""

    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, 4), placeholder("y", None, 3)
        z = tf.tanh(x @ variable("w", W), name="hidden") @ variable("u", U)
        return {"loss": LOSSES[name](x, y, z), "best": tf.argmax(z, 1), "fed": tf.argmax(y, 1)}

    item = make_item(forward)
    return item, train(item, FEEDS)


def used(item: ar.GraphItem) -> list[dict[str, Any]]:
    return [{name: feed[name] for name in item.inputs} for feed in FEEDS]


def error_of(name: str, config: Mapping[str, Any]) -> float:
    item, expected = one(name)
    got = train(ar.rewrite(item, {"devices": ["CPU:0"], **config}), used(item))
    pairs = [(a[key], b[key]) for a, b in zip(got.fetched, expected.fetched, strict=True) for key in b]
    pairs += [(got.variables[key], value) for key, value in expected.variables.items()]
    assert all(np.shape(a) == np.shape(b) for a, b in pairs)
    return max(float(np.abs(np.subtract(a, b, dtype=np.float64)).max()) for a, b in pairs)


@pytest.mark.parametrize(("name", "form", "micro"), covering(list(LOSSES), list(FORMS), (2, 4, 8)))
def test_a_loss_is_that_of_one_device_or_refused(name: str, form: str, micro: int) -> None:
    """Batches of 6 and 13 examples are cut unevenly, and in 8 parts some are empty."""
    config = FORMS[form](micro)
    if name in FREE or form == "copies":
        assert error_of(name, config) < 1e-9
        return
    try:
        assert error_of(name, config) < 1e-9
    except RewriteError as refusal:
        text = str(refusal)
        assert "whole batch" in text
        assert ("batch_norm to local" in text) == (name == "batch_norm")
        way_out = "form to unrolled" if form == "loop" else "leave pipeline out"
        assert way_out in text
        assert error_of(name, FORMS["copies"](micro)) < 1e-9  # where that leads


@pytest.mark.parametrize("name", LOSSES)
def test_local_changes_batch_normalisations_and_nothing_else(name: str) -> None:
    error = error_of(name, {"microbatches": 2, "semantics": LOCAL})
    assert (error > 1e-6) == (name in NORMALISED)


def test_every_statistic_of_a_part_is_listed() -> None:
    item, _ = one("batch_norm_and_another_deviation")
    new = ar.rewrite(item, {"devices": ["CPU:0"], "microbatches": 2, "semantics": LOCAL})
    assert {note.node for note in new.report.inexact} == {"moments/mean", "moments/variance"}
    assert "not exact: Mean 'moments/mean'" in str(new.report)
    assert "2 values not those of one device" in ar.explain(new)


def test_where_local_has_nothing_to_do_the_report_says_so() -> None:
    item, _ = one("deviation_hinge")
    new = ar.rewrite(item, {"devices": ["CPU:0"], "microbatches": 2, "semantics": LOCAL})
    assert not new.report.inexact
    assert any("nothing in this graph is a batch normalisation" in note.text for note in new.report.notes)


@pytest.mark.parametrize("form", FORMS)
def test_what_local_would_lift_is_tried_before_it_is_said(form: str) -> None:
    """A hint that is followed leads to a rewrite."""
    item, _ = one("batch_norm")
    config = {"devices": ["CPU:0"], **FORMS[form](2)}
    if form == "copies":
        assert error_of("batch_norm", config) < 1e-9
    else:
        with pytest.raises(RewriteError, match=r"set semantics\.batch_norm to local"):
            ar.rewrite(item, config)
    ar.rewrite(item, {**config, "semantics": LOCAL})


def counted(when: str) -> Mapping[str, Any]:
    """Count labels or predictions before the gradients are computed, as update ops are: at once, or behind the loss."""
    x, y = placeholder("x", None, 4), placeholder("y", None, 3)
    seen = v1.get_variable("seen", initializer=np.zeros(3), trainable=False, use_resource=True)
    z = tf.tanh(x @ variable("w", W), name="hidden") @ variable("u", U)
    value = square(z - y)
    with tf.control_dependencies([value] if when == "behind the loss" else []):
        update = seen.assign_add(tf.reduce_sum(z if when == "from predictions" else y, 0))
    with tf.control_dependencies([update]):
        total = value + 0.01 * tf.nn.l2_loss(z)
        return {"loss": total, "slope": tf.gradients(total, z)[0]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("when", ["at once", "behind the loss", "from predictions"])
def test_a_counter_that_is_updated_before_the_gradients_holds_nobody_up(when: str, form: str) -> None:
    item = make_item(lambda: counted(when))
    expected = train(item, FEEDS)
    got = train(ar.rewrite(item, {"devices": ["CPU:0"], **FORMS[form](3)}), FEEDS)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-9, 1e-9, err_msg=name)


def trained(config: Mapping[str, Any] | None) -> list[Any]:
    """Train a function whose outputs wait for its updates: a loss of two terms, and what is read off its input."""
    w = tf.Variable(W)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            z = x @ w
            value = square(z) + 0.1 * tf.nn.l2_loss(z)
        w.assign_sub(0.1 * tape.gradient(value, w))
        return value, tf.argmax(x, 1), tf.reduce_max(z)

    spec = tf.TensorSpec([None, 4], tf.float64)
    made = tf.function(step) if config is None else ar.distribute(step, config, spec)
    return [np.asarray(one) for one in made(tf.constant(X[:6]))] + [w.numpy()]


@pytest.mark.parametrize("form", ["copies", "loop"])
@pytest.mark.parametrize("micro", [2, 3])
def test_outputs_of_a_function_that_wait_for_its_updates_close_no_cycle(form: str, micro: int) -> None:
    got = trained({"devices": ["CPU:0"], **FORMS[form](micro)})
    for a, b in zip(trained(None), got, strict=True):
        np.testing.assert_allclose(b, a, 1e-9, 1e-9)
