"""A decoder: RMSNorm, rotary embeddings, grouped queries, gated feed-forward; cut by heads, columns, rows, words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.model_axis import conversions, descent, on_mesh, worst_difference

WORDS, TIME, WIDTH, HEADS, GROUPS, SIZE, INNER, BLOCKS = 26, 5, 8, 8, 4, 2, 12, 2
SHAPES: dict[str, tuple[int, ...]] = {"table": (WORDS, WIDTH), "norm": (WIDTH,), "lm_head": (WIDTH, WORDS)}
SPLIT: dict[str, tuple[int, ...]] = {"table": (0, 1), "lm_head": (1, 0)}
for _i in range(BLOCKS):
    SHAPES |= {
        f"{_i}/norm_a": (WIDTH,), f"{_i}/norm_f": (WIDTH,),
        f"{_i}/q": (WIDTH, HEADS, SIZE), f"{_i}/k": (WIDTH, GROUPS, SIZE), f"{_i}/v": (WIDTH, GROUPS, SIZE),
        f"{_i}/o": (HEADS, SIZE, WIDTH),
        f"{_i}/gate": (WIDTH, INNER), f"{_i}/up": (WIDTH, INNER), f"{_i}/down": (INNER, WIDTH),
    }  # fmt: skip
    SPLIT |= {f"{_i}/{name}": (1, 0, 1) for name in "qkv"}
    SPLIT |= {f"{_i}/o": (0, 1, 1), f"{_i}/gate": (1, 0), f"{_i}/up": (1, 0), f"{_i}/down": (0, 1)}


def norm(x: Any, scale: Any) -> Any:
    import tensorflow as tf

    return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotated(x: Any) -> Any:
    import tensorflow as tf

    angle = np.arange(TIME)[:, None, None] * np.ones((1, 1, SIZE // 2))
    a, b = tf.split(x, 2, -1)
    return tf.concat([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def attention(v: dict[str, Any], i: int, x: Any) -> Any:
    import tensorflow as tf

    q, k = (rotated(tf.einsum("btd,dhs->bths", x, v[f"{i}/{name}"])) for name in "qk")
    k = tf.repeat(k, HEADS // GROUPS, axis=2)
    value = tf.repeat(tf.einsum("btd,dhs->bths", x, v[f"{i}/v"]), HEADS // GROUPS, axis=2)
    score = tf.einsum("bths,buhs->bhtu", q, k) - 1e9 * np.triu(np.ones((TIME, TIME)), 1)
    return tf.einsum("bths,hsd->btd", tf.einsum("bhtu,buhs->bths", tf.nn.softmax(score), value), v[f"{i}/o"])


def loss(v: dict[str, Any], words: Any, labels: Any) -> Any:
    import tensorflow as tf

    x = tf.gather(v["table"], words)
    for i in range(BLOCKS):
        x += attention(v, i, norm(x, v[f"{i}/norm_a"]))
        h = norm(x, v[f"{i}/norm_f"])
        x += (tf.nn.silu(h @ v[f"{i}/gate"]) * (h @ v[f"{i}/up"])) @ v[f"{i}/down"]
    logits = norm(x, v["norm"]) @ v["lm_head"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def data() -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, WORDS, (4, TIME)), rng.integers(0, WORDS, (4, TIME))]


@pytest.mark.parametrize(("replicas", "model"), [(1, 2), (1, 4), (2, 2)])
def test_a_decoder_trains_as_on_one_device(replicas: int, model: int) -> None:
    assert worst_difference(SHAPES, descent(loss), data(), on_mesh(replicas, model, SPLIT)) < 1e-9


def test_a_block_has_two_sums_forward_and_two_backward_and_gathers_nothing() -> None:
    found = conversions(SHAPES, descent(loss), data(), on_mesh(1, 2, SPLIT))
    activations = [how for how, shape in found if shape[-1:] == (WIDTH,) and len(shape) == 3 and how == "sum"]
    # Backward, that is one for the input of the head and two per block; the last of them is taken of the gradient of
    # the table, which is smaller than the tokens of a typical batch here.
    assert len(activations) == 4 * BLOCKS
    assert found.count(("sum", (WORDS, WIDTH))) == 1
    assert [one for one in found if one[0] == "gather"] == []
    assert [one for one in found if one[1][-1:] == (WORDS,) and one[0] != "cut"] == []


SPLIT_FEATURES = {"up": (6, 12), "bias": (12,), "gamma": (12,), "beta": (12,), "down": (12, 3)}


def features_loss(v: dict[str, Any], x: Any, y: Any) -> Any:
    """A layer norm, GELU and dropout on features that are split."""
    import tensorflow as tf

    h = x @ v["up"] + v["bias"]
    centred = h - tf.reduce_mean(h, -1, keepdims=True)
    deviation = tf.math.rsqrt(tf.reduce_mean(centred * centred, -1, keepdims=True) + 1e-6)
    h = tf.nn.gelu(centred * deviation * v["gamma"] + v["beta"])
    drawn = tf.random.stateless_uniform(tf.shape(h), [1, 2], dtype=tf.float64)
    return tf.reduce_mean((tf.where(drawn < 0.5, h, 0.0) @ v["down"] - y) ** 2)


def test_a_layer_norm_and_dropout_of_split_features_gather_no_features() -> None:
    rng = np.random.default_rng(1)
    given, config = [rng.normal(size=(8, 6)), rng.normal(size=(8, 3))], on_mesh(1, 2, {"up": (1, 0), "down": (0, 1)})
    assert worst_difference(SPLIT_FEATURES, descent(features_loss), given, config) < 1e-9
    joined = [
        shape for how, shape in conversions(SPLIT_FEATURES, descent(features_loss), given, config) if how != "cut"
    ]
    assert sorted(joined) == [(-1, 1)] * 4 + [(-1, 3)]
