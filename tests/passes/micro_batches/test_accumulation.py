"""Micro-batches: gradients are accumulated over parts of the batch that run one after another, and nothing changes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import ancestors
from tests.support.covering import covering
from tests.support.training import Run, make_item, placeholder, train, variable

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(13, 4)), RNG.normal(size=(13, 2))
W, V = RNG.normal(size=(4, 6)) * 0.3, RNG.normal(size=(6, 2)) * 0.3
FEEDS = [{"x": X[:n], "y": Y[:n]} for n in (12, 13, 5, 2)]
LAYOUTS = ("contiguous", "interleaved")


def perceptron(batch: int | None = None) -> Mapping[str, Any]:
    """Return a mean loss with weight decay, predictions, and the gradient's norm."""
    x, y, w, v = placeholder("x", batch, 4), placeholder("y", batch, 2), variable("w", W), variable("v", V)
    prediction = tf.tanh(x @ w) @ v
    loss = tf.reduce_mean((prediction - y) ** 2) + 0.01 * tf.reduce_sum(w * w)
    return {"loss": loss, "prediction": prediction, "norm": tf.linalg.global_norm(tf.gradients(loss, [w, v]))}


def masked() -> Mapping[str, Any]:
    """Divide by the number of examples that a mask keeps: few of some micro-batches, many of others."""
    x, y, w = placeholder("x", None, 4), placeholder("y", None, 2), variable("w", W[:, :2])
    mask = tf.cast(x[:, 0] > 0.5, x.dtype)
    return {"loss": tf.reduce_sum(mask * tf.reduce_sum((x @ w - y) ** 2, 1)) / (tf.reduce_sum(mask) + 1e-3)}


def contrastive() -> Mapping[str, Any]:
    """Compare every example with every other."""
    x, w = placeholder("x", None, 4), variable("w", W)
    placeholder("y", None, 2)
    z = tf.tanh(x @ w)
    return {"loss": tf.reduce_mean(tf.nn.log_softmax(z @ tf.transpose(z))[:, 0]), "z": z}


def embedding() -> Mapping[str, Any]:
    """Train a few rows of a table, some of them several times, by two rows of ids for each example."""
    x, table = placeholder("x", None, 4), variable("table", W)
    placeholder("y", None, 2)
    ids = tf.reshape(tf.cast(tf.abs(x[:, :2]) * 2, tf.int32) % 4, [-1])
    rows = tf.gather(table, ids)
    return {"loss": tf.reduce_sum(tf.sin(rows)), "rows": rows}


def looped() -> Mapping[str, Any]:
    """Run a loop over the batch."""
    x, w = placeholder("x", None, 4), variable("w", W[:, :4])
    placeholder("y", None, 2)
    state = tf.while_loop(lambda i, _: i < 12, lambda i, s: (i + 1, tf.tanh(s @ w)), [0, x])[1]
    return {"loss": tf.reduce_mean(state**2), "state": state}


def fixed() -> GraphItem:
    """Return the perceptron with a batch of 12 examples."""
    return make_item(lambda: perceptron(12), batch_inputs={"x": 0, "y": 0})


def accumulated(item: GraphItem, micro: int, replicas: int = 1, **how: str) -> GraphItem:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return ar.rewrite(item, {"devices": devices, "microbatches": micro, "accumulation": how})


def used(item: GraphItem, feeds: list[Mapping[str, Any]] = FEEDS) -> list[dict[str, Any]]:
    names = {info.name for info in item.inputs.values()}
    return [{name: value for name, value in feed.items() if name in names} for feed in feeds]


