"""GPT-2 and Transformer-XL as their authors wrote them for TensorFlow 1, small."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.models.bert_like import shape_list

v1 = tf.compat.v1
VOCABULARY, WIDTH, HEADS, LENGTH, MEMORY = 29, 16, 2, 6, 4
TYPE = tf.float64


def _normal(deviation: float = 0.2) -> Any:
    return v1.random_normal_initializer(stddev=deviation)


def _variable(name: str, shape: Any, initial: Any = None) -> Any:
    return v1.get_variable(name, shape, TYPE, initializer=initial or _normal())


def _constant(value: float) -> Any:
    return v1.constant_initializer(value)


# GPT-2 -------------------------------------------------------------------------------------------------------------


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3))))


def _softmax(x: Any) -> Any:
    x = x - tf.reduce_max(x, axis=-1, keepdims=True)
    ex = tf.exp(x)
    return ex / tf.reduce_sum(ex, axis=-1, keepdims=True)


def _norm(x: Any, scope: str) -> Any:
    with v1.variable_scope(scope):
        g, b = _variable("g", [x.shape[-1]], _constant(1)), _variable("b", [x.shape[-1]], _constant(0))
        u = tf.reduce_mean(x, axis=-1, keepdims=True)
        s = tf.reduce_mean(tf.square(x - u), axis=-1, keepdims=True)
        return (x - u) * v1.rsqrt(s + 1e-5) * g + b


def _conv1d(x: Any, scope: str, nf: int) -> Any:
    with v1.variable_scope(scope):
        *start, nx = shape_list(x)
        w, b = _variable("w", [1, nx, nf]), _variable("b", [nf], _constant(0))
        y = tf.matmul(tf.reshape(x, [-1, nx]), tf.reshape(w, [-1, nf])) + b
        return tf.reshape(y, [*start, nf])


def _split_states(x: Any, n: int) -> Any:
    *start, m = shape_list(x)
    return tf.reshape(x, [*start, n, m // n])


def _merge_states(x: Any) -> Any:
    *start, a, b = shape_list(x)
    return tf.reshape(x, [*start, a * b])


def _causal(nd: Any, ns: Any) -> Any:
    i, j = tf.range(nd)[:, None], tf.range(ns)
    return tf.cast(i >= j - ns + nd, TYPE)


def _attn(x: Any) -> Any:
    with v1.variable_scope("attn"):
        c = _conv1d(x, "c_attn", WIDTH * 3)
        q, k, v = (tf.transpose(_split_states(part, HEADS), [0, 2, 1, 3]) for part in tf.split(c, 3, axis=2))
        present = tf.stack([k, v], axis=1)
        w = tf.matmul(q, k, transpose_b=True)
        w = w * tf.math.rsqrt(tf.cast(v.shape[-1], w.dtype))
        _, _, nd, ns = shape_list(w)
        b = tf.reshape(_causal(nd, ns), [1, 1, nd, ns])
        w = w * b - tf.cast(1e10, w.dtype) * (1 - b)
        a = _merge_states(tf.transpose(tf.matmul(_softmax(w), v), [0, 2, 1, 3]))
        return _conv1d(a, "c_proj", WIDTH), present


def gpt2(
    *, length: int | None = LENGTH, targets: str = "shift", layers: int = 4, rate: float = 0.02
) -> tuple[Any, list[str], Any]:
    """Build language modelling; return the loss, what boundaries may lie behind, and the update."""
    with v1.variable_scope("model", use_resource=True):
        ids = v1.placeholder(tf.int32, [None, length], name="ids")
        batch, sequence = shape_list(ids)
        wpe, wte = _variable("wpe", [LENGTH + 2, WIDTH]), _variable("wte", [VOCABULARY, WIDTH])
        positions = tf.tile(tf.expand_dims(tf.range(sequence), 0), [batch, 1])
        h = tf.gather(wte, ids) + tf.gather(wpe, positions)
        cuts, presents = [], []
        for layer in range(layers):
            with v1.variable_scope(f"h{layer}"):
                a, present = _attn(_norm(h, "ln_1"))
                h = h + a
                with v1.variable_scope("mlp"):
                    m = _conv1d(_gelu(_conv1d(_norm(h, "ln_2"), "c_fc", 2 * WIDTH)), "c_proj", WIDTH)
                h = h + m
                cuts.append(h.op.name)
                presents.append(present)
        tf.stack(presents, axis=1, name="present")
        h = _norm(h, "ln_f")
        logits = tf.matmul(tf.reshape(h, [batch * sequence, WIDTH]), wte, transpose_b=True)
        logits = tf.reshape(logits, [batch, sequence, VOCABULARY], name="logits")
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 1:], logits=logits[:, :-1])
        loss = tf.reduce_mean(each)
        if targets == "padded":
            kept = tf.cast(tf.not_equal(ids[:, 1:], 0), TYPE)
            loss = tf.reduce_sum(each * kept) / tf.reduce_sum(kept)
        loss = tf.identity(loss, name="loss")
        train = v1.train.AdamOptimizer(rate)
        pairs = train.compute_gradients(loss, v1.trainable_variables())
        update = train.apply_gradients(pairs, v1.train.get_or_create_global_step())
        return loss, cuts[:-1], update


# Transformer-XL ----------------------------------------------------------------------------------------------------


def _rel_shift(x: Any) -> Any:
    sizes = tf.shape(x)
    x = tf.pad(x, [[0, 0], [1, 0], [0, 0], [0, 0]])
    x = tf.reshape(x, [sizes[1] + 1, sizes[0], sizes[2], sizes[3]])
    x = tf.slice(x, [1, 0, 0, 0], [-1, -1, -1, -1])
    return tf.reshape(x, sizes)


def _xl_norm(x: Any) -> Any:
    with v1.variable_scope("LayerNorm"):
        beta, gamma = _variable("beta", [WIDTH], _constant(0)), _variable("gamma", [WIDTH], _constant(1))
        mean, variance = tf.nn.moments(x, [len(x.shape) - 1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)


def _dense(x: Any, units: int, name: str, *, bias: bool = True, activation: Any = None) -> Any:
    """As tf.layers.dense on three dimensions: tensordot."""
    with v1.variable_scope(name):
        y = tf.tensordot(x, _variable("kernel", [x.shape[-1], units]), [[2], [0]])
        if bias:
            y = tf.nn.bias_add(y, _variable("bias", [units], _constant(0)))
        return activation(y) if activation else y


def _rel_attention(w: Any, r: Any, mask: Any, mems: Any, biases: Any) -> Any:
    head = WIDTH // HEADS
    with v1.variable_scope("rel_attn"):
        rlen, qlen, bsz = tf.shape(r)[0], tf.shape(w)[0], tf.shape(w)[1]
        cat = tf.concat([mems, w], 0) if mems is not None and mems.shape.ndims > 1 else w
        q, k, v = tf.split(_dense(cat, 3 * WIDTH, "qkv", bias=False), 3, -1)
        r = _dense(r, WIDTH, "r", bias=False)
        q = q[-qlen:]
        klen = tf.shape(k)[0]
        q = tf.reshape(q, [qlen, bsz, HEADS, head])
        k = tf.reshape(k, [klen, bsz, HEADS, head])
        v = tf.reshape(v, [klen, bsz, HEADS, head])
        r = tf.reshape(r, [rlen, HEADS, head])
        ac = tf.einsum("ibnd,jbnd->ijbn", q + biases[0], k)
        bd = _rel_shift(tf.einsum("ibnd,jnd->ijbn", q + biases[1], r))
        score = (ac + bd) * (1 / head**0.5)
        masked = mask[:, :, None, None]
        score = score * (1 - masked) - 1e30 * masked
        out = tf.einsum("ijbn,jbnd->ibnd", tf.nn.softmax(score, 1), v)
        sizes = tf.shape(out)
        out = _dense(tf.reshape(out, [sizes[0], sizes[1], WIDTH]), WIDTH, "o", bias=False)
        return _xl_norm(out + w)


def _ff(x: Any) -> Any:
    with v1.variable_scope("ff"):
        return _xl_norm(_dense(_dense(x, 2 * WIDTH, "layer_1", activation=tf.nn.relu), WIDTH, "layer_2") + x)


def _xl_mask(qlen: Any, mlen: Any) -> Any:
    ones = tf.ones([qlen, qlen], dtype=TYPE)
    upper = tf.linalg.band_part(ones, 0, -1)
    diagonal = tf.linalg.band_part(ones, 0, 0)
    return tf.concat([tf.zeros([qlen, mlen], dtype=TYPE), upper - diagonal], 1)


def transformer_xl(
    *, length: int | None = LENGTH, memory: bool = True, layers: int = 4, rate: float = 0.02
) -> tuple[Any, Any, Any]:
    """Build language modelling over a segment, time first, with fed memories (batch in dimension 1, as inputs too)."""
    with v1.variable_scope("transformer", use_resource=True):
        inp = v1.placeholder(tf.int32, [None, length], name="inp")
        tgt = v1.placeholder(tf.int32, [None, length], name="tgt")
        mems = [v1.placeholder(TYPE, [MEMORY, None, WIDTH], name=f"mems_{i}") for i in range(layers if memory else 0)]
        dec, targets = tf.transpose(inp), tf.transpose(tgt)
        head = WIDTH // HEADS
        biases = [_variable(name, [HEADS, head]) for name in ("r_w_bias", "r_r_bias")]
        qlen = tf.shape(dec)[0]
        mlen = tf.shape(mems[0])[0] if memory else 0
        klen = qlen + mlen
        table = _variable("lookup_table", [VOCABULARY, WIDTH])
        h = tf.nn.embedding_lookup(table, dec) * WIDTH**0.5
        mask = _xl_mask(qlen, mlen)
        frequency = 1 / (10000 ** (np.arange(0, WIDTH, 2.0) / WIDTH))
        positions = tf.cast(tf.range(klen - 1, -1, -1), TYPE)
        sinusoid = tf.einsum("i,j->ij", positions, tf.constant(frequency))
        embedded = tf.concat([tf.sin(sinusoid), tf.cos(sinusoid)], -1)[:, None, :]
        cuts, kept = [], []
        for layer in range(layers):
            if memory:
                kept.append(tf.stop_gradient(tf.concat([mems[layer], h], 0)[-MEMORY:], name=f"new_mem_{layer}"))
            with v1.variable_scope(f"layer_{layer}"):
                h = _ff(_rel_attention(h, embedded, mask, mems[layer] if memory else None, biases))
                cuts.append(h.op.name)
        bias = _variable("bias", [VOCABULARY], _constant(0))
        logits = tf.einsum("ibd,ed->ibe", h, table) + bias
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))
        loss = tf.identity(loss, name="loss")
        optimizer = v1.train.AdamOptimizer(rate)
        slopes, trained = zip(*optimizer.compute_gradients(loss, v1.trainable_variables()), strict=True)
        clipped, _ = tf.clip_by_global_norm(slopes, 0.25)
        update = optimizer.apply_gradients(zip(clipped, trained, strict=True), v1.train.get_or_create_global_step())
        return (loss, kept), cuts[:-1], update
