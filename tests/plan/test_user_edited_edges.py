"""A plan with edges can be edited by hand: what can be carried out is, and what cannot is refused at its edge."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem, Plan
from autograph_rewrite.errors import PlanError
from autograph_rewrite.plan.parts.collective_keys import with_keys
from autograph_rewrite.plan.parts.messages import EdgePlan
from tests.support.training import MODES, Run, make_item, placeholder, train, variable

X = np.random.default_rng(0).normal(size=(5, 3))
FEEDS = [{"x": X}, {"x": X[:4]}]
GRADIENTS = ("w", "b", "c")  # edges are told by their value, or by their owner
Change = Callable[[EdgePlan], EdgePlan]


def network() -> Mapping[str, Any]:
    """Have an edge of every kind."""
    x, w, b, c = placeholder("x", None, 3), variable("w", X[:3]), variable("b", np.zeros(3)), variable("c", X[1:4])
    y = tf.matmul(tf.tanh(x @ w + b), c, name="y")
    squares = tf.matmul(x, x, transpose_a=True, name="squares")
    scaled = tf.reduce_sum(x * tf.norm(squares), 0, name="scaled")
    kinds = tf.shape(tf.unique(tf.cast(x[:, 0] * 3, tf.int32))[0])[0]
    body = lambda i, a: (i + 1, tf.sqrt(tf.abs(tf.reduce_sum(x * a, 0))))  # noqa: E731
    return {
        "loss": tf.reduce_mean(y * y),
        "rows": tf.cumsum(y, 0),
        "columns": tf.cumsum(tf.transpose(y, name="columns"), 1),
        "largest": tf.reduce_max(y, 0, name="largest"),
        "least": tf.reduce_max(-y, 0),
        "norm": tf.norm(squares),
        "scaled": tf.square(scaled),
        "changing": tf.square(tf.reduce_sum(x[:, :1] * tf.ones([1, kinds], x.dtype), 0, name="changing")),
        "looped": tf.while_loop(lambda i, _: i < 2, body, [0, tf.ones(3, x.dtype)])[1],
    }


@cache
def original() -> GraphItem:
    return make_item(network, version=1)


@cache
def expected() -> Run:
    return train(original(), FEEDS)


def config(mode: str) -> dict[str, Any]:
    strategy = {"name": "AllReduce", "variables": mode}
    return {"devices": ["CPU:0", "CPU:1"], "timeout_seconds": 30, "strategy": strategy}


@cache
def plan(mode: str = "mirrored") -> Plan:
    return ar.build_plan(original(), config(mode))


def edited(change: Change, mode: str = "mirrored") -> Plan:
    """Return the plan with changed edges, and keys and order that fit them."""
    old = plan(mode)
    return old.with_edges(with_keys(map(change, old.edges), old.members))


def on(values: str | tuple[str, ...], **changes: Any) -> Change:
    """Change the reductions and gathers of some values, or owners."""
    chosen = (values,) if isinstance(values, str) else values
    return lambda edge: replace(edge, **changes) if any(is_edge_of(name, edge) for name in chosen) else edge


def is_edge_of(name: str, edge: EdgePlan) -> bool:
    return name in (edge.value, edge.owner) and edge.to == "replicated"


def edge_of(name: str, given: Plan) -> EdgePlan:
    (edge,) = (edge for edge in given.edges if is_edge_of(name, edge))
    return edge


def ops(item: GraphItem) -> Counter[str]:
    return Counter(node.op for node in item.graph)


def assert_trains_alike(item: GraphItem) -> None:
    got = train(item, FEEDS)
    for step, (one, other) in enumerate(zip(got.fetched, expected().fetched, strict=True)):
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, 1e-9, 1e-9, err_msg=f"step {step}: {name}")
    for name, value in expected().variables.items():
        np.testing.assert_allclose(got.variables[name], value, 1e-9, 1e-9, err_msg=name)


def refusal(given: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        ar.rewrite(original(), given)
    return str(caught.value)


def test_the_network_has_an_edge_of_every_kind() -> None:
    kinds = {(edge.from_, edge.to, edge.lowering) for edge in plan().edges}
    assert kinds == {
        ("replicated", "split(0)", "slice"),
        ("partial(sum)", "replicated", "collective_reduce"),
        ("partial(max)", "replicated", "collective_reduce"),
        ("split(0)", "replicated", "collective_gather"),
        ("split(1)", "replicated", "concat"),
        ("local", "replicated", "global_size"),
    }
    assert {edge.owner for edge in plan().edges if edge.bucket} == set(GRADIENTS)


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_is_carried_out_as_it_was_made(mode: str) -> None:
    assert ops(ar.rewrite(original(), plan(mode))) == ops(ar.rewrite(original(), edited(lambda edge: edge, mode)))
    assert_trains_alike(ar.rewrite(original(), plan(mode)))


@pytest.mark.parametrize(
    ("value", "lowering", "gone", "made"),
    [
        ("Mean/sum", "add_n", "CollectiveReduceV2", "AddN"),
        ("b", "add_n", "", "AddN"),  # what stays of its bucket is still one collective
        ("out_largest", "fold", "CollectiveReduceV2", "Pack"),
        ("y", "concat", "CollectiveGatherV2", "ConcatV2"),
    ],
)
def test_another_lowering_is_honoured(value: str, lowering: str, gone: str, made: str) -> None:
    before = ops(ar.rewrite(original(), plan()))
    rewritten = ar.rewrite(original(), edited(on(value, lowering=lowering, bucket=0)))
    after = ops(rewritten)
    assert after[made] == before[made] + 1
    assert not gone or after[gone] == before[gone] - 2
    assert edge_of(value, rewritten.report.plan).lowering == lowering
    assert_trains_alike(rewritten)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("value", "lowering"),
    [
        ("Mean/sum", "concat"),
        ("Mean/sum", "slice"),
        ("Mean/sum", "collective_gather"),
        ("Mean/sum", "fold"),
        ("out_largest", "add_n"),
        ("y", "add_n"),
        ("y", "collective_reduce"),
        ("columns", "collective_gather"),  # which joins first dimensions only
        ("Mean/count", "collective_reduce"),
        ("Mean/count", "local_size"),
    ],
)
def test_a_lowering_that_does_not_fit_is_refused(value: str, lowering: str, mode: str) -> None:
    said = refusal(edited(on(value, lowering=lowering, bucket=0), mode))
    assert f"'{value}'" in said
    assert lowering in said


def test_what_is_cut_can_be_cut_in_one_way_only() -> None:
    said = refusal(edited(lambda edge: replace(edge, lowering="global_size") if edge.lowering == "slice" else edge))
    assert "'x' from replicated to split(0) cannot be lowered as global_size (write slice)" in said


def test_a_bucket_taken_apart_is_honoured() -> None:
    rewritten = ar.rewrite(original(), edited(lambda edge: replace(edge, bucket=0)))
    assert ops(rewritten)["CollectiveReduceV2"] == ops(ar.rewrite(original(), plan()))["CollectiveReduceV2"] + 2 * 2
    assert_trains_alike(rewritten)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [(*GRADIENTS, "Mean/sum"), ("squares", "w"), ("scaled", "Mean/sum")])
def test_values_put_into_one_bucket_are_reduced_together(values: tuple[str, ...], mode: str) -> None:
    alone = edited(lambda edge: replace(edge, bucket=0), mode)
    before = ops(ar.rewrite(original(), alone))
    joined = alone.with_edges(with_keys(map(on(values, bucket=7), alone.edges), alone.members))
    rewritten = ar.rewrite(original(), joined)
    op, per_exchange = ("CollectiveReduceV2", 2) if mode == "mirrored" else ("AddN", 1)
    assert ops(rewritten)[op] == before[op] - per_exchange * (len(values) - 1)
    assert_trains_alike(rewritten)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("scaled", "squares"), "'scaled' cannot be in bucket 7: it waits for the sum of another member"),
        (("Mean/sum", "while/Sum"), "'while/Sum' cannot be in bucket 7: it is in a loop or a branch"),
        (("Mean/sum", "changing"), "'changing' cannot be in bucket 7: its shape may change from step to step"),
        (("Mean/sum",), "'Mean/sum' cannot be in bucket 7: it would be alone"),
        (("y", "columns"), "bucket 7"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_that_cannot_be_reduced_at_once_is_refused(values: tuple[str, ...], said: str, mode: str) -> None:
    assert said in refusal(edited(on(values, bucket=7), mode))


def test_a_bucket_of_maxima_is_refused() -> None:
    said = refusal(edited(on(("out_largest", "out_least"), bucket=7)))
    assert "'out_largest' cannot be in bucket 7: only sums can" in said
    assert "'out_least' cannot be in bucket 7: only sums can" in said


def test_a_bucket_of_one_is_refused_where_the_others_have_left_it() -> None:
    left = edge_of("w", plan())
    said = refusal(edited(on(("b", "c"), bucket=0)))
    assert f"'{left.value}' cannot be in bucket {left.bucket}: it would be alone" in said


def test_every_refused_edge_is_told_at_once_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    edited(lambda e: on("y", lowering="add_n")(on("Mean/sum", lowering="concat")(e))).save(path)
    said = refusal(Plan.load(path))
    lines = path.read_text().splitlines()
    assert "plan.yaml has 2 problems" in said
    for value, lowering in (("y", "add_n"), ("Mean/sum", "concat")):
        (line,) = re.findall(rf"plan.yaml:(\d+): '{value}'", said)
        assert lines[int(line) - 1].strip() == f"lowering: {lowering}"


def test_collectives_without_keys_are_refused() -> None:
    given = plan("mirrored")
    bare = [replace(edge, instance_key=0, order=None) for edge in given.edges]
    assert "the collective 'Mean/sum' has no instance_key" in refusal(given.with_edges(bare))


def other_keys(given: Plan) -> Plan:
    """Return the plan with keys of somebody's own choice."""
    renumbered = [replace(e, instance_key=e.instance_key + 1 if e.instance_key else 0) for e in given.edges]
    return given.with_edges(renumbered)


