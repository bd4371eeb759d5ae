"""BERT as google-research wrote it for TensorFlow 1, small: its layers, its two losses and its optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
VOCABULARY, WIDTH, HEADS, LONGEST, PREDICTIONS = 29, 16, 2, 8, 3
TYPE = tf.float64


def shape_list(tensor: Any) -> list[Any]:
    """Return sizes as numbers where they are known, else as tensors (`get_shape_list`)."""
    sizes = tensor.shape.as_list()
    open_ = [i for i, size in enumerate(sizes) if size is None]
    if open_:
        run = tf.shape(tensor)
        for i in open_:
            sizes[i] = run[i]
    return sizes


def _drawn(deviation: float = 0.2) -> Any:
    return v1.truncated_normal_initializer(stddev=deviation)


def _variable(name: str, shape: Sequence[int], initial: Any = None) -> Any:
    return v1.get_variable(name, shape, TYPE, initializer=initial or _drawn())


def layer_norm(x: Any, name: str | None = None) -> Any:
    """As tf.contrib.layers.layer_norm, over the last dimension."""
    with v1.variable_scope(name, "LayerNorm"):
        beta = _variable("beta", [WIDTH], v1.zeros_initializer())
        gamma = _variable("gamma", [WIDTH], v1.ones_initializer())
        mean, variance = tf.nn.moments(x, [len(x.shape) - 1], keepdims=True)
        y = tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)
        y.set_shape(x.shape)
        return y


def _dropout(x: Any, rate: float, seed: int) -> Any:
    return v1.nn.dropout(x, rate=rate, seed=seed) if rate else x


def _gelu(x: Any) -> Any:
    return x * 0.5 * (1.0 + tf.math.erf(x / math.sqrt(2.0)))


def _dense(x: Any, units: int, name: str, activation: Any = None) -> Any:
    with v1.variable_scope(name):
        y = tf.nn.bias_add(
            tf.matmul(x, _variable("kernel", [x.shape[-1], units])), _variable("bias", [units], v1.zeros_initializer())
        )
        return activation(y) if activation else y


def _lookup(ids: Any, *, one_hot: bool) -> tuple[Any, Any]:
    if ids.shape.ndims == 2:
        ids = tf.expand_dims(ids, axis=[-1])
    table = _variable("word_embeddings", [VOCABULARY, WIDTH])
    flat = tf.reshape(ids, [-1])
    out = tf.matmul(tf.one_hot(flat, depth=VOCABULARY, dtype=TYPE), table) if one_hot else tf.gather(table, flat)
    sizes = shape_list(ids)
    return tf.reshape(out, [*sizes[:-1], sizes[-1] * WIDTH]), table


def _postprocess(x: Any, segments: Any, rate: float) -> Any:
    batch, length, width = shape_list(x)
    types = _variable("token_type_embeddings", [2, WIDTH])
    flat = tf.reshape(segments, [-1])
    x += tf.reshape(tf.matmul(tf.one_hot(flat, depth=2, dtype=TYPE), types), [batch, length, width])
    with tf.control_dependencies([v1.assert_less_equal(length, LONGEST)]):
        positions = _variable("position_embeddings", [LONGEST, WIDTH])
        rows = tf.slice(positions, [0, 0], [length, -1])
        x += tf.reshape(rows, [1, length, width])
    return _dropout(layer_norm(x), rate, 1)


def _attention_mask(from_tensor: Any, mask: Any) -> Any:
    batch, from_length = shape_list(from_tensor)[:2]
    to_length = shape_list(mask)[1]
    mask = tf.cast(tf.reshape(mask, [batch, 1, to_length]), TYPE)
    return tf.ones(shape=[batch, from_length, 1], dtype=TYPE) * mask


def _heads(x: Any, batch: Any, length: Any) -> Any:
    return tf.transpose(tf.reshape(x, [batch, length, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])


def _attention(x: Any, mask: Any, batch: Any, length: Any, rate: float, seed: int) -> Any:
    query, key, value = (_heads(_dense(x, WIDTH, name), batch, length) for name in ("query", "key", "value"))
    scores = tf.matmul(query, key, transpose_b=True) * (1.0 / math.sqrt(WIDTH // HEADS))
    scores += (1.0 - tf.cast(tf.expand_dims(mask, axis=[1]), TYPE)) * -10000.0
    weights = _dropout(tf.nn.softmax(scores), rate, seed)
    context = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
    return tf.reshape(context, [batch * length, WIDTH])


def _to_matrix(x: Any) -> Any:
    return x if x.shape.ndims == 2 else tf.reshape(x, [-1, x.shape[-1]])


def _transformer(x: Any, mask: Any, rate: float, layers: int) -> tuple[Any, list[str]]:
    sizes = shape_list(x)
    batch, length, width = sizes
    before, cuts = _to_matrix(x), []
    for layer in range(layers):
        with v1.variable_scope(f"layer_{layer}"):
            with v1.variable_scope("attention"):
                with v1.variable_scope("self"):
                    context = _attention(before, mask, batch, length, rate, 10 * layer + 2)
                with v1.variable_scope("output"):
                    context = _dropout(_dense(context, WIDTH, "dense"), rate, 10 * layer + 3)
                    context = layer_norm(context + before)
            with v1.variable_scope("intermediate"):
                wide = _dense(context, 2 * WIDTH, "dense", _gelu)
            with v1.variable_scope("output"):
                before = layer_norm(_dropout(_dense(wide, WIDTH, "dense"), rate, 10 * layer + 4) + context)
            cuts.append(before.op.name)
    return tf.reshape(before, [batch, length, width]), cuts


def _gather_indexes(x: Any, positions: Any) -> Any:
    batch, length, width = shape_list(x)
    offsets = tf.reshape(tf.range(0, batch, dtype=tf.int32) * length, [-1, 1])
    return tf.gather(tf.reshape(x, [batch * length, width]), tf.reshape(positions + offsets, [-1]))


def _masked_lm(x: Any, table: Any, positions: Any, labels: Any, weights: Any) -> Any:
    x = _gather_indexes(x, positions)
    with v1.variable_scope("cls/predictions"):
        with v1.variable_scope("transform"):
            x = layer_norm(_dense(x, WIDTH, "dense", _gelu))
        bias = _variable("output_bias", [VOCABULARY], v1.zeros_initializer())
        logits = tf.nn.bias_add(tf.matmul(x, table, transpose_b=True), bias)
        logs = tf.nn.log_softmax(logits, axis=-1)
        weights = tf.reshape(weights, [-1])
        hot = tf.one_hot(tf.reshape(labels, [-1]), depth=VOCABULARY, dtype=TYPE)
        each = -tf.reduce_sum(logs * hot, axis=[-1])
        return tf.reduce_sum(weights * each) / (tf.reduce_sum(weights) + 1e-5)


def _next_sentence(pooled: Any, labels: Any) -> Any:
    with v1.variable_scope("cls/seq_relationship"):
        weights, bias = _variable("output_weights", [2, WIDTH]), _variable("output_bias", [2], v1.zeros_initializer())
        logs = tf.nn.log_softmax(tf.nn.bias_add(tf.matmul(pooled, weights, transpose_b=True), bias), axis=-1)
        hot = tf.one_hot(tf.reshape(labels, [-1]), depth=2, dtype=TYPE)
        return tf.reduce_mean(-tf.reduce_sum(hot * logs, axis=-1))


def adam_weight_decay(loss: Any, rate: float = 0.01, steps: int = 20) -> Any:
    """Return the update of `optimization.py`: warm-up, decay, clipping by the global norm, decoupled weight decay."""
    step = v1.train.get_or_create_global_step()
    decayed = v1.train.polynomial_decay(tf.constant(rate, TYPE), step, steps, end_learning_rate=0.0)
    done = tf.cast(step, TYPE)
    warm = tf.cast(done < 2, TYPE)
    decayed = (1.0 - warm) * decayed + warm * rate * (done + 1) / 2
    trained = v1.trainable_variables()
    slopes, _ = tf.clip_by_global_norm(v1.gradients(loss, trained), clip_norm=1.0)
    updates = []
    for slope, variable in zip(slopes, trained, strict=True):
        name = variable.op.name
        m, v = (
            v1.get_variable(f"{name}/{slot}", variable.shape, TYPE, v1.zeros_initializer(), trainable=False)
            for slot in ("adam_m", "adam_v")
        )
        slope = tf.convert_to_tensor(slope)
        next_m = 0.9 * m + 0.1 * slope
        next_v = 0.999 * v + 0.001 * tf.square(slope)
        update = next_m / (tf.sqrt(next_v) + 1e-6)
        if not re.search("LayerNorm|layer_norm|bias", name):
            update += 0.01 * variable
        updates += [variable.assign(variable - decayed * update), m.assign(next_m), v.assign(next_v)]
    return tf.group(*updates, step.assign(step + 1), name="train")


def bert(
    *, length: int | None = LONGEST, rate: float = 0.0, one_hot: bool = False, layers: int = 4, gathered: bool = True
) -> tuple[Any, list[str], Any]:
    """Build pre-training; return the loss, what boundaries may lie behind, and the update."""
    with v1.variable_scope("", use_resource=True):
        ids = v1.placeholder(tf.int32, [None, length], name="input_ids")
        mask = v1.placeholder(tf.int32, [None, length], name="input_mask")
        segments = v1.placeholder(tf.int32, [None, length], name="segment_ids")
        positions = v1.placeholder(tf.int32, [None, PREDICTIONS], name="masked_lm_positions")
        labels = v1.placeholder(tf.int32, [None, PREDICTIONS], name="masked_lm_ids")
        weights = v1.placeholder(TYPE, [None, PREDICTIONS], name="masked_lm_weights")
        following = v1.placeholder(tf.int32, [None, 1], name="next_sentence_labels")
        with v1.variable_scope("bert"):
            with v1.variable_scope("embeddings"):
                x, table = _lookup(ids, one_hot=one_hot)
                x = _postprocess(x, segments, rate)
            with v1.variable_scope("encoder"):
                x, cuts = _transformer(x, _attention_mask(ids, mask), rate, layers)
            with v1.variable_scope("pooler"):
                first = tf.squeeze(x[:, 0:1, :], axis=1)
                pooled = _dense(first, WIDTH, "dense", tf.tanh)
        loss = _next_sentence(pooled, following)
        if gathered:
            loss += _masked_lm(x, table, positions, labels, weights)
        loss = tf.identity(loss, name="loss")
        return loss, cuts[:-1], adam_weight_decay(loss)


def bert_feed(seed: int, batch: int = 16, length: int = LONGEST) -> dict[str, Any]:
    """Return examples; some micro-batches have fewer predictions than others."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(PREDICTIONS, length + 1, batch)
    return {
        "input_ids": rng.integers(0, VOCABULARY, (batch, length)),
        "input_mask": (np.arange(length) < lengths[:, None]).astype(np.int32),
        "segment_ids": rng.integers(0, 2, (batch, length)),
        "masked_lm_positions": rng.integers(0, length, (batch, PREDICTIONS)),
        "masked_lm_ids": rng.integers(0, VOCABULARY, (batch, PREDICTIONS)),
        "masked_lm_weights": (rng.random((batch, PREDICTIONS)) < 0.6).astype(np.float64),
        "next_sentence_labels": rng.integers(0, 2, (batch, 1)),
    }
