"""A concatenation along the batch stays divided: each replica has a segment of each part, and the whole keeps its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training import assert_trains_alike, make_item, placeholder, variable

RNG = np.random.default_rng(0)
W, U = RNG.normal(size=(4, 4)), RNG.normal(size=(4, 3))
FEEDS = [{"x": RNG.normal(size=(rows, 4))} for rows in (7, 6, 3, 1)]


def two_parts(batch: int | None = None) -> tuple[Any, Any, Any]:
    """Return x, something made of it, and the two, one behind the other."""
    x = placeholder("x", batch, 4)
    other = tf.tanh(x[:, ::-1] @ variable("w", W))
    return x, other, tf.concat([other, x], 0)


def rows(z: Any) -> Any:
    return tf.shape(z)[0]


def mean(y: Any) -> dict[str, Any]:
    return {"loss": tf.reduce_mean(y * y), "y": y}


def labelled(z: Any, x: Any, other: Any) -> dict[str, Any]:
    labels = tf.concat([tf.ones_like(other[:, :1]), tf.zeros_like(x[:, :1])], 0)
    score = tf.reduce_sum(tf.tanh(z @ variable("u", U)), 1, keepdims=True)
    return {"loss": tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, score)), "score": score}


def views(z: Any, x: Any, other: Any) -> dict[str, Any]:
    a, b = tf.split(tf.math.l2_normalize(tf.tanh(z @ variable("u", U)), 1), 2)
    labels = tf.range(rows(a))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, a @ tf.transpose(b))
    return {"loss": tf.reduce_mean(loss), "each": loss, "b": b}


def normalised(z: Any, x: Any, other: Any) -> dict[str, Any]:
    h = tf.tanh(z @ variable("u", U))
    centre, spread = tf.nn.moments(h, 0)
    y = tf.nn.batch_normalization(h, centre, spread, None, variable("g", np.ones(3)), 1e-3)
    return {"loss": tf.reduce_mean(y**4), "y": y, "largest": tf.reduce_max(h, 0)}


def fused(z: Any, x: Any, other: Any) -> dict[str, Any]:
    h = tf.cast(tf.reshape(z, [-1, 2, 2, 1]), tf.float32)
    h = tf.nn.conv2d(h, tf.cast(tf.reshape(variable("k", W), [2, 2, 1, 4]), tf.float32), 1, "SAME")
    y, _, _ = tf.compat.v1.nn.fused_batch_norm(h, tf.ones(4), tf.zeros(4), epsilon=0.1)
    return {"loss": tf.cast(tf.reduce_mean(y**3), tf.float64), "y": tf.nn.max_pool2d(y, 2, 2, "SAME")}


PROGRAMS: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "as it is": lambda z, x, o: mean(z),
    "its square": lambda z, x, o: mean(z * z),
    "labels for real and generated rows": labelled,
    "two views": views,
    "statistics of all": normalised,
    "fused statistics of images": fused,
    "cut by slices": lambda z, x, o: mean((z * z)[: rows(o)] * 2 - (z * 3)[rows(o) :]),
    "cut by tf.slice": lambda z, x, o: mean(tf.slice(z @ variable("u", U), [rows(o), 0], [rows(x), 2])),
    "cut by sizes": lambda z, x, o: mean(tf.subtract(*tf.split(z * 2, [rows(o), rows(x)]))),
    "cut elsewhere": lambda z, x, o: mean(z[1:]),
    "cut in three": lambda z, x, o: mean(tf.concat([z, z + o[:1]], 0)[rows(o) : rows(z) + rows(x)] ** 3),
    "concatenated again": lambda z, x, o: mean(tf.concat([z, x * 2, z], 0) @ variable("u", U)),
    "flattened, and back": lambda z, x, o: mean(tf.reshape(tf.tanh(tf.reshape(z, [-1])), [-1, 2, 2])),
    "rows taken together in pairs": lambda z, x, o: mean(tf.reshape(z, [-1, 8])),
    "views stacked": lambda z, x, o: mean(tf.reshape(z, [2, -1, 4])),
    "transposed": lambda z, x, o: mean(tf.transpose(tf.transpose(z) * variable("g", np.ones((4, 1))))),
    "against all": lambda z, x, o: mean(z @ tf.transpose(z)),
    "softmax over the rows": lambda z, x, o: mean(tf.nn.softmax(z, 0)),
    "running sum": lambda z, x, o: mean(tf.cumsum(z)),
    "reversed": lambda z, x, o: mean(z * tf.reverse(z, [0])),
    "sorted": lambda z, x, o: mean(tf.sort(z, 0)),
    "a number for each row": lambda z, x, o: mean(z * tf.cast(tf.range(rows(z)), tf.float64)[:, None]),
    "as many rows as both have": lambda z, x, o: mean(z + tf.ones([rows(o) + rows(x), 1], tf.float64) * tf.cumsum(z)),
    "tiled": lambda z, x, o: mean(tf.tile(z, [2, 1])),
    "rows by number": lambda z, x, o: mean(tf.gather(z, tf.range(rows(z))[::-1])),
    "looked up": lambda z, x, o: mean(tf.gather(variable("t", W), tf.cast(tf.abs(z[:, 0]), tf.int32) % 4)),
    "masked": lambda z, x, o: mean(tf.boolean_mask(z, z[:, 0] > 0)),
    "largest row": lambda z, x, o: {**mean(z), "at": tf.cast(tf.argmax(z, 0), tf.float64)},
    "in a branch": lambda z, x, o: mean(tf.cond(tf.reduce_sum(z) > 0, lambda: z * 2, lambda: z - 1)),
    "in a loop": lambda z, x, o: mean(tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * z), (0, z))[1]),
    "made in a loop": lambda z, x, o: mean(
        tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.reduce_mean(tf.concat([y, x], 0) ** 2) * y), (0, o))[
            1
        ]
    ),
    "row by row": lambda z, x, o: mean(tf.map_fn(lambda row: row * 2, z)),
    "of uneven parts": lambda z, x, o: mean(tf.concat([tf.repeat(x, 2, 1), tf.reshape(z, [-1, 8])], 0)),
    "two rows of each example": lambda z, x, o: mean(tf.concat([tf.reshape(o, [-1, 2]), x[:, 2:]], 0) ** 2),
    "other columns": lambda z, x, o: mean(tf.concat([tf.transpose(x), tf.transpose(o)], 1)),
    "chosen": lambda z, x, o: mean(tf.where(z > 0, z, tf.zeros_like(z))),
    "of a constant, too": lambda z, x, o: mean(tf.concat([z, tf.constant(W)], 0)),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_both_parts_train_as_on_one_device(program: str, replicas: int) -> None:
    def forward() -> dict[str, Any]:
        x, other, z = two_parts()
        return PROGRAMS[program](z, x, other)

    tolerance = 1e-4 if program.startswith("fused") else 1e-9
    assert_trains_alike(make_item(forward), FEEDS, replicas=replicas, tolerance=tolerance)


@pytest.mark.parametrize("program", PROGRAMS)
def test_both_parts_of_a_static_batch_train_as_on_one_device(program: str) -> None:
    def forward() -> dict[str, Any]:
        x, other, z = two_parts(7)
        return PROGRAMS[program](z, x, other)

    tolerance = 1e-4 if program.startswith("fused") else 1e-9
    assert_trains_alike(make_item(forward, batch_inputs={"x": 0}), FEEDS[:1], tolerance=tolerance)
