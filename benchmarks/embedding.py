"""A model whose variables are one large table, of which a step touches one row in a hundred: as a graph, and by hand.

    ids [examples, 10] ──► rows of the table [1,000,000, 32] ──► mean ──► 64 units ──► one logit        Adagrad

The same sums in every framework: the loss is added up over the examples of all workers and divided by their number,
rows that are named several times are added up before the table is updated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

WIDTH, UNITS, LOOKUPS, RATE, START = 32, 64, 10, 0.05, 0.1


@dataclass(frozen=True)
class Size:
    """How large the model is.

    Attributes:
        rows: of the table.
        examples: of all workers together; each names LOOKUPS rows.
    """

    rows: int
    examples: int


def size(tiny: bool) -> Size:
    """Return the size of the measured model, or of one that only shows that the benchmark works."""
    return Size(200, 12) if tiny else Size(1_000_000, 1_000)


def batch(of: Size, worker: int, workers: int) -> tuple[Any, Any]:
    """Return ids and labels of one worker's part of the batch."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, of.rows, (of.examples, LOOKUPS)).astype(np.int32)
    labels = rng.integers(0, 2, (of.examples, 1)).astype(np.float32)
    part = slice(of.examples * worker // workers, of.examples * (worker + 1) // workers)
    return ids[part], labels[part]


def shapes(of: Size) -> dict[str, tuple[int, int]]:
    """Return the shapes of the variables by name."""
    return {"table": (of.rows, WIDTH), "hidden": (WIDTH, UNITS), "head": (UNITS, 1)}


def initial(shape: tuple[int, int], seed: int) -> Any:
    """Return the initial value of a variable, the same in all processes."""
    import tensorflow as tf

    return 0.1 * tf.random.stateless_normal(shape, [seed, 7])


def loss(weights: Any, ids: Any, labels: Any, of: Size) -> Any:
    """Return the sum of the losses of some examples, divided by the number of all."""
    import tensorflow as tf

    table, hidden, head = weights
    pooled = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
    logits = tf.nn.relu(pooled @ hidden) @ head
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)) / of.examples


def variables(of: Size) -> list[Any]:
    """Make the variables; call it where they are to be."""
    import tensorflow as tf

    return [tf.Variable(initial(shape, i), name=name) for i, (name, shape) in enumerate(shapes(of).items())]


def graph(of: Size) -> Any:
    """Return the training graph: inputs `ids` and `labels`, output `loss`, train op `train`, initialiser `init`."""
    import tensorflow as tf

    v1 = tf.compat.v1
    made = tf.Graph()
    with made.as_default():
        ids = v1.placeholder(tf.int32, [None, LOOKUPS], name="ids")
        labels = v1.placeholder(tf.float32, [None, 1], name="labels")
        weights = [
            v1.get_variable(name, initializer=initial(shape, i), use_resource=True)
            for i, (name, shape) in enumerate(shapes(of).items())
        ]
        total = tf.identity(loss(weights, ids, labels, of), name="loss")
        v1.train.AdagradOptimizer(RATE, START).minimize(total, name="train")
        v1.global_variables_initializer()
    return made


def item(of: Size) -> Any:
    """Return the graph with its training signature."""
    import autograph_rewrite as ar

    return ar.GraphItem.from_graph(
        graph(of), train_op="train", outputs=["loss"], init_op="init", batch_inputs={"ids": 0, "labels": 0}
    )


def train(weights: Any, optimizer: Any, data: tuple[Any, Any], of: Size) -> Any:
    """Update the variables once, with an optimizer of `tf.compat.v1.train`; return the loss."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        total = loss(weights, *data, of)
    optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
    return total
