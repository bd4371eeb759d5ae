"""Rematerialisation: what is computed again is what it was, in time, once per gradient, and less is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import autograph_rewrite as ar
from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.passes import rematerialize
from benchmarks.cost import allocated, traced
from benchmarks.remat import Built
from tests.support.recomputed import chain, executed, feeds, residual, second_order, transformer, two_losses
from tests.support.rewriting import run_pipeline
from tests.support.training import make_item, placeholder, train, v1, variable

ONE, TWO = {"devices": ["CPU:0"]}, {"devices": ["CPU:0", "CPU:1"]}
MIRRORED = {**TWO, "strategy": {"variables": "mirrored"}}
MICRO = {**ONE, "microbatches": 3}
LOOP = {**MICRO, "accumulation": {"form": "loop"}}
SQRT, EVERY, MATMULS = {"policy": "sqrt"}, {"policy": "every:2"}, {"policy": "save_matmuls"}
BLOCKS = {"policy": "scopes", "scopes": [r"(block|unit|layer)_\d+"]}
SMALL = feeds((4,), (4,))
MODELS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "chain": (chain(), SMALL),
    "transformer": (transformer(), feeds((5, 8), (5, 8))),
    "residual": (residual, feeds((5, 5, 3), (3,))),
    "two_losses": (two_losses, SMALL),
    "second_order": (second_order, SMALL),
}


def rewritten(item: ar.GraphItem, config: Mapping[str, Any], remat: Mapping[str, Any]) -> ar.GraphItem:
    """Rewrite an item under the eyes of the certificate."""
    certificate = Certificate(strict=True)
    config = {**config, "remat": remat}
    plan = ar.build_plan(item, config)
    run_pipeline(normalise(item), plan, certificate=certificate)
    return ar.rewrite(item, config)


def assert_same(item: ar.GraphItem, new: ar.GraphItem, given: list[dict[str, Any]], tolerance: float = 1e-12) -> None:
    expected, got = train(item, given), train(new, given)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, tolerance, tolerance, err_msg=name)
    for a, b in zip(got.fetched, expected.fetched, strict=True):
        for name, value in b.items():
            np.testing.assert_allclose(a[name], value, tolerance, tolerance, err_msg=name)


POLICIES = [
    *(("chain", remat) for remat in (SQRT, EVERY, MATMULS, BLOCKS)),
    *(("transformer", remat) for remat in (SQRT, BLOCKS)),
    *(("residual", remat) for remat in (EVERY, BLOCKS)),
    *(("two_losses", remat) for remat in (SQRT, MATMULS)),
    *(("second_order", remat) for remat in (EVERY, MATMULS)),
]
"""The last two have no scopes that could be cut at."""


@pytest.mark.parametrize(("name", "remat"), POLICIES, ids=[f"{name}-{remat['policy']}" for name, remat in POLICIES])
def test_every_policy_trains_to_the_same_variables_on_one_device(name: str, remat: Mapping[str, Any]) -> None:
    forward, given = MODELS[name]
    item = make_item(forward)
    new = rewritten(item, ONE, remat)
    assert_same(item, new, given)
    if name != "second_order":  # its loss is made of gradients, too
        assert bool(new.report.recomputed.segments) != ((name, remat["policy"]) in NOTHING)


NOTHING = {(name, "save_matmuls") for name in ("chain", "two_losses")}
"""Every product is followed by one function whose result is as large: keeping it for that would save nothing."""


@pytest.mark.parametrize(
    ("name", "config"),
    [*(("chain", config) for config in (TWO, MIRRORED, MICRO, LOOP)), ("transformer", MIRRORED), ("transformer", LOOP)],
)
def test_replicas_and_micro_batches_have_copies_of_their_own(name: str, config: Mapping[str, Any]) -> None:
    forward, given = MODELS[name]
    item = make_item(forward)
    new = rewritten(item, config, SQRT)
    assert_same(item, new, given)
    names = [node.name for node in new.graph if "remat/" in node.name and node.op == "MatMul"]
    per_graph = len([n for s in new.report.recomputed.segments for n in s.nodes if n.endswith("matmul")])
    if name == "chain":
        assert len(names) == per_graph * (1 if config is LOOP else new.report.plan.instances)


def test_statistics_of_the_whole_batch_are_summed_once() -> None:
    item = make_item(residual)
    plain, new = ar.rewrite(item, TWO), rewritten(item, TWO, BLOCKS)
    assert_same(item, new, feeds((5, 5, 3), (3,)))
    assert [(edge.value, edge.to) for edge in new.report.edges if edge.owner == "step"] == [
        (edge.value, edge.to) for edge in plain.report.edges if edge.owner == "step"
    ]


@pytest.mark.parametrize("config", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("dropout", ["stateful", "stateless"])
def test_masks_of_dropout_are_kept_which_have_fewer_bytes_than_what_is_drawn(
    dropout: str, config: Mapping[str, Any]
) -> None:
    item = make_item(transformer(2, dropout))
    new = rewritten(item, config, BLOCKS)
    assert_same(item, new, feeds((5, 8), (5, 8)))
    made = {node.op for node in new.graph if "remat/" in node.name}
    assert "Softmax" in made
    assert not [op for op in made if "Random" in op or op == "GreaterEqual"]


@pytest.mark.parametrize("dropout", ["stateful", "stateless"])
def test_masks_that_each_replica_draws_for_itself_are_the_same_again(dropout: str) -> None:
    item = make_item(transformer(2, dropout))
    config = {**TWO, "semantics": {"random": "independent"}}
    expected = train(ar.rewrite(item, config), given := feeds((5, 8), (5, 8)))
    got = train(new := ar.rewrite(item, {**config, "remat": BLOCKS}), given)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-12, 1e-12, err_msg=name)
    drawn = {node.op for node in new.graph if "remat/" in node.name and "Random" in node.op}
    assert all(op.startswith("Stateless") for op in drawn)


def test_what_has_an_effect_or_a_state_runs_once() -> None:
    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, 4), placeholder("y", None, 4)
        count = v1.get_variable("count", initializer=np.float64(0), trainable=False, use_resource=True)
        h = x
        for i in range(6):
            with tf.control_dependencies([count.assign_add(1.0)]), tf.name_scope(f"layer_{i}"):
                h = tf.tanh(h @ variable(f"w{i}", np.eye(4) * 0.7 + 0.1))
                h = tf.nn.dropout(tf.nn.softplus(h), 0.3, seed=i)
        return {"loss": tf.reduce_mean((h - y) ** 2)}

    item = make_item(forward)
    new = rewritten(item, ONE, EVERY)
    made = [node for node in new.graph if node.name.startswith("remat/") or "/remat/" in node.name]
    assert made
    assert not [node.name for node in made if get_op(node.op).is_stateful]
    assert_same(item, new, SMALL)


def test_tensorflow_keeps_the_copies_in_a_session() -> None:
    item = make_item(chain())
    ops = executed(rewritten(item, ONE, EVERY), SMALL[0])
    assert ops["Tanh"] > 16
    assert ops["Tanh"] == 16 + _copied(item, EVERY)


def test_tensorflow_keeps_the_copies_in_a_function() -> None:
    from tensorflow.python.eager import context

    weights = [tf.Variable(np.eye(4) * 0.5 + 0.1 * i) for i in range(8)]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_mean((h - y) ** 2)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    new = ar.distribute(step, {**TWO, "remat": EVERY})
    x, y = (tf.constant(SMALL[0][key]) for key in ("x", "y"))
    context.context().enable_run_metadata()
    new(x, y)
    new(x, y)
    metadata = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    graphs = [graph for function in metadata.function_graphs for graph in function.partition_graphs]
    nodes = [node for graph in graphs for node in graph.node if node.op == "Tanh"]
    assert len(nodes) >= 2 * (8 + 3)  # two replicas, of which each runs a layer of every pair again


def _copied(item: ar.GraphItem, remat: Mapping[str, Any], op: str = "Tanh") -> int:
    new = ar.rewrite(item, {**ONE, "remat": remat})
    return sum(node.op == op and "remat/" in node.name for node in new.graph)


def test_every_copy_waits_for_a_gradient_that_is_made_of_what_it_is_a_copy_of() -> None:
    new = rewritten(make_item(transformer()), ONE, BLOCKS)
    graph = new.graph
    made = [node for node in graph if "remat/" in node.name]
    assert made
    for node in made:
        before = ancestors([node])
        assert any("gradients" in one.name for one in before), node.name
        last = [f"block_{i}/add_1" for i in range(3) if f"/block_{i}/" in f"/{node.name}"]
        assert any(one.name.endswith(last[0]) for one in before), node.name


def test_less_is_kept_at_a_time_because_the_copies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_item(chain(layers=32, width=16))
    kept, again = peak_bytes(item, "none"), peak_bytes(item, "sqrt")
    assert again < 0.6 * kept
    real = rematerialize.copy_nodes
    monkeypatch.setattr(
        rematerialize, "copy_nodes", lambda graph, nodes, scope, triggers: real(graph, nodes, scope, [])
    )
    # Without what they wait for they may run early; on a busy machine few steps do, so there are many tries.
    assert any(max(peaks(item, "sqrt")) > 1.2 * again for _ in range(25))


def peaks(item: ar.GraphItem, policy: str) -> list[float]:
    """Return the most bytes that are alive at a time, in each of some steps, by the runtime's records."""
    new = ar.rewrite(item, {**ONE, "remat": {"policy": policy}})
    feed = feeds((16,), (16,), (512,))[0]
    return [allocated(stats, new) for stats in traced(new, Built(item, ("out_loss:0",)), feed, 6)]