def test_keys_are_taken_from_the_plan() -> None:
    given = other_keys(plan())
    rewritten = ar.rewrite(original(), given)
    assert rewritten.report.plan.edges == given.edges
    assert_trains_alike(rewritten)


def another_network() -> Mapping[str, Any]:
    x, w = placeholder("x", None, 3), variable("w", X[:3])
    return {"loss": tf.reduce_mean(tf.square(x @ w))}


def test_a_plan_of_another_graph_is_refused_with_an_edge_that_differs() -> None:
    said = refusal(ar.build_plan(make_item(another_network), config("mirrored")))
    assert "its edges are not those of this graph" in said
    assert "build it anew with build_plan, or remove its edges" in said


@pytest.mark.parametrize("keep", [slice(1, None), slice(None, -1)])
def test_a_plan_that_lacks_an_edge_is_refused_with_that_edge(keep: slice) -> None:
    (missing,) = set(plan().edges) - set(plan().edges[keep])
    said = refusal(plan().with_edges(plan().edges[keep]))
    assert f"the plan lacks the edge '{missing.value}' from {missing.from_} to {missing.to}" in said


def test_a_plan_with_one_edge_too_many_is_refused_with_that_edge() -> None:
    extra = replace(plan().edges[0], value="y", from_="split(0)", to="split(1)")
    assert "the plan has the edge 'y' from split(0) to split(1)" in refusal(plan().with_edges([*plan().edges, extra]))


@pytest.mark.parametrize("suffix", [".yaml", ".pb"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_in_a_file_gives_the_graph_that_the_plan_gives(mode: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{suffix}"
    plan(mode).save(path)
    loaded = Plan.load(path)
    assert loaded == plan(mode)
    assert loaded.edges
    assert loaded.digest() == plan(mode).digest()
    assert ar.rewrite(original(), loaded).graph_bytes == ar.rewrite(original(), plan(mode)).graph_bytes


def test_an_edited_plan_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    given = edited(on((*GRADIENTS, "Mean/sum"), bucket=3, reason="by hand"))
    given.save(path)
    rewritten = ar.rewrite(original(), Plan.load(path))
    assert rewritten.report.plan.edges == given.edges
    assert rewritten.graph_bytes == ar.rewrite(original(), given).graph_bytes


def test_a_request_without_edges_is_resolved_anew() -> None:
    rewritten = ar.rewrite(original(), replace(plan(), edges=()))
    assert rewritten.report.plan.edges == plan().edges
    assert rewritten.graph_bytes == ar.rewrite(original(), plan()).graph_bytes
