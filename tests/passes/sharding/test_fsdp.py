"""Variables split over the replicas (ZeRO, FSDP): the same numbers, a share of the memory, wholes freed after use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.diagnostics import amounts
from autograph_rewrite.errors import PassError
from autograph_rewrite.passes.sharding import residence
from autograph_rewrite.plan.plan import Plan
from benchmarks.cost import allocated, traced
from benchmarks.remat import Built
from tests.matrix.run import compare, distributed, truth
from tests.support.covering import covering
from tests.support.training import learnt, make_item, placeholder, v1, variable
from tests.zoo import ZOO, Options

SIZES = (12, 7, 12, 3, 12)
LAYERS, WIDTH = 6, 64
LAYER_BYTES = WIDTH * WIDTH * 4


def config(strategy: str, mode: str = "mirrored", replicas: int = 2, **more: Any) -> dict[str, Any]:
    devices = [f"CPU:{i}" for i in range(replicas)]
    return {"devices": devices, "strategy": {"name": strategy, "variables": mode}, "timeout_seconds": 20, **more}


def test_what_initialises_a_variable_by_another_waits_for_all_replicas():
    """Whether the other has a value is asked of all of its shards, by a collective that needs each replica."""

    def forward() -> dict[str, Any]:
        w = variable("w", np.linspace(-1.0, 1.0, 16).reshape(4, 4))
        average = v1.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([average.apply([w])]):
            y = tf.tanh(placeholder("x", None, 4) @ w)
        return {"loss": tf.reduce_mean(tf.square(y))}

    item = make_item(forward, batch_inputs={"x": 0}, version=1)
    feeds = [{"x": np.ones((size, 4)) * size} for size in (4, 3)]
    expected, got = (learnt(one, feeds) for one in (item, ar.rewrite(item, config("FSDP", microbatches=2))))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-9)


TRAINED = (
    ("mlp", "adam"),
    ("transformer", "momentum"),
    ("language_model", "adagrad"),
    ("custom_loop", "adafactor"),
    ("function_sparse", "lion"),
    ("keras_two_inputs", "adamw"),
)


@pytest.mark.parametrize(("trained", "replicas"), covering(TRAINED, (4, 2)), ids=str)
def test_fsdp_trains_as_one_device(trained: tuple[str, str], replicas: int):
    name, optimizer = trained
    options = Options(optimizer=optimizer)
    trace, _ = distributed(ZOO[name].build(options), config("FSDP", replicas=replicas), SIZES)

    assert max(error for _, error in compare(trace, truth(name, options, SIZES), 1e-6)) < 1e-12


@pytest.mark.parametrize(
    ("trained", "form"),
    covering(
        (("mlp", "adam"), ("transformer", "momentum"), ("custom_loop", "adafactor"), ("cnn", "adam")),
        ("unrolled", "loop"),
    ),
)
def test_fsdp_with_micro_batches_trains_as_one_device(trained: tuple[str, str], form: str):
    name, optimizer = trained
    options = Options(optimizer=optimizer)
    given = config("FSDP", microbatches=2, accumulation={"form": form})
    if (name, form) == ("cnn", "loop"):
        with pytest.raises(PassError, match="of the whole batch, and runs in each iteration of a loop"):
            distributed(ZOO[name].build(options), given, (12, 7, 12))
        return  # its batch normalisation
    trace, _ = distributed(ZOO[name].build(options), given, (12, 7, 12))

    assert max(error for _, error in compare(trace, truth(name, options, (12, 7, 12)), 1e-6)) < 1e-12


@pytest.mark.parametrize("optimizer", ["adagrad", "rmsprop"])
def test_gathers_for_one_op_that_needs_two_wholes_do_not_wait_for_each_other(optimizer: str):
    options = Options(optimizer=optimizer, dtype="float32")
    trace, _ = distributed(ZOO["cnn_fused"].build(options), config("FSDP", replicas=3), SIZES[:2])

    assert max(error for _, error in compare(trace, truth("cnn_fused", options, SIZES[:2]), 1e-6)) < 2e-4


def test_shards_that_are_looked_up_and_multiplied_are_not_delayed():
    options = Options(optimizer="sgd", ref_variables=True)
    trace, _ = distributed(ZOO["language_model"].build(options), config("FSDP"), SIZES[:2])

    assert max(error for _, error in compare(trace, truth("language_model", options, SIZES[:2]), 1e-6)) < 1e-12


PARTITIONED = ("PartitionedPS", "UnevenPartitionedPS", "PartitionedAR", "RandomAxisPartitionAR")


@pytest.mark.parametrize(
    ("name", "strategy", "mode"), covering(("mlp", "language_model"), PARTITIONED, ("shared", "mirrored"))
)
def test_partitioned_strategies_train_as_one_device(name: str, strategy: str, mode: str):
    options = Options(optimizer="adam")
    trace, _ = distributed(ZOO[name].build(options), config(strategy, mode), SIZES)

    assert max(error for _, error in compare(trace, truth(name, options, SIZES), 1e-6)) < 1e-12


def deep(*, looks_up: bool = False) -> GraphItem:
    """Return a deep regression, trained by Adam, of numbers or of the means of rows of a table."""
    rng, graph = np.random.default_rng(0), tf.Graph()
    with graph.as_default():
        if looks_up:
            table = v1.get_variable(
                "table", initializer=rng.normal(size=(50, WIDTH)).astype("float32"), use_resource=True
            )
            y = tf.reduce_mean(tf.gather(table, v1.placeholder(tf.int32, [None, 3], name="x")), 1)
        else:
            y = v1.placeholder(tf.float32, [None, WIDTH], name="x")
        for i in range(LAYERS):
            value = (rng.normal(size=(WIDTH, WIDTH)) / 8).astype("float32")
            y = tf.tanh(tf.matmul(y, v1.get_variable(f"w{i}", initializer=value, use_resource=True)))
        loss = tf.reduce_mean(tf.square(y - 1.0), name="loss")
        tf.group(v1.train.AdamOptimizer(1e-3).minimize(loss), name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def over_data(stage: int) -> dict[str, Any]:
    return config("AllReduce", replicas=4, variables=[{"match": "w.", "partition": {"over": "data", "stage": stage}}])


def live(item: GraphItem) -> dict[str, int]:
    """Return the bytes of all variables by the device of their handles in the finished graph."""
    found: dict[str, int] = defaultdict(int)
    for node in item.graph:
        if node.op == "VarHandleOp":
            found[node.device] += int(np.prod(node.attr("shape"))) * 4
    return dict(found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_replica_holds_its_share_of_variables_and_optimizer_state(stage: int):
    item = deep()
    split, mirrored = ar.rewrite(item, over_data(stage)), ar.rewrite(item, config("AllReduce", replicas=4))

    most = max(live(split).values()) / min(live(mirrored).values())
    assert most < 0.26  # a quarter, and a few scalars
    assert split.report.held == live(split)
    assert f"{amounts.size(live(split)['/device:CPU:3'])} on /device:CPU:3" in str(split.report)


def gathered(item: GraphItem) -> dict[str, list[tuple[int, int]]]:
    """Return when how many bytes of whole variables were taken and given back, by device, in one traced step."""
    x = np.random.default_rng(1).normal(size=(8, WIDTH)).astype("float32")
    trace = v1.RunMetadata()
    with item.session() as session:
        session.run("init")
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, timeout_in_ms=20000)
        session.tf_session.run(["loss:0", "train"], {"x:0": x}, options=options, run_metadata=trace)
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for device in trace.step_stats.dev_stats:
        for node in device.node_stats:
            if "ReadVariableOp" in node.node_name:
                records = [record for memory in node.memory for record in memory.allocation_records]
                found[device.device] += [
                    (r.alloc_micros, r.alloc_bytes) for r in records if abs(r.alloc_bytes) >= LAYER_BYTES
                ]
    return {device: sorted(events) for device, events in found.items() if events}


def peak(events: Iterable[tuple[int, int]]) -> int:
    total = top = 0
    for _, size in events:
        total += size
        top = max(top, total)
    return top


def test_a_gathered_variable_is_freed_after_the_forward_pass_and_gathered_anew(monkeypatch: pytest.MonkeyPatch):
    events = gathered(ar.rewrite(deep(), over_data(3)))

    assert len(events) == 4
    for mine in events.values():
        assert sum(size for _, size in mine) == 0
        assert sum(size > 0 for _, size in mine) == 2 * LAYERS - 1  # nobody needs the gradient of the input
        assert peak(mine) <= 2 * LAYER_BYTES
    monkeypatch.setattr(residence, "gather_on_use", lambda graph, wholes: 0)
    for mine in gathered(ar.rewrite(deep(), over_data(3))).values():  # as it would be otherwise
        assert peak(mine) >= (LAYERS - 1) * LAYER_BYTES


def test_looking_rows_up_does_not_keep_what_is_gathered_of_other_variables():
    graph = ar.rewrite(deep(looks_up=True), over_data(3)).graph
    wholes = [node for node in graph if node.name.startswith("replica_0/MatMul") and node.name.endswith("/all_gather")]
    assert len(wholes) == 2 * LAYERS


def test_each_micro_batch_gathers_for_itself_so_that_one_after_another_is_given_back(monkeypatch: pytest.MonkeyPatch):
    item = deep()
    micro = over_data(3) | {"microbatches": 4}

    def joins() -> int:
        return sum(node.name.endswith("/again/all_gather") for node in ar.rewrite(item, micro).graph)

    assert joins() == LAYERS * 4 * 4  # replicas, micro-batches
    feeds = {"x:0": np.random.default_rng(1).normal(size=(2048, WIDTH)).astype("float32")}

    def most(config: dict[str, Any]) -> float:
        new = ar.rewrite(item, config)
        return min(allocated(stats, new) for stats in traced(new, Built(item), feeds, 3))

    whole, after_another = most(over_data(3)), most(micro)
    assert after_another < 0.5 * whole
    plan = ar.build_plan(item, micro)
    predicted = ar.simulate(item, plan, batch=2048).devices[1]
    assert predicted.peak_bytes - predicted.variable_bytes == pytest.approx(after_another, rel=0.2)
    monkeypatch.setattr(Plan, "gathers_for_each", property(lambda plan: False))
    assert joins() == LAYERS * 4  # as it would be otherwise: all micro-batches would wait for one gather