def peak_bytes(item: ar.GraphItem, policy: str) -> float:
    """Return how few bytes a step needs: how far it runs ahead of itself depends on what else the machine does."""
    return min(peaks(item, policy))


def test_plans_hold_what_is_asked_and_build_to_the_same_graph() -> None:
    item = make_item(chain(8))
    plan = ar.build_plan(item, {**TWO, "remat": BLOCKS})
    again = ar.Plan.from_yaml(plan.to_yaml())
    assert again.remat is not None
    assert again.remat.scopes == (BLOCKS["scopes"][0],)
    assert again.digest() == plan.digest() != ar.build_plan(item, {**TWO, "remat": SQRT}).digest()
    assert ar.rewrite(item, again).graph_bytes == ar.rewrite(item, plan).graph_bytes


def test_the_certificate_refuses_a_copy_of_something_else() -> None:
    def swap(graph: Graph, nodes: list[Node], scope: str, triggers: list[Node]) -> dict[Node, Node]:
        made = real(graph, nodes, scope, triggers)
        last = next(copy for copy in made.values() if copy.op == "Tanh")
        last.set_input(0, nodes[0].inputs[0])
        return made

    real = rematerialize.copy_nodes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rematerialize, "copy_nodes", swap)
        with pytest.raises(VerifyError, match="does not read what"):
            rewritten(make_item(chain(8)), ONE, EVERY)


