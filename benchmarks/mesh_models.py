"""Four models to cut on a model axis, and how a person would cut them: layers, a transformer, images, experts.

All of them train with momentum, so that there are slots. What a person writes is Megatron's for what has matrices,
output channels and then input channels for images, and a block of experts on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Sharding = Mapping[str, Sequence[int]]
"""By regular expression of variables: 0 for the dimension that is cut, 1 for the others."""


@dataclass(frozen=True)
class Model:
    """A model and a sharding of it.

    Attributes:
        loss: makes the loss of a batch.
        shape: of one example.
        sharding: by hand.
        dtype: of the inputs.
    """

    loss: Callable[[Any], Any]
    shape: tuple[int, ...]
    sharding: Sharding
    dtype: str = "float32"

    def item(self, batch: int) -> Any:
        """Return the training step, for a batch of a stated size."""
        import tensorflow as tf

        import autograph_rewrite as ar

        v1 = tf.compat.v1
        graph = tf.Graph()
        with graph.as_default():
            x = v1.placeholder(self.dtype, [batch, *self.shape], name="x")
            loss = tf.identity(self.loss(x), name="loss")
            v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, name="train")
            tf.group(v1.global_variables_initializer(), name="init")
        return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init", batch_inputs={"x": 0})

    def feeds(self, batch: int) -> dict[str, Any]:
        """Return one batch."""
        dice = np.random.default_rng(0)
        if self.dtype == "int32":
            return {"x:0": dice.integers(0, WORDS, size=(batch, *self.shape)).astype(np.int32)}
        return {"x:0": dice.normal(size=(batch, *self.shape)).astype(np.float32)}

    def config(self, data: int, model: int, **more: Any) -> dict[str, Any]:
        """Return the configuration of a mesh on virtual CPUs, cut by hand."""
        entries = [
            {"match": name, "split": [model if one == 0 else 1 for one in dims]} for name, dims in self.sharding.items()
        ]
        devices = [f"CPU:{number}" for number in range(data * model)]
        return {"devices": devices, "mesh": {"data": data, "model": model}, "sharding": entries, **more}


WORDS = 512


def variable(name: str, *shape: int) -> Any:
    """Return a variable of random content, the same in every call."""
    import tensorflow as tf

    seed = sum(map(ord, name)) + sum(shape)
    value = np.random.default_rng(seed).normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)
    return tf.compat.v1.get_variable(name, initializer=value, use_resource=True)


def _layers(x: Any) -> Any:
    """Blocks of two dense layers with biases."""
    import tensorflow as tf

    h, width = x, int(x.shape[-1])
    for i in range(4):
        inner = tf.nn.gelu(h @ variable(f"up{i}", width, 4 * width) + variable(f"bias{i}", 4 * width))
        h = h + inner @ variable(f"down{i}", 4 * width, width)
    return tf.reduce_mean((h - x) ** 2)


def _norm(h: Any) -> Any:
    import tensorflow as tf

    mean = tf.reduce_mean(h, -1, keepdims=True)
    return (h - mean) * tf.math.rsqrt(tf.reduce_mean((h - mean) ** 2, -1, keepdims=True) + 1e-3)


def _attention(h: Any, i: int, heads: int) -> Any:
    import tensorflow as tf

    width = int(h.shape[-1])
    q, k, v = (
        tf.einsum("btd,dhk->bhtk", h, variable(f"{name}{i}", width, heads, width // heads))
        for name in ("query", "key", "value")
    )
    scores = tf.nn.softmax(tf.einsum("bhtk,bhuk->bhtu", q, k) * np.float32((width // heads) ** -0.5))
    mixed = tf.einsum("bhtu,bhuk->bthk", scores, v)
    return tf.einsum("bthk,hkd->btd", mixed, variable(f"output{i}", heads, width // heads, width))


def _transformer(words: Any) -> Any:
    import tensorflow as tf

    width = 64
    h = tf.gather(variable("words", WORDS, width), words)
    for i in range(3):
        h = h + _attention(_norm(h), i, 4)
        h = h + tf.nn.gelu(_norm(h) @ variable(f"up{i}", width, 4 * width)) @ variable(f"down{i}", 4 * width, width)
    logits = tf.reshape(h, [-1, width]) @ variable("head", width, 64)
    wanted = tf.reshape(words, [-1]) % 64
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=wanted, logits=logits))


def _images(x: Any) -> Any:
    """Residual blocks of two convolutions."""
    import tensorflow as tf

    h = tf.nn.conv2d(x, variable("stem", 3, 3, 3, 16), 1, "SAME")
    for i in range(3):
        inner = tf.nn.relu(tf.nn.conv2d(h, variable(f"wide{i}", 3, 3, 16, 64), 1, "SAME") + variable(f"bias{i}", 64))
        h = h + tf.nn.conv2d(inner, variable(f"narrow{i}", 3, 3, 64, 16), 1, "SAME")
    logits = tf.reduce_mean(h, [1, 2]) @ variable("head", 16, 8)
    return tf.reduce_mean(tf.nn.log_softmax(logits) ** 2)


def _experts(x: Any) -> Any:
    """Dense layers, and behind each a mixture of experts that are weighted by a gate."""
    import tensorflow as tf

    h, width, count = x, int(x.shape[-1]), 8
    for i in range(2):
        gate = tf.nn.softmax(h @ variable(f"gate{i}", width, count))
        inner = tf.nn.relu(tf.einsum("bd,edf->ebf", h, variable(f"expert_up{i}", count, width, 2 * width)))
        made = tf.einsum("ebf,efd->ebd", inner, variable(f"expert_down{i}", count, 2 * width, width))
        h = h + tf.einsum("ebd,be->bd", made, gate)
    return tf.reduce_mean((h - x) ** 2)


MODELS: Mapping[str, Model] = {
    "layers": Model(_layers, (128,), {r"up\d": (1, 0), r"down\d": (0, 1)}),
    "transformer": Model(
        _transformer,
        (32,),
        {
            r"(query|key|value)\d": (1, 0, 1),
            r"output\d": (0, 1, 1),
            r"up\d": (1, 0),
            r"down\d": (0, 1),
        },
        dtype="int32",
    ),
    "images": Model(_images, (16, 16, 3), {r"wide\d": (1, 1, 1, 0), r"narrow\d": (1, 1, 0, 1)}),
    "experts": Model(_experts, (64,), {r"expert_up\d": (0, 1, 1), r"expert_down\d": (0, 1, 1)}),
}
"""The models by name."""
