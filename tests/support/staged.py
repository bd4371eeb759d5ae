"""Models that are cut into stages, with Adam, every gradient an output: what a pipeline has to leave as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite import GraphItem

v1 = tf.compat.v1
BATCH = 8
Forward = Callable[[], tuple[Any, list[str]]]
"""Returns the loss and the tensors that three boundaries can lie behind."""


def values(*shape: int, scale: float = 0.5, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=shape) * scale


def variable(name: str, value: Any) -> Any:
    return v1.get_variable(name, initializer=np.asarray(value), use_resource=True)


def inputs(*shape: int, dtype: Any = tf.float64) -> Any:
    return v1.placeholder(dtype, (None, *shape), name="x")


def mlp() -> tuple[Any, list[str]]:
    """Four layers and weight decay of the first."""
    h, cuts = inputs(6), []
    for i in range(4):
        h = tf.tanh(h @ variable(f"w{i}", values(6, 6, seed=i)) + variable(f"b{i}", values(6)), name=f"h{i}")
        cuts.append(h.op.name)
    decay = 0.01 * tf.reduce_sum(v1.trainable_variables()[0] ** 2)
    return tf.reduce_mean((h - 1) ** 2) + decay, cuts[:3]


def skipping() -> tuple[Any, list[str]]:
    """Layers that also read what lies two layers back."""
    h = before = inputs(6)
    cuts = []
    for i in range(4):
        h, before = tf.add(tf.tanh(h @ variable(f"w{i}", values(6, 6, seed=i))), before, name=f"h{i}"), h
        cuts.append(h.op.name)
    return tf.reduce_sum(tf.sin(h)), cuts[:3]


def tied() -> tuple[Any, list[str]]:
    """A language model whose first and last stage share their table, with the token after each as its label."""
    ids = inputs(5, dtype=tf.int32)
    table = variable("table", values(7, 4))
    h, cuts = tf.gather(table, ids), []
    for i in range(3):
        h = tf.tanh(tf.einsum("bsd,de->bse", h, variable(f"w{i}", values(4, 4, seed=i))), name=f"h{i}")
        cuts.append(h.op.name)
    logits = tf.einsum("bsd,vd->bsv", h, table)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids, tf.roll(logits, 1, 1))), cuts


def dropout() -> tuple[Any, list[str]]:
    """Layers with dropout: each micro-batch has its rows of the mask that the whole batch would have."""
    h, cuts = inputs(6), []
    for i in range(4):
        h = tf.tanh(h @ variable(f"w{i}", values(6, 6, seed=i)))
        h = tf.identity(tf.nn.dropout(h, 0.4, seed=i + 1), name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean(h**2), cuts[:3]


def masked() -> tuple[Any, list[str]]:
    """A mean over the examples that a mask keeps, which are few in some micro-batches and many in others."""
    x = inputs(6)
    h, cuts = x, []
    for i in range(4):
        h = tf.tanh(h @ variable(f"w{i}", values(6, 6, seed=i)), name=f"h{i}")
        cuts.append(h.op.name)
    mask = tf.cast(x[:, 0] > 0.3, x.dtype)
    return tf.reduce_sum(mask * tf.reduce_sum(h**2, 1)) / (tf.reduce_sum(mask) + 0.1), cuts[:3]


def references() -> tuple[Any, list[str]]:
    """Layers whose variables are references, as TensorFlow 1 made them."""
    h, cuts = inputs(6), []
    for i in range(4):
        w = v1.get_variable(f"w{i}", initializer=values(6, 6, seed=i), use_resource=False)
        h = tf.tanh(h @ w, name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean((h - 1) ** 2), cuts[:3]


def convolutions() -> tuple[Any, list[str]]:
    """Sixteen convolutions of one channel, all weights 0.1, as lingvo's GPipe test has them."""
    h, cuts = inputs(8, 8, 1, dtype=tf.float32), []
    for i in range(16):
        w = variable(f"w{i}", np.full((3, 3, 1, 1), 0.1, np.float32))
        h = tf.nn.relu(tf.nn.conv2d(h, w, 1, "SAME"), name=f"h{i}")
        cuts.append(h.op.name)
    return tf.reduce_mean(h), [cuts[3], cuts[7], cuts[11]]


MODELS: Mapping[str, Forward] = {
    "mlp": mlp,
    "skipping": skipping,
    "tied": tied,
    "dropout": dropout,
    "masked": masked,
    "references": references,
}


def staged_item(
    forward: Forward, *, rate: float = 0.05, batch_inputs: dict[str, int] | None = None
) -> tuple[GraphItem, list[str]]:
    """Return the item of a model with Adam, and where it can be cut into four stages.

    Its outputs are the loss and each gradient, by the name of its variable.
    """
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(1)
        loss, cuts = forward()
        loss = tf.identity(loss, name="loss")
        trained = v1.trainable_variables()
        # As `Optimizer.minimize` does. Without gates the update of a reference variable races with the MatMul of the
        # gradient that goes on to the layer before: a read of a reference is no copy.
        gated = any("_ref" in w.dtype.name for w in trained)
        slopes = [tf.convert_to_tensor(slope) for slope in v1.gradients(loss, trained, gate_gradients=gated)]
        names = [f"slope_{w.op.name}" for w in trained]
        slopes = [tf.identity(slope, name=name) for slope, name in zip(slopes, names, strict=True)]
        step = v1.train.get_or_create_global_step()
        updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            v1.train.AdamOptimizer(rate).apply_gradients(zip(slopes, trained, strict=True), step, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(
        graph, train_op="train", outputs=["loss", *names], init_op="init", batch_inputs=batch_inputs
    )
    return item, cuts


def feed(item: GraphItem, step: int, batch: int = BATCH) -> dict[str, Any]:
    """Return the examples of one step."""
    (info,) = (info for info in item.inputs.values() if info.batch_axis is not None)
    rng = np.random.default_rng([step, batch])
    shape = (batch, *(size or 1 for size in (info.shape or ())[1:]))
    return {"x": rng.integers(0, 7, shape) if info.dtype == "int32" else rng.normal(size=shape)}


def train(item: GraphItem, feeds: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the outputs of each step, and all variables at the end."""
    names = list(item.outputs)
    with item.session() as session:
        session.run(item.init_op)
        outputs = []
        for given in feeds:
            got = session.run([*names, "train"], given, timeout_ms=60000)
            outputs.append(dict(zip(names, got[:-1], strict=True)))
        return outputs, session.read_variables()


def assert_alike(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Compare what `train` returned."""
    for step, (a, b) in enumerate(zip(got[0], expected[0], strict=True)):
        for name in b:
            np.testing.assert_allclose(a[name], b[name], tolerance, tolerance, err_msg=f"step {step}: {name}")
    for name in expected[1]:
        np.testing.assert_allclose(got[1][name], expected[1][name], tolerance, tolerance, err_msg=name)