OPS = {
    "dense": lambda a, b, w: tf.tanh(a @ w),
    "gate": lambda a, b, w: tf.sigmoid(a) * b,
    "add": lambda a, b, w: a + b,
    "square": lambda a, b, w: tf.sin(a) ** 2 + b,
    "softmax": lambda a, b, w: tf.nn.softmax(a * 2.0),
    "norm": lambda a, b, w: a - tf.reduce_mean(a, -1, keepdims=True),
    "centre": lambda a, b, w: a - tf.reduce_mean(b, 0, keepdims=True),
    "halves": lambda a, b, w: tf.concat([tf.split(a, 2, -1)[1], tf.split(b, 2, -1)[0]], -1),
}


@settings(max_examples=8, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 3), st.integers(0, 5)), min_size=5, max_size=14),
    st.sampled_from([SQRT, EVERY, MATMULS, {"policy": "every:1"}, {"policy": "names", "names": ["v[0-9]*[05]/.*"]}]),
    st.sampled_from([ONE, TWO]),
)
def test_a_random_graph_trains_as_it_did(
    ways: list[tuple[str, int, int]], remat: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    def forward() -> Mapping[str, Any]:
        x, y = placeholder("x", None, 4), placeholder("y", None, 4)
        w = variable("w", np.random.default_rng(1).normal(size=(4, 4)) * 0.5)
        values = [x @ w]
        for i, (way, back, other) in enumerate(ways):
            with tf.name_scope(f"v{i}"):
                values.append(OPS[way](values[-1 - back % len(values)], values[-1 - other % len(values)], w))
        return {"loss": tf.reduce_mean((tf.add_n(values[-2:]) - y) ** 2)}

    item = make_item(forward)
    if remat["policy"] == "names" and len(ways) < 6:
        remat = EVERY
    assert_same(item, rewritten(item, config, remat), SMALL, 1e-10)


def test_what_replicas_have_gathered_for_gradients_is_kept_and_the_report_says_so() -> None:
    """Of few examples, activations are smaller than gradients: replicas gather them, and no edge is a gradient's."""
    width = 512

    def forward() -> Mapping[str, Any]:
        x, h = placeholder("x", 16, width), None
        for i in range(9):
            w = variable(f"w{i}", np.random.default_rng(i).normal(size=(width, width)) / width**0.5)
            h = tf.tanh((x if h is None else h) @ w)
        return {"loss": tf.reduce_mean((h - x) ** 2)}

    item = make_item(forward, batch_inputs={"x": 0})
    assert {edge.owner for edge in ar.build_plan(item, {**TWO, "remat": SQRT}).edges} == {"step"}
    new = rewritten(item, TWO, SQRT)
    assert not new.report.recomputed.segments
    assert "nothing is computed again" in str(new.report)
    given = [{"x": np.random.default_rng(seed).normal(size=(16, width))} for seed in (1, 2)]
    assert_same(item, new, given)
