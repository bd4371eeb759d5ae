"""A late read sees the value from before the step, whatever reads; tests/cases/order-accesses has what is ordered."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite import GraphItem
from tests.support.training import MODES, control_flow, distributed, placeholder, train, v1, variable

X = np.random.default_rng(0).normal(size=(6, 3))


def late_read(how: str) -> GraphItem:
    """Read a variable late in the step, whose update waits for nothing."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(1):
        x, w = placeholder("x", None, 3), variable("w", np.ones(3))
        optimizer = v1.train.MomentumOptimizer(1.0, 0.5)
        v1.train.get_or_create_global_step()
        tf.group(optimizer.apply_gradients([(tf.reduce_sum(x, 0), w)]), name="train")
        count, _ = tf.while_loop(lambda i, _: i < 30_000, lambda i, j: (i + 1, j), [0, 0], parallel_iterations=1)
        index = count - 30_000
        slot = optimizer.get_slot(w, "momentum")
        reads = {"slot": lambda: slot.read_value() + 1.0, "read": w.read_value}
        reads |= {"gather": lambda: tf.gather(w, index), "gather_nd": lambda: w.gather_nd([index])}
        with tf.control_dependencies([index]):
            tf.identity(reads[how](), name="out_seen")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["out_seen"], init_op="init")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["read", "gather", "gather_nd", "slot"])
def test_a_late_read_sees_the_value_from_before_the_step(how: str, mode: str) -> None:
    result = train(distributed(late_read(how), mode), [{"x": X}])
    (seen,) = (step["seen"] for step in result.fetched)
    np.testing.assert_array_equal(seen, np.ones_like(seen))
    np.testing.assert_allclose(result.variables["w"], 1 - X.sum(0))
