"""The order in which gradients are ready: what is measured, and when it is worth another rewrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.ir.format import serde
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan, Options
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.function import step
from autograph_rewrite.runtime.function.step import leave_earlier
from tests.support.rewriting import run_pipeline

WORKERS = ["127.0.0.1:11", "127.0.0.1:12"]


def item(
    plan: Plan | None = None, devices: str = "CPU:0", before: Callable[[Any], Any] = lambda x: x, **more: Any
) -> GraphItem:
    """Return a chain of four layers of 8 KiB, of which two fit into a bucket, as rank 0 of two rewrites it."""
    layers = [tf.Variable(np.eye(32), name=f"w{i}") for i in range(4)]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = before(x)
            for kernel in layers:
                y = tf.tanh(y @ kernel)
            loss = tf.reduce_sum(y)
        for kernel, gradient in zip(layers, tape.gradient(loss, layers), strict=True):
            kernel.assign_sub(0.1 * gradient)
        return loss

    original = normalise(ar.GraphItem.from_function(step, tf.TensorSpec([None, 32], tf.float64), batch_inputs={"x": 0}))
    strategy = {"name": "AllReduce", "bucket_bytes": 2 * 8192, **more.pop("strategy", {})}
    config = {"devices": [devices], "cluster": {"workers": WORKERS}, "strategy": strategy, **more}
    new = run_pipeline(original, plan or ar.build_plan(original, config), task=0)
    member = Membership(tuple(WORKERS), (), "worker", 0)
    return replace(new, report=replace(new.report, member=member))


def edges(owners: str) -> list[EdgePlan]:
    """Return the edges of buckets: `ab cd` are two buckets of two, of 10 bytes each."""
    return [
        EdgePlan(
            owner, "partial(sum)", "replicated", owner, lowering="host_reduce", dtype="float32", bytes=10, bucket=at
        )
        for at, bucket in enumerate(owners.split(), 1)
        for owner in bucket
    ]


@pytest.mark.parametrize(
    ("planned", "ready", "is_worth_it"),
    [
        ("ab cd", "abcd", False),
        ("ba dc", "abcd", False),
        ("ac bd", "abcd", True),
        ("ad bc", "abcd", True),
        ("cd ab", "abcd", False),
    ],
    ids=["as planned", "another order inside", "mixed", "the last with the first", "another number"],
)
def test_buckets_are_filled_anew_where_they_would_leave_earlier(planned: str, ready: str, is_worth_it: bool) -> None:
    plan = Plan(("CPU:0",), default=Options(bucket_bytes=20))
    times = {owner: float(at) for at, owner in enumerate(ready)}
    assert leave_earlier(plan, edges(planned), times) == is_worth_it


def test_gradients_that_are_ready_at_the_same_time_stay_where_they_are() -> None:
    plan = Plan(("CPU:0",), default=Options(bucket_bytes=20))
    assert not leave_earlier(plan, edges("ac bd"), dict.fromkeys("abcd", 1.0))


@pytest.mark.parametrize(
    "more",
    [
        {"strategy": {"compressor": "fp16"}},
        {"strategy": {"bucket_bytes": 2**20}},
        {"strategy": {"bucket_bytes": 0}},
        {"microbatches": 2},
        {"devices": "GPU:0"},
        {"steps_per_run": 2},
    ],
    ids=["compressed", "one bucket", "no buckets", "micro-batches", "accelerator", "several steps per run"],
)
def test_nothing_is_learnt_where_nothing_would_change_or_time_says_little(more: dict[str, Any]) -> None:
    assert step.ready_order(item(**more)) is None


@pytest.mark.parametrize("where", ["in the step", "in a loop"])
def test_nothing_is_learnt_of_a_step_that_draws_with_a_seed_which_another_function_would_begin_anew(where: str) -> None:
    def noise(x: Any) -> Any:
        if where == "in the step":
            return x + tf.random.normal([32], seed=7, dtype=tf.float64)
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y + tf.random.uniform([32], dtype=tf.float64)), [0, x]
        )[1]

    assert step.ready_order(item(before=noise)) is None
    assert step.ready_order(item(before=lambda x: x + tf.random.stateless_normal([32], [1, 2], dtype=tf.float64)))


def test_one_process_learns_nothing() -> None:
    new = item()
    assert step.ready_order(replace(new, report=replace(new.report, member=None))) is None


def test_a_timed_step_has_a_timestamp_behind_each_gradient_and_is_the_same_otherwise() -> None:
    new = item()
    learns = step.ready_order(new)
    assert learns is not None
    graph, before = serde.from_bytes(learns.timed_graph()), serde.from_bytes(new.graph_bytes)
    stamps = [value.node for value in graph.node(step.TIMES).inputs]
    assert [stamp.op for stamp in stamps] == ["Timestamp"] * 4
    assert all(len(stamp.controls) == 1 and stamp.controls[0].op == "MatMul" for stamp in stamps)
    more = {node.name for node in graph} - {node.name for node in before}
    assert {name for name in more if not name.startswith(f"{step.SCOPE}/")} == set()


def test_worker_0_alone_measures_and_in_the_first_steps_only() -> None:
    new = item()
    second = replace(new, report=replace(new.report, member=replace(new.report.member, task=1)))
    first, other = step.ready_order(new), step.ready_order(second)
    assert first is not None
    assert other is not None
    assert [number for number in range(1, 9) if first.measures(number)] == [3, 4, 5]
    assert not any(other.measures(number) for number in range(1, 9))


def test_buckets_follow_the_order_of_a_plan_which_files_keep() -> None:
    plan = item().report.plan
    values = {edge.owner: edge.value for edge in plan.edges if edge.bucket and edge.owner != STEP}
    buckets = {edge.owner: edge.bucket for edge in plan.edges}
    first, second, third, fourth = sorted(values, key=buckets.__getitem__)
    assert buckets[first] == buckets[second] != buckets[third] == buckets[fourth]
    given = replace(plan, edges=(), graph_digest="", bucket_order=tuple(values[one] for one in (first, third, second)))
    given = Plan.from_yaml(given.to_yaml())
    again = {edge.owner: edge.bucket for edge in item(given).report.plan.edges}
    assert again[first] == again[third] != again[second] == again[fourth]
    assert given.digest() != replace(given, bucket_order=()).digest()
