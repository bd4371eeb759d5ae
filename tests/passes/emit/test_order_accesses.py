"""Reads, updates and assignments of one variable keep their order in shards, on servers and on replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, Select
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.order_accesses import access_order, order_accesses
from tests.support.training import placeholder, v1, variable

RNG = np.random.default_rng(0)
STRATEGIES = ("FSDP", "PartitionedPS", "PartitionedAR", "PS", "PSLoadBalancing", "AllReduce")
ORDERS = tuple("".join(order) for order in itertools.permutations("fadsr") if order.index("f") < order.index("a"))
"""In which order a step computes a gradient (f), applies it (a), decays (d), scales (s) and reads (r) a variable."""


class Accesses:
    """Accesses to a variable, dense or by rows, each of which waits for the one before it."""

    def __init__(self, *, sparse: bool) -> None:
        self.sparse = sparse
        rows = 6 if sparse else 4
        self.x = placeholder("x", None, dtype=tf.int64) if sparse else placeholder("x", None, rows)
        self.w = variable("w", RNG.normal(size=(rows, 4)))
        self.reads: list[Any] = []
        self.gradient: Any = None

    def f(self) -> Any:
        w = self.w.read_value() if not self.sparse else self.w
        h = tf.nn.embedding_lookup(w, self.x) if self.sparse else self.x @ w
        loss = tf.reduce_mean(tf.square(tf.tanh(h) - 1))
        self.gradient = v1.gradients(loss, [w])[0]
        return tf.identity(loss, name="loss")

    def a(self) -> Any:
        return v1.train.GradientDescentOptimizer(0.5).apply_gradients([(self.gradient, self.w)])

    def d(self) -> Any:
        if self.sparse:
            return self.w.scatter_sub(tf.IndexedSlices(tf.ones([2, 4], tf.float64), tf.constant([1, 4])))
        return v1.assign_sub(self.w, 0.1 * self.w.read_value())

    def s(self) -> Any:
        return self.w.assign(0.5 * self.w.read_value() + 0.25)

    def r(self) -> Any:
        self.reads.append(tf.reduce_sum(self.w.read_value() ** 2, name="seen"))
        return self.reads[-1]


def step(order: str, *, sparse: bool) -> ar.GraphItem:
    """Return a step that makes its accesses in an order that control edges alone give."""
    with tf.Graph().as_default() as graph:
        accesses = Accesses(sparse=sparse)
        last: list[Any] = []
        for one in order:
            with tf.control_dependencies(last):
                last = [getattr(accesses, one)()]
        tf.group(last, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss", "seen"], init_op="init")


def feeds(*, sparse: bool, steps: int = 2) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [{"x": random.integers(0, 6, 7) if sparse else random.normal(size=(7, 4))} for _ in range(steps)]


def trained(item: ar.GraphItem, given: Sequence[dict[str, Any]]) -> list[Any]:
    with item.session() as session:
        session.run("init")
        fetched = [session.run(["loss", "seen", "train"], feed, timeout_ms=20000)[:2] for feed in given]
        return [*np.ravel(fetched), *np.ravel(session.read_variable("w"))]


def errors(order: str, *, sparse: bool, strategies: Sequence[str] = STRATEGIES) -> Iterator[tuple[str, float]]:
    """Yield how far each strategy is from one device."""
    item, given = step(order, sparse=sparse), feeds(sparse=sparse)
    expected = trained(item, given)
    for name, mode in itertools.product(strategies, ("shared", "mirrored")):
        new = ar.rewrite(item, {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": name, "variables": mode}})
        yield f"{name} {mode}", float(np.abs(np.subtract(trained(new, given), expected)).max())


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("order", ["dfrsa", "fdars"])
def test_accesses_that_control_edges_order_see_what_they_see_on_one_device(order: str, sparse: bool) -> None:
    assert [(name, error) for name, error in errors(order, sparse=sparse) if not error < 1e-9] == []


def test_the_orders_differ_in_what_they_compute() -> None:
    found = {tuple(np.round(trained(step(order, sparse=False), feeds(sparse=False)), 6)) for order in ORDERS[:6]}
    assert len(found) > 4


@pytest.mark.parametrize("strategy", ["FSDP", "PartitionedPS"])
def test_a_gradient_that_only_begins_behind_an_update_is_applied_behind_it(strategy: str) -> None:
    with tf.Graph().as_default() as graph:
        x = placeholder("x", None, 3)
        variables = [variable("w", RNG.normal(size=(3, 4))), variable("u", RNG.normal(size=(4, 2)))]
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ variables[0]) @ variables[1]), name="loss")
        with tf.control_dependencies([loss]):
            decays = [v1.assign_sub(v, 0.1 * v.read_value()) for v in variables]
        with tf.control_dependencies(decays):
            gradients = v1.gradients(loss, variables)  # reads the weights as they were in the forward pass
            optimizer = v1.train.GradientDescentOptimizer(0.5)
            optimizer.apply_gradients(zip(gradients, variables, strict=True), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    item = ar.GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")
    given = {"x": RNG.normal(size=(7, 3))}
    found = []
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy, "variables": "mirrored"}}
    for one in (item, ar.rewrite(item, config)):
        with one.session() as session:
            session.run("init")
            session.run("train", given)
            found.append([session.read_variable(name) for name in ("w", "u")])
    for expected, actual in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_function_keeps_the_order_of_its_program(strategy: str) -> None:
    w = tf.Variable(RNG.normal(size=(4, 4)))
    start = w.numpy()

    def step(x: Any) -> Any:
        w.assign_sub(0.1 * w)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ w)))
        before = tf.reduce_sum(w**2)
        w.assign_sub(0.5 * tape.gradient(loss, w))
        w.assign(0.5 * w + 0.25)
        return before + tf.reduce_sum(w**3)

    x = tf.constant(RNG.normal(size=(7, 4)))
    found = []
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": strategy, "variables": "mirrored"}}
    new = ar.distribute(step, config, tf.TensorSpec([None, 4], tf.float64))
    for run in (tf.function(step), new):
        w.assign(start)
        found.append([float(run(x)), float(run(x)), *np.ravel(w.numpy())])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


def written_twice(between: Callable[[Graph, Value], Value]) -> tuple[Graph, Node, Node, Node]:
    """Return a graph in which a variable is written, and written again behind a path from the first update."""
    graph = Graph()
    one = graph.add("Const", name="one", attrs={"value": 1.0, "dtype": dtypes.FLOAT}).output()
    w = graph.add("VarHandleOp", name="w", attrs={"dtype": dtypes.FLOAT, "shape": (), "shared_name": "w"}).output()
    first = graph.add("AssignAddVariableOp", [w, one], name="first")
    value = graph.add("Neg", [one], name="behind", controls=[first]).output()
    then = graph.add("AssignSubVariableOp", [w, between(graph, value)], name="then")
    train = graph.add("NoOp", name="train", controls=[first, then])
    return graph, first, then, train


def test_an_order_that_a_pass_has_lost_is_added() -> None:
    graph, first, then, train = written_twice(lambda _, value: value)
    recorded = access_order(graph, [train])
    then.set_input(1, graph.node("one").output())  # as a size that turns out to be a constant
    assert order_accesses(graph, recorded) == 1
    assert first in then.controls
    assert order_accesses(graph, recorded) == 0


def test_an_order_of_the_first_replica_says_nothing_about_the_others() -> None:
    graph, first, then, train = written_twice(lambda _, value: value)
    recorded = access_order(graph, [train])
    for node in (first, graph.node("w"), graph.node("behind")):
        node.span = EACH
    then.set_input(0, graph.node("w").output(), Select.FIRST)
    then.set_input(1, graph.node("behind").output(), Select.FIRST)
    assert order_accesses(graph, recorded) == 1
    assert first in then.controls


def test_an_order_that_a_pass_has_turned_round_is_refused() -> None:
    graph, first, then, train = written_twice(lambda _, value: value)
    recorded = access_order(graph, [train])
    graph.node("behind").remove_control(first)
    first.add_control(then)
    with pytest.raises(VerifyError, match="'then' would come before 'first'"):
        order_accesses(graph, recorded)
