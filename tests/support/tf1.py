"""Compare TensorFlow 1 graphs, reference variables included, on one device and distributed: fetches and variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite import GraphItem
from tests.support.training import distributed, v1

F64 = tf.float64
MODES = (("shared", 2), ("mirrored", 3))
Built = tuple[Any, list[Any]]


@contextmanager
def as_in_tensorflow_1() -> Iterator[None]:
    """Build loops, branches and variables as TensorFlow 1 did."""
    v1.disable_control_flow_v2()
    v1.disable_resource_variables()
    try:
        yield
    finally:
        v1.enable_control_flow_v2()
        v1.enable_resource_variables()


def variable(name: str, value: Any, *, reference: bool = True, **options: Any) -> Any:
    """Make a variable, by default a legacy one."""
    return v1.get_variable(name, initializer=np.asarray(value, np.float64), use_resource=not reference, **options)


def regression(*, reference: bool = True) -> tuple[Any, Any, Any]:
    """Return the input, the weights and the loss of a small model."""
    x = v1.placeholder(F64, [None, 3], "x")
    w = variable("w", np.linspace(0.5, 1, 6).reshape(3, 2), reference=reference)
    return x, w, tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, w))))


def descent(loss: Any, **options: Any) -> Any:
    """Return a train op."""
    return v1.train.GradientDescentOptimizer(0.1).minimize(loss, **options)


def feeds() -> list[dict[str, Any]]:
    """Return batches that no number of replicas divides evenly."""
    random = np.random.default_rng(0)
    return [{"x:0": random.normal(size=(rows, 3))} for rows in (5, 4, 7)]


def assert_as_tensorflow(build: Callable[[], Built], batches: Sequence[Mapping[str, Any]] | None = None) -> GraphItem:
    """Train what `build` returns, a train op and fetches, in a v1 Session and over replicas; return the last item."""
    with tf.Graph().as_default() as graph, as_in_tensorflow_1():
        train, fetches = build()
        variables = v1.global_variables() + v1.local_variables()
        tf.group(v1.variables_initializer(variables, name="all"), name="init")
        values = {one.op.name: one for one in variables}
    item = GraphItem.from_graph(graph, train_op=train, outputs=fetches, init_op="init")
    batches = batches or feeds()
    with v1.Session(graph=graph) as session:
        session.run("init")
        expected = [[np.array(one) for one in session.run([fetches, train], feed)[0]] for feed in batches]
        learnt = session.run(values)
    for mode, replicas in MODES:
        new = distributed(item, mode, replicas)
        with new.session() as session:
            session.run("init")
            for step, feed in enumerate(batches):
                got = session.run([fetches, train], feed, timeout_ms=30000)[0]
                for fetch, a, b in zip(fetches, got, expected[step], strict=True):
                    np.testing.assert_allclose(a, b, 1e-9, 1e-9, err_msg=f"{mode}, step {step}: {fetch.name}")
            for name, value in session.read_variables(learnt).items():
                np.testing.assert_allclose(value, learnt[name], 1e-9, 1e-9, err_msg=f"{mode}: {name}")
    return new
