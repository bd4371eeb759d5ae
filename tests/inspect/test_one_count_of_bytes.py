"""The bytes of exchanges are the same from plan, comm, simulate, explain and report, of a batch that each states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autograph_rewrite as ar
from autograph_rewrite.inspect import report
from autograph_rewrite.inspect.communication import EXCHANGE, counted_batch, meetings
from autograph_rewrite.inspect.explain import text_of
from autograph_rewrite.inspect.report_view import account_of
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.parts.names import exchanged_bytes
from tests.support.small_items import regression

NAMES = (
    "mlp",
    "cnn",
    "cnn_fused",
    "transformer",
    "language_model",
    "lstm_v1",
    "lstm_v2",
    "gru_v1",
    "cond_v1",
    "masked",
)


def told_by_all(item: ar.GraphItem, config: dict[str, Any], batch: int | None = None) -> set[int]:
    """Return the totals that the verbs give, which should be one; all count as many examples."""
    plan = ar.build_plan(item, config, batch=batch)
    new = ar.rewrite(item, plan, batch=batch)
    account = account_of(new, batch)
    simulation = ar.simulate(item, replace(plan, edges=(), batch=0), batch=batch)
    edges = {edge.value for edge in plan.edges if edge.lowered.hops}
    listed = [one for one in meetings(new) if one.owner and one.role == EXCHANGE]
    assert {counted_batch(new), account.batch, account.covered.batch, simulation.batch} == {plan.batch}
    assert f"a step of {plan.batch:,} examples" in text_of(account)
    assert edges
    return {
        exchanged_bytes(plan.edges),
        account.exchanged_bytes,
        sum(edge.bytes for edge in account.edges if edge.kind != "local"),
        sum(one.bytes or 0 for one in listed),
        simulation.exchanged_bytes,
        sum(row["bytes"] for row in report.exchanges(new, plan) if row["for"] and row["role"] == EXCHANGE),
        sum(row["bytes"] for row in report.reshards(new, plan) if row["kind"] != "local"),
    }


TWO = {"devices": ["CPU:0", "CPU:1"]}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("mlp", TWO),
    "servers": ("cnn", {**TWO, "strategy": {"name": "PSLoadBalancing"}}),
    "parallax": ("language_model", {**TWO, "strategy": {"name": "Parallax"}}),
    "shards on servers": ("transformer", {**TWO, "strategy": {"name": "PartitionedPS"}}),
    "fsdp": ("transformer", {**TWO, "strategy": {"name": "FSDP"}}),
    "stages": ("mlp", {**TWO, "strategy": {"name": "Pipeline"}, "pipeline": {"stages": 2, "microbatches": 2}}),
    "mesh": (
        "language_model",
        {
            "devices": [f"CPU:{i}" for i in range(4)],
            "mesh": {"data": 2, "model": 2},
            "sharding": [{"match": ".*w", "split": [1, 2], "optional": True}],
        },
    ),
    "compressor": ("cnn", {**TWO, "strategy": {"name": "AllReduce", "variables": "mirrored", "compressor": "fp16"}}),
    "micro-batches": ("masked", {**TWO, "microbatches": 2}),
    "job": ("mlp", {"cluster": {"workers": ["a:1", "b:2"]}, "devices": ["CPU:0"]}),
    "job with servers": (
        "language_model",
        {
            "cluster": {"workers": ["a:1", "b:2"], "ps": ["c:3"]},
            "devices": ["CPU:0"],
            "strategy": {"name": "PS"},
        },
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_verb_counts_the_same_bytes_whatever_the_strategy(strategy: str) -> None:
    from tests.zoo import ZOO

    name, config = STRATEGIES[strategy]
    item = ZOO[name].build(optimizer="adam", dtype="float32").item()
    assert len(told_by_all(item, config, 48)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_verb_counts_the_same_bytes(name: str) -> None:
    from tests.zoo import ZOO

    item = ZOO[name].build(optimizer="adam", dtype="float32").item()
    config = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
    assert len(told_by_all(item, config)) == 1


def test_micro_batches_send_rows_several_times_and_sums_once() -> None:
    from tests.zoo import ZOO

    item = ZOO["language_model"].build(optimizer="adam", dtype="float32").item()
    config = {"devices": ["CPU:0", "CPU:1"], "microbatches": 2}
    assert told_by_all(item, config, 64) == told_by_all(item, {**config, "microbatches": 1}, 64)


def test_the_bytes_of_a_larger_batch_are_more_where_rows_are_sent() -> None:
    from tests.zoo import ZOO

    item = ZOO["language_model"].build(optimizer="adam", dtype="float32").item()
    few, many = (told_by_all(item, {"devices": ["CPU:0", "CPU:1"]}, batch) for batch in (2, 2000))
    assert len(few) == len(many) == 1
    assert many.pop() > 10 * few.pop()


def test_a_plan_that_does_not_say_its_batch_is_carried_out_as_it_stands() -> None:
    plan = ar.build_plan(regression(), {"devices": ["CPU:0", "CPU:1"]})
    edges: tuple[EdgePlan, ...] = tuple(replace(edge, bytes=1) for edge in plan.edges)
    new = ar.rewrite(regression(), replace(plan, edges=edges, batch=0))
    assert new.report.plan.edges == edges
    assert counted_batch(new) is None
    assert "Bytes are those" not in ar.explain(new)


def test_a_plan_for_another_batch_is_counted_anew() -> None:
    plan = ar.build_plan(regression(), {"devices": ["CPU:0", "CPU:1"]}, batch=2)
    new = ar.rewrite(regression(), plan, batch=2000)
    assert (plan.batch, new.report.plan.batch) == (2, 2000)
    assert sum(edge.bytes for edge in new.report.plan.edges) > sum(edge.bytes for edge in plan.edges)
