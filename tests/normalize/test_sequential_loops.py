"""Random ops in loops draw in the order of the iterations, however many iterations may run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from tests.support.training import control_flow, distributed, placeholder, v1, variable

FEED = {"x:0": np.random.default_rng(0).normal(size=(5, 8, 3))}
Step = Callable[[Any, Any], Any]


def summed(draw: Step, steps: Any, w: Any, parallel: int, count: int = 8) -> Any:
    """Add up what `draw(i, product)` makes of each step, in a loop."""
    start = [tf.constant(0), tf.zeros_like(steps[0])]
    return v1.while_loop(
        lambda i, _: i < count,
        lambda i, total: (i + 1, total + draw(i, tf.matmul(steps[i], w))),
        start,
        parallel_iterations=parallel,
    )[1]


def uniform(like: Any) -> Any:
    return tf.random.uniform(tf.shape(like), dtype=tf.float64)


def two_draws(steps: Any, w: Any, parallel: int) -> Any:
    return summed(lambda _, h: v1.nn.dropout(h, rate=0.4) + uniform(h) * h, steps, w, parallel)


def in_a_branch(steps: Any, w: Any, parallel: int) -> Any:
    return summed(
        lambda i, h: tf.cond(tf.equal(i % 2, 0), lambda: uniform(steps[0]) * h, lambda: h), steps, w, parallel
    )


def in_an_inner_loop(steps: Any, w: Any, parallel: int) -> Any:
    def inner(i: Any, h: Any) -> Any:
        return h * summed(lambda j, _: uniform(steps[0]) * tf.cast(i + j, h.dtype), steps, w, parallel, 3)

    return summed(inner, steps, w, parallel, 4)


def mapped(steps: Any, w: Any, parallel: int) -> Any:
    def one(step: Any) -> Any:
        return v1.nn.dropout(tf.matmul(step, w), rate=0.4)

    return tf.reduce_sum(v1.map_fn(one, steps, parallel_iterations=parallel), 0)


def built(forward: Callable[[Any, Any, int], Any], parallel: int, version: int) -> tuple[Any, str]:
    with tf.Graph().as_default() as graph, control_flow(version):
        v1.set_random_seed(3)
        x, w = placeholder("x", None, 8, 3), variable("w", np.linspace(0.1, 0.5, 9).reshape(3, 3))
        loss = tf.reduce_mean(tf.square(forward(tf.transpose(x, [1, 0, 2]), w, parallel)))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.group(v1.global_variables_initializer(), name="init_all")
    return graph, loss.name


def losses(session: Any, loss: str) -> list[float]:
    session.run("init_all")
    return [float(session.run([loss, "train"], FEED)[0]) for _ in range(3)]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("forward", [two_draws, in_a_branch, in_an_inner_loop, mapped])
def test_each_iteration_gets_the_draw_that_it_gets_when_iterations_run_one_by_one(
    forward: Callable[[Any, Any, int], Any], version: int
) -> None:
    graph, loss = built(forward, 1, version)
    with v1.Session(graph=graph) as session:
        expected = losses(session, loss)
    graph, loss = built(forward, 32, version)
    item = GraphItem.from_graph(graph, train_op="train", outputs=[loss], init_op="init_all")
    enters = {n.attr("parallel_iterations") for n in normalise(item).graph if n.op == "Enter" and "grad" not in n.name}
    assert enters == {1}
    for mode, replicas in (("shared", 2), ("mirrored", 3)):
        with distributed(item, mode, replicas).session() as session:
            np.testing.assert_allclose(losses(session, loss), expected, 1e-9, err_msg=mode)
