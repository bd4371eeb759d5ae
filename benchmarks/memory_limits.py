"""Models and the memory of a device in which plain AllReduce has no room for them: what Auto has to fit.

    wide     variables and their moments       2 devices
    deep     activations of 12 blocks          2 devices
    mixed    an embedding table and 8 blocks   4 devices
    narrow   the variables of wide, few examples: only a model axis fits        2 devices

The first three and their limits were fixed before Auto knew of a limit, from the simulated peak of AllReduce alone:
about 0.75 (wide), 0.35 (deep) and 0.5 (mixed) of the smaller of its peaks with shared and with mirrored variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.mesh_models import variable

MIB = 2**20
HANDS: tuple[Mapping[str, Any], ...] = (
    {},
    *({"microbatches": count} for count in (2, 4)),
    *({"remat": {"policy": policy}} for policy in ("sqrt", "save_matmuls")),
    {"microbatches": 2, "remat": {"policy": "sqrt"}},
)
"""What a person writes beside the name of a builder, and with `pipeline` in the place of micro-batches."""


@dataclass(frozen=True)
class Limited:
    """A model and the memory that it has.

    Attributes:
        build: makes its loss of a batch.
        devices: how many there are.
        limit: bytes of each.
        batch: examples of all replicas together.
        shape: of one example.
    """

    build: Callable[[Any], Any]
    devices: int
    limit: int
    batch: int
    shape: tuple[int, ...]

    def item(self) -> Any:
        """Return the training step: Adam, and a batch of a stated size."""
        import tensorflow as tf

        import autograph_rewrite as ar

        v1 = tf.compat.v1
        graph = tf.Graph()
        with graph.as_default():
            kind = tf.int32 if self.build is _mixed else tf.float32
            x = v1.placeholder(kind, [self.batch, *self.shape], name="x")
            loss = tf.identity(self.build(x), name="loss")
            v1.train.AdamOptimizer(0.001).minimize(loss, name="train")
            tf.group(v1.global_variables_initializer(), name="init")
        return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init", batch_inputs={"x": 0})

    def feeds(self) -> dict[str, Any]:
        """Return one batch."""
        dice = np.random.default_rng(0)
        if self.build is _mixed:
            return {"x:0": dice.integers(0, WORDS, size=(self.batch, *self.shape)).astype(np.int32)}
        return {"x:0": dice.normal(size=(self.batch, *self.shape)).astype(np.float32)}


WORDS = 4096


def _wide(x: Any) -> Any:
    import tensorflow as tf

    h = x
    for i, (inner, outer) in enumerate(((512, 1024), (1024, 1024), (1024, 1024), (1024, 512))):
        h = tf.nn.relu(h @ variable(f"w{i}", inner, outer))
    return tf.reduce_mean((h - x) ** 2)


def _block(h: Any, i: int, heads: int) -> Any:
    """Return a block of attention and two dense layers, each behind a layer normalisation."""
    import tensorflow as tf

    _, time, width = h.shape

    def norm(h: Any) -> Any:
        mean = tf.reduce_mean(h, -1, keepdims=True)
        return (h - mean) * tf.math.rsqrt(tf.reduce_mean((h - mean) ** 2, -1, keepdims=True) + 1e-3)

    with tf.name_scope(f"block_{i}"):
        q, k, v = tf.unstack(
            tf.einsum("btd,dchk->cbhtk", norm(h), variable(f"qkv{i}", width, 3, heads, width // heads))
        )
        attention = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * np.float32((width // heads) ** -0.5))
        mixed = tf.transpose(tf.matmul(attention, v), [0, 2, 1, 3])
        h = h + tf.reshape(mixed, [-1, time, width]) @ variable(f"out{i}", width, width)
        return h + tf.nn.gelu(norm(h) @ variable(f"up{i}", width, 4 * width)) @ variable(f"down{i}", 4 * width, width)


def _deep(x: Any) -> Any:
    import tensorflow as tf

    h = x
    for i in range(12):
        h = _block(h, i, 4)
    return tf.reduce_mean((h - x) ** 2)


def _mixed(x: Any) -> Any:
    import tensorflow as tf

    width = 128
    h = tf.gather(variable("words", WORDS, width), x)
    for i in range(8):
        h = _block(h, i, 4)
    logits = tf.reshape(h, [-1, width]) @ variable("head", width, 256)
    wanted = tf.reshape(x, [-1]) % 256
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=wanted, logits=logits))


LIMITED: Mapping[str, Limited] = {
    "wide": Limited(_wide, 2, 32 * MIB, 128, (512,)),
    "deep": Limited(_deep, 2, 36 * MIB, 32, (64, 64)),
    "mixed": Limited(_mixed, 4, 27 * MIB, 32, (32,)),
    "narrow": Limited(_wide, 2, 25 * MIB, 16, (512,)),
}
"""The models by name."""
