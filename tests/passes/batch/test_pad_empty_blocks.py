"""Batches smaller than the number of replicas, in float32, where TensorFlow's oneDNN kernels run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import MODES, assert_trains_alike, distributed, make_item, placeholder, train, v1, variable

IMAGE = (8, 8, 4)
Network = Callable[[Any], Any]


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(name: str, *shape: int) -> Any:
    return variable(name, draw(*shape, seed=len(name)) * 0.3)


def convolved(x: Any, padding: Any = "SAME", stride: int = 1, units: int = 6, name: str = "w") -> Any:
    return tf.nn.conv2d(x, weight(name, 3, 3, x.shape[-1], units), stride, padding)


def biased(x: Any, name: str = "b") -> Any:
    return tf.nn.bias_add(x, weight(name, x.shape[-1]))


def dense(x: Any, units: int, name: str) -> Any:
    return biased(tf.matmul(x, weight(name, x.shape[-1], units)), f"{name}_bias")


def normalised(x: Any, training: bool) -> Any:
    """Batch normalisation by given statistics, or by those of the batch."""
    channels = x.shape[-1]
    given = tf.zeros([0 if training else channels])
    inputs = {"scale": weight("scale", channels), "offset": weight("offset", channels)}
    return tf.raw_ops.FusedBatchNormV3(x=x, mean=given, variance=given + 1, is_training=training, **inputs)


def attention(x: Any) -> Any:
    query, key, value = (
        tf.transpose(tf.reshape(tf.einsum("btsc,co->btso", x, weight(n, 4, 4)), [-1, 8, 16, 2]), [0, 2, 1, 3])
        for n in ("q", "kk", "vvv")
    )
    return tf.nn.softmax(tf.matmul(query, key, transpose_b=True) * 0.5) @ value


def layer_norm(x: Any) -> Any:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.gelu((x - mean) * tf.math.rsqrt(variance + 1e-3) * weight("g", 4) + weight("gg", 4))


def pooled(x: Any) -> Any:
    y = tf.nn.max_pool2d(biased(convolved(x)), 2, 2, "SAME")
    return tf.nn.avg_pool2d(convolved(y, name="w2"), 2, 2, "VALID")


def two_heads(x: Any) -> Any:
    y = tf.nn.relu(biased(convolved(x)))
    return biased(convolved(y, name="w2"), "bb") + biased(convolved(y, name="w3"), "bbb")


def over_time(x: Any) -> Any:
    """Several rows for each example."""
    return tf.nn.relu(biased(convolved(tf.reshape(x, [-1, 4, 4, 4]))))


def volume(x: Any) -> Any:
    y = tf.nn.conv3d(x[..., None], weight("w", 2, 2, 2, 1, 3), [1] * 5, "SAME")
    return tf.nn.max_pool3d(tf.nn.relu(biased(y)), 2, 2, "SAME")


def depthwise(x: Any) -> Any:
    return tf.nn.relu6(biased(tf.nn.depthwise_conv2d(x, weight("w", 3, 3, 4, 2), [1, 2, 2, 1], "SAME")))


def transposed(x: Any) -> Any:
    return tf.nn.conv2d_transpose(x, weight("w", 3, 3, 2, 4), tf.stack([tf.shape(x)[0], 16, 16, 2]), 2)


def looped(x: Any) -> Any:
    w = weight("w", 3, 3, 4, 4)
    shapes = [tf.TensorShape([]), tf.TensorShape([None, *IMAGE])]
    body = lambda i, y: (i + 1, tf.tanh(tf.nn.conv2d(y, w, 1, "SAME")))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, body, [0, x], shapes, maximum_iterations=3)[1]


def classified(x: Any) -> Any:
    y = dense(tf.nn.relu(dense(tf.reduce_mean(x, [1, 2]), 16, "h")), 3, "out")
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.argmax(x[:, 0, 0, :3], 1), logits=y)


NETWORKS: dict[str, Network] = {
    "bias, whose gradient oneDNN merges with the filter's": lambda x: tf.nn.relu(biased(convolved(x))),
    "unpadded, into which oneDNN merges a padding": lambda x: tf.nn.relu(convolved(x, "VALID", 2) + weight("b", 6)),
    "padded by hand": lambda x: convolved(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), "VALID"),
    "residual": lambda x: tf.nn.relu(biased(convolved(x, units=4)) + x),
    "one filter, two readers": two_heads,
    "pooling": pooled,
    "several rows for each example": over_time,
    "in a loop": looped,
    "volume": volume,
    "depthwise": depthwise,
    "transposed": transposed,
    "local response": lambda x: tf.nn.local_response_normalization(x * weight("s", 4)),
    "normalised by given statistics": lambda x: tf.nn.relu(normalised(convolved(x), False)[0]),
    "normalised by the batch": lambda x: tf.nn.relu(normalised(convolved(x), True)[0]),
    "attention": attention,
    "layer norm": layer_norm,
    "softmax of images": lambda x: tf.nn.softmax(tf.transpose(x * weight("s", 4), [0, 3, 1, 2])),
    "joined": lambda x: tf.concat([convolved(x), x, tf.nn.max_pool2d(x, 3, 1, "SAME")], -1),
    "classifier": classified,
}


def item_of(network: Network, shape: tuple[int | None, ...] = IMAGE) -> Any:
    def forward() -> dict[str, Any]:
        y = network(placeholder("x", None, *shape, dtype=tf.float32))
        return {"loss": tf.reduce_sum(tf.square(y)) / 1000, "y": y}

    return make_item(forward)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_alike_on_batches_smaller_than_the_number_of_replicas(name: str) -> None:
    feeds = [{"x": draw(batch, *IMAGE)} for batch in (1, 4, 2)]
    assert_trains_alike(item_of(NETWORKS[name]), feeds, replicas=3, tolerance=1e-4, modes=("shared",))


def test_an_empty_block_is_guarded_on_every_device() -> None:
    feeds = [{"x": draw(batch, *IMAGE)} for batch in (1, 4)]
    assert_trains_alike(item_of(two_heads), feeds, replicas=3, tolerance=1e-4, modes=("mirrored",))


def test_a_block_is_measured_where_its_rows_have_no_fixed_number_for_each_example() -> None:
    feeds = [{"x": draw(batch, 5, *IMAGE)} for batch in (1, 4)]
    item = item_of(lambda x: biased(convolved(tf.reshape(x, [-1, *IMAGE]))), (None, *IMAGE))
    assert_trains_alike(item, feeds, replicas=3, tolerance=1e-4, modes=("shared",))


@pytest.mark.parametrize("mode", MODES)
def test_moving_averages_of_local_statistics_leave_empty_blocks_out(mode: str) -> None:
    def forward() -> dict[str, Any]:
        x = placeholder("x", None, *IMAGE, dtype=tf.float32)
        one = v1.get_variable("one", initializer=np.ones(1, np.float32), trainable=False, use_resource=True)
        y, mean, variance, *_ = normalised(x * one, True)  # statistics of what no variable reached are never local
        moving = v1.get_variable("moving", initializer=np.zeros((2, 4), np.float32), trainable=False, use_resource=True)
        with tf.control_dependencies([moving.assign(tf.stack([mean, variance]))]):
            return {"loss": tf.reduce_sum(tf.square(y)) / 1000, "mean": mean}

    rewritten = distributed(make_item(forward), mode, 3, batch_norm="local")
    for batch in (1, 2, 4):
        x = draw(batch, *IMAGE)
        blocks = [block for block in np.array_split(x, 3) if len(block)]
        means = [block.mean((0, 1, 2)) for block in blocks]
        variances = [block.var((0, 1, 2), ddof=1) for block in blocks]
        result = train(rewritten, [{"x": x}])
        np.testing.assert_allclose(result.fetched[0]["mean"], np.mean(means, 0), 1e-4, 1e-5)
        np.testing.assert_allclose(result.variables["moving"], [np.mean(means, 0), np.mean(variances, 0)], 1e-4, 1e-5)


def test_a_step_without_any_example_gathers_nothing_and_goes_on() -> None:
    def forward() -> dict[str, Any]:
        ids = placeholder("ids", None, dtype=tf.int64)
        rows = tf.gather(variable("table", np.linspace(-1, 1, 12).reshape(6, 2)), ids)
        return {"loss": tf.reduce_sum(tf.square(rows)), "rows": rows}

    item = make_item(forward, batch_inputs={"ids": 0})
    assert_trains_alike(item, [{"ids": np.array(ids, np.int64)} for ids in ([3, 1, 3], [], [5])])
