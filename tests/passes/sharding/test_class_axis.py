"""Softmax, its losses and extremes along classes that the devices of a replica share: no device has all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes.canonicalize import class_axis
from tests.support.model_axis import conversions, descent, on_mesh, variables_of, worst_difference

SHAPES = {"hidden": (3, 5), "head": (5, 14), "bias": (14,)}
NUMBERS = ("cut", (1, 14))
"""The numbers of all classes: a constant."""
HEAD = {"head": (1, 0)}


def data(classes: int = 14) -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(8, 3)), rng.integers(0, classes, 8), rng.dirichlet(np.ones(classes), 8)]


def logits(v: dict[str, Any], x: Any) -> Any:
    import tensorflow as tf

    return tf.tanh(x @ v["hidden"]) @ v["head"] + v["bias"]


def sparse_loss(v: dict[str, Any], x: Any, labels: Any, soft: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits(v, x)))


def dense_loss(v: dict[str, Any], x: Any, labels: Any, soft: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=soft, logits=logits(v, x)))


def softmax_loss(v: dict[str, Any], x: Any, labels: Any, soft: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean((tf.nn.softmax(logits(v, x)) - soft) ** 2)


def log_softmax_loss(v: dict[str, Any], x: Any, labels: Any, soft: Any) -> Any:
    import tensorflow as tf

    return -tf.reduce_mean(tf.reduce_sum(tf.nn.log_softmax(logits(v, x)) * soft, -1))


def logsumexp_loss(v: dict[str, Any], x: Any, labels: Any, soft: Any) -> Any:
    import tensorflow as tf

    z = logits(v, x)
    return tf.reduce_mean(tf.reduce_logsumexp(z, -1) - tf.reduce_sum(z * soft, -1))


def distilled_loss(v: dict[str, Any], x: Any, labels: Any, soft: Any) -> Any:
    import tensorflow as tf

    z = logits(v, x)
    teacher = tf.stop_gradient(tf.nn.softmax(0.5 * z))
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=teacher, logits=z))


LOSSES = (sparse_loss, dense_loss, softmax_loss, log_softmax_loss, logsumexp_loss, distilled_loss)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("replicas", "model"), [(1, 4), (2, 2)])
def test_a_loss_of_split_classes_trains_as_on_one_device(loss: Callable[..., Any], replicas: int, model: int) -> None:
    shapes = SHAPES if model == 2 else {"hidden": (3, 5), "head": (5, 7), "bias": (7,)}  # 7: uneven blocks of 4
    config = on_mesh(replicas, model, HEAD)
    assert worst_difference(shapes, descent(loss), data(shapes["bias"][0]), config) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_no_logits_are_gathered(loss: Callable[..., Any]) -> None:
    found = conversions(SHAPES, descent(loss), data(), on_mesh(1, 2, HEAD))
    assert [shape for how, shape in found if 14 in shape and how != "cut"] == []  # soft labels are cut
    assert ("max", (-1, 1)) in found


def test_the_logits_are_gathered_where_classes_are_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_axis, "cut_classes", lambda state: [])
    found = conversions(SHAPES, descent(sparse_loss), data(), on_mesh(1, 2, HEAD))
    assert ("gather", (-1, 14)) in found


def test_the_comparison_sees_classes_that_are_counted_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(pieces: class_axis.ClassPieces, dtype: int) -> Value:
        made = pieces.const((np.arange(pieces.classes) + 1).reshape(1, -1), dtype, "classes")
        pieces.numbered[made] = pieces.dim
        return made

    monkeypatch.setattr(class_axis.ClassPieces, "numbers", shifted)
    assert worst_difference(SHAPES, descent(sparse_loss), data(), on_mesh(1, 2, HEAD)) > 1e-3


def test_a_label_that_is_none_is_refused_as_by_the_kernel() -> None:
    import tensorflow as tf

    import autograph_rewrite as ar

    x, labels, soft = data()
    step = ar.distribute(descent(sparse_loss)(variables_of(SHAPES)), on_mesh(1, 2, HEAD))
    labels[3] = 14
    with pytest.raises(Exception, match=r"14 is not in \[0, 14\)"):
        step(tf.constant(x), tf.constant(labels), tf.constant(soft))


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_the_first_extreme_of_split_classes_is_found_without_gathering_them(op: str) -> None:
    import tensorflow as tf

    import autograph_rewrite as ar

    def values(v: dict[str, Any], x: Any) -> Any:
        z = x @ v["w"]
        none = tf.constant(np.nan, tf.float64)
        return tf.where(tf.abs(z) > 3, none, tf.round(z))  # some tie, and some are not numbers

    def look_of(v: dict[str, Any]) -> Callable[..., Any]:
        def step(x: Any) -> Any:
            found = getattr(tf, op)(values(v, x), -1)
            v["w"].assign_sub(0.01 * tf.transpose(x) @ (x @ v["w"]))
            return found

        return step

    shapes = {"w": (3, 14)}
    x = np.random.default_rng(2).normal(size=(40, 3)) * 1.5
    one, many = variables_of(shapes), variables_of(shapes)
    config = on_mesh(1, 4, {"w": (1, 0)})
    expected, got = look_of(one)(tf.constant(x)), ar.distribute(look_of(many), config)(tf.constant(x))
    np.testing.assert_array_equal(expected, got)
    assert len(set(expected.numpy())) > 4
    found = conversions(shapes, look_of, [x], config)
    assert [shape for how, shape in found if 14 in shape and (how, shape) != NUMBERS] == []