def assert_alike(got: Run, expected: Run, tolerance: float = 1e-9) -> None:
    for step, (a, b) in enumerate(zip(got.fetched, expected.fetched, strict=True)):
        for name, value in b.items():
            np.testing.assert_allclose(a[name], value, tolerance, tolerance, err_msg=f"step {step}: {name}")
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("model", "counts", "layout"),
    covering([perceptron, masked, contrastive, embedding, looped], [(2, 1), (5, 1), (3, 2)], LAYOUTS),
)
def test_accumulated_gradients_are_those_of_the_whole_batch(model: Any, counts: tuple[int, int], layout: str) -> None:
    item, feeds, expected = on_one_device(model)
    assert_alike(train(accumulated(item, *counts, layout=layout), feeds), expected)


@cache
def on_one_device(model: Any) -> tuple[ar.GraphItem, list[dict[str, Any]], Run]:
    item = make_item(model)
    feeds = used(item)
    return item, feeds, train(item, feeds)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_static_size_is_cut_as_one_that_is_open(layout: str) -> None:
    item = fixed()
    assert_alike(train(accumulated(item, 5, layout=layout), FEEDS[:1]), train(item, FEEDS[:1]))


def test_losing_a_micro_batch_would_be_noticed() -> None:
    item = make_item(perceptron)
    expected, short = train(item, FEEDS[:1]), train(item, [{"x": X[:9], "y": Y[:9]}])
    assert np.abs(expected.variables["w"] - short.variables["w"]).max() > 1e-3


def named(graph: Graph, micro: int) -> list[Any]:
    start = f"replica_0/micro_{micro}/"
    return [node for node in graph if node.name.startswith(start) and node.op != "Const" and "gate" not in node.name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [perceptron, masked, embedding])
def test_a_micro_batch_begins_when_the_one_before_it_has_been_added(model: Any, layout: str) -> None:
    graph = accumulated(make_item(model), 3, layout=layout).graph
    sums = {node.name for node in graph if node.op == "AddV2" and node.name.endswith("/with_1")}
    counted = {name for name in sums if not any("Read" in node.op for node in ancestors([graph.nodes[name]]))}
    waiting = [node for node in named(graph, 2) if (sums - counted) <= {n.name for n in ancestors([node])}]
    forward = [node for node in named(graph, 2) if node.op in ("MatMul", "ResourceGather")]
    assert sums - counted or model is embedding
    assert forward
    assert set(forward) <= set(waiting)


def test_only_one_gradient_of_each_variable_is_alive() -> None:
    """The sum is a chain: `w1 + w2` is there, and both are gone, before the third gradient is computed."""
    graph = accumulated(make_item(perceptron), 4).graph
    chains = [node for node in graph if node.name.endswith("/add_n") and node.op == "AddV2"]
    assert len(chains) >= 3
    for node in chains:
        before, term = (value.node for value in node.inputs)
        assert before.name == f"{node.name}/with_2"
        assert term.name.startswith("replica_0/micro_3/")


def test_statistics_of_the_whole_batch_let_all_micro_batches_meet() -> None:
    """Each half of the step is in order; a micro-batch cannot finish before all have begun. The report says so."""
    new = accumulated(make_item(contrastive), 3)
    graph = new.graph
    assert any("all micro-batches meet before it" in note.text for note in new.report.notes)
    assert not accumulated(make_item(perceptron), 3).report.notes
    gates = {node.name for node in graph if node.op == "PlaceholderWithDefault"}
    assert len(gates) >= 2 * 3


def test_a_prediction_alone_needs_no_labels_and_no_gradients() -> None:
    item = make_item(perceptron)
    with accumulated(item, 4).session() as session, item.session() as single:
        for each in (session, single):
            each.run(item.init_op)
        feed = {"x": X}
        expected = single.run("out_prediction", feed)
        np.testing.assert_allclose(session.run("out_prediction", feed), expected, 1e-12)


def test_blocks_of_whole_examples_come_back_in_their_order() -> None:
    """A tensor with two rows per example: `interleaved` must not take them apart."""
    item = make_item(embedding)
    feed = used(item)[0]
    with accumulated(item, 5, layout="interleaved").session() as session, item.session() as single:
        for each in (session, single):
            each.run(item.init_op)
        np.testing.assert_array_equal(session.run("out_rows", feed), single.run("out_rows", feed))


def test_uneven_micro_batches_can_be_refused() -> None:
    item = fixed()
    accumulated(item, 4, uneven="error")
    with pytest.raises(GraphError, match="cannot be divided among 1 x 5"):
        accumulated(item, 5, uneven="error")
    with accumulated(make_item(perceptron), 5, uneven="error").session() as session:
        session.run("init")
        session.run("train", {"x": X[:10], "y": Y[:10]})
        with pytest.raises(GraphError, match="12 examples in 'x' cannot be divided"):
            session.run("train", FEEDS[0])


def test_a_plan_with_micro_batches_is_read_as_it_was_written(tmp_path: Any) -> None:
    item = make_item(perceptron)
    plan = ar.build_plan(item, {"devices": ["CPU:0"], "microbatches": 3, "accumulation": {"layout": "interleaved"}})
    plan.save(tmp_path / "plan.yaml")
    read = ar.Plan.load(tmp_path / "plan.yaml")
    assert read == plan
    assert_alike(train(ar.rewrite(item, read), FEEDS[:1]), train(item, FEEDS[:1]))


def test_verify_compares_with_one_device() -> None:
    report = ar.verify(make_item(perceptron), {"devices": ["CPU:0"], "microbatches": 3}, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("model", "counts", "layout"), covering([perceptron, masked, embedding], [(2, 1), (5, 1), (3, 2)], LAYOUTS)
)
def test_a_loop_accumulates_what_copies_do(model: Any, counts: tuple[int, int], layout: str) -> None:
    item = make_item(model)
    feeds = used(item)
    looped_item = accumulated(item, *counts, layout=layout, form="loop")
    assert_alike(train(looped_item, feeds), train(item, feeds))


def checked() -> Mapping[str, Any]:
    """Check the largest of all numbers, which the message of the check would show."""
    x, w = placeholder("x", None, 4), variable("w", W)
    placeholder("y", None, 2)
    with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), tf.constant(50.0, x.dtype))]):
        return {"loss": tf.reduce_mean((x @ w) ** 2)}


def test_a_loop_leaves_what_a_check_would_show_outside_of_it() -> None:
    item = make_item(checked)
    feeds = used(item)
    assert_alike(train(accumulated(item, 2, form="loop"), feeds), train(item, feeds))
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        train(accumulated(item, 2, form="loop"), [{"x": 100.0 * np.abs(X)}])


def test_the_graph_of_a_loop_is_as_large_for_64_micro_batches_as_for_4() -> None:
    item = make_item(perceptron)
    few, many = (len(accumulated(item, micro, form="loop").graph) for micro in (4, 64))
    assert few == many
    assert many < len(accumulated(item, 64).graph) / 10


def turned() -> Mapping[str, Any]:
    """Add each example to the one that is as far from the other end of the batch."""
    x, y, w = placeholder("x", None, 4), placeholder("y", None, 2), variable("w", W[:, :2])
    return {"loss": tf.reduce_mean(((tf.tanh(x * 2.0) + 0.3 * tf.reverse(tf.tanh(x), [0])) @ w - y) ** 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_no_variable_is_needed_for_are_put_in_order_before_a_loop(layout: str) -> None:
    item = make_item(turned)
    assert_alike(train(accumulated(item, 3, layout=layout, form="loop"), FEEDS), train(item, FEEDS))


def test_a_prediction_is_fetched_from_a_loop_without_labels() -> None:
    item = make_item(perceptron)
    with accumulated(item, 4, form="loop").session() as session, item.session() as single:
        for each in (session, single):
            each.run(item.init_op)
        expected = single.run("out_prediction", {"x": X})
        np.testing.assert_allclose(session.run("out_prediction", {"x": X}), expected, 1e-12)
