"""Variables that live on one device: what runs there, in one process and in a job, and what it computes."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import Mesh
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.verify.folded import folded_faults
from autograph_rewrite.ir.verify.ranks import verify_ranks
from autograph_rewrite.normalize.normalize import normalise
from tests.seeded_mistakes.ranks import mutants, refusal
from tests.seeded_mistakes.servers import KINDS
from tests.support.covering import covering
from tests.support.rank_jobs import SERVED, Job, item_of, served_job, served_jobs
from tests.support.small_items import regression
from tests.support.training import train, v1
from tests.zoo import ZOO

STRATEGIES = ("PS", "PSLoadBalancing", "Parallax")
MODES = ("shared", "mirrored")
PS = "/job:ps/replica:0/task:0/device:CPU:0"


def in_one_process(item: GraphItem, strategy: str = "PS", mode: str = "shared", replicas: int = 2) -> GraphItem:
    """Rewrite an item for the devices of this process."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    return ar.rewrite(item, {"devices": devices, "strategy": {"name": strategy, "variables": mode}})


def graph_of(item: GraphItem) -> Graph:
    """Return the finished graph."""
    return serde.from_bytes(item.graph_bytes)


@pytest.mark.parametrize("mode", MODES)
def test_a_variable_is_there_once_and_its_slot_update_and_gradient_are_beside_it(mode: str) -> None:
    new = in_one_process(regression(), mode=mode)
    graph = graph_of(new)
    home = new.report.homes["w"]
    assert [node.name for node in graph if node.op == "VarHandleOp"] == ["w", "w/Momentum"]
    for name in ("w", "w/Momentum", "w/Assign", "w/Momentum/Assign", "update", "gradient/add_n"):
        assert graph.node(name).device == home, name
    replicas = {graph.node(f"replica_{i}/gradient").device for i in range(2)}
    assert replicas == ({"/device:CPU:0", "/device:CPU:1"} if mode == "mirrored" else {home})


def test_a_balanced_load_has_variables_on_all_devices_each_with_its_slots() -> None:
    homes = in_one_process(item_of("mlp", optimizer="adam"), "PSLoadBalancing", "mirrored").report.homes
    assert len(set(homes.values())) == 2
    for name, home in homes.items():
        assert homes[name.split("/Adam")[0]] == home
    assert any("/Adam_1" in name for name in homes)


def looking_up(optimizer: Callable[[], Any], reduction: Callable[[Any], Any]) -> GraphItem:
    """Return the training of rows that the input names."""
    graph = tf.Graph()
    with graph.as_default():
        ids = v1.placeholder(tf.int64, [None, None], name="ids")
        weights = v1.placeholder(tf.float64, [None, None], name="weights")
        rows = v1.get_variable("rows", initializer=np.zeros((6, 1)), use_resource=True)
        loss = tf.identity(reduction(tf.gather(rows, ids)[:, :, 0] * weights), name="loss")
        optimizer().minimize(loss, name="train")
        v1.global_variables_initializer()
    axes = {"ids": 0, "weights": 0}
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init", batch_inputs=axes)


def learnt(item: GraphItem, ids: Any, weights: Any, steps: int = 1) -> dict[str, Any]:
    """Train, and return the variables."""
    with item.session() as session:
        session.run("init")
        for _ in range(steps):
            session.run(["loss", "train"], {"ids": np.asarray(ids), "weights": np.asarray(weights, np.float64)})
        return session.read_variables()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["PS", "Parallax"])
def test_rows_are_divided_by_the_number_of_replicas_not_by_how_many_name_them(strategy: str, mode: str) -> None:
    """A mean of each row over the gradients that contain it would give -15 for row 2."""
    item = looking_up(lambda: v1.train.GradientDescentOptimizer(1.0), lambda y: tf.reduce_sum(y) / 2.0)
    found = learnt(in_one_process(item, strategy, mode), [[0, 2], [2, 5]], [[4, 6], [10, 20]])
    assert found["rows"].ravel().tolist() == [-2.0, 0.0, -8.0, 0.0, 0.0, -10.0]


OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
}
ROWS = {
    "repeated": [[1, 1], [1, 4], [4, 1]],
    "disjoint": [[0, 1], [2, 3], [4, 5]],
    "of one replica only": [[3, 2]],
}


@pytest.mark.parametrize(("optimizer", "ids"), covering(list(OPTIMIZERS), list(ROWS.values())))
def test_sparse_gradients_train_as_on_one_device(optimizer: str, ids: Any) -> None:
    item = looking_up(OPTIMIZERS[optimizer], lambda y: tf.reduce_sum(tf.square(y - 1)))
    weights = 1.0 + np.arange(2.0 * len(ids)).reshape(-1, 2)
    expected = learnt(item, ids, weights, 3)
    for strategy, mode in (("PS", "mirrored"), ("Parallax", "shared")):
        found = learnt(in_one_process(item, strategy, mode), ids, weights, 3)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, 1e-12, 1e-12, err_msg=f"{strategy}: {name}")


@cache
def small_job(ranks: int = 2, **server: Any) -> Job:
    """Return a job that trains `w` on a server."""
    requests = {"variables": [{"match": ".*", "synchronizer": "ps", **server}]} if server else {}
    return served_job("regression", normalise(regression()), ranks, 1, **requests)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_local_copy_is_refreshed_in_the_step_behind_the_update(rank: int) -> None:
    graph = small_job(proxy=True).graphs[rank]
    step = ancestors([graph.node("train")])
    refreshes = [n for n in step if n.op == "AssignVariableOp" and n.inputs[0].node.name == "w/proxy"]
    assert len(refreshes) == 1
    (refresh,) = refreshes
    waits = ancestors([refresh.inputs[1].node])
    assert any(node.name == "update" or (node.op == "QueueDequeueV2" and "token" in node.name) for node in waits)
    assert refresh.inputs[1].node.inputs[0].node.name == "w"
    assert graph.node("w/proxy").device == f"/job:worker/replica:0/task:{rank}/device:CPU:0"
    assert {node.inputs[0].node.name for node in graph if node.op == "ReadVariableOp"} == {"w/proxy", "w"}


def test_a_rewrite_for_a_thousand_workers_costs_about_what_one_for_two_costs(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "from tests.support.counted_calls import print_costs; print_costs('transformer', (0, 1), (2, 1024))"
    done = fresh_python(code, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    for (few, few_nodes), (many, many_nodes) in json.loads(done.stdout):
        assert few_nodes >= many_nodes > 1300  # two workers add small sums up in one shot, which takes a few nodes more
        assert many < 1.3 * few


@pytest.mark.parametrize(("model", "layout"), covering([*ZOO, "draws"], SERVED))
def test_the_graphs_of_all_workers_fit_together(model: str, layout: tuple[str, int, int, int]) -> None:
    (job,) = served_jobs(model, [layout])
    assert [fault.problem for fault in verify_ranks(job.graphs, job.original)] == [], job.name


def test_a_collective_in_a_loop_is_refused_with_what_to_do() -> None:
    with pytest.raises(PassError, match="AllReduce"):
        next(served_jobs("norm_in_loop"))


def test_a_worker_may_be_the_server() -> None:
    job = small_job()
    home = "/job:worker/replica:0/task:0/device:CPU:0"
    for graph in job.graphs:
        assert PS in {node.device for node in graph}
    moved = job.clone().graphs
    for node in [node for graph in moved for node in graph if node.device == PS]:
        node.set_device(home)
    assert any("the process of rank 0" in fault.problem for fault in verify_ranks(moved, job.original))
    assert verify_ranks(moved, job.original, [home]) == []


@pytest.mark.parametrize("model", ["mlp", "language_model", "lstm_v1", "cond_v1", "loss_scaling"])
def test_every_broken_exchange_through_a_server_is_refused(model: str) -> None:
    made: Counter[str] = Counter()
    for job in served_jobs(model):
        for mutant in mutants(job, KINDS):
            assert folded_faults(mutant.job.graphs[mutant.rank or 0], Mesh.of(1)) == [], (
                f"broken by itself: {mutant.sentence}"
            )
            assert refusal(mutant), f"accepted, or not named: {mutant.sentence}"
            made[mutant.kind] += 1
    assert made.total() >= 15, made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lookup_that_is_wanted_whole_in_the_forward_pass_is_no_part_of_an_update(strategy: str, mode: str) -> None:
    graph = tf.Graph()
    with graph.as_default():
        ids = v1.placeholder(tf.int64, [None, None], name="ids")
        table = v1.get_variable("table", initializer=np.linspace(-1, 1, 24).reshape(6, 4), use_resource=True)
        w = v1.get_variable("w", initializer=np.linspace(-1, 1, 8).reshape(4, 2), use_resource=True)
        pooled = tf.reduce_mean(tf.concat([tf.gather(table, ids), tf.gather(table, ids) ** 2], 2)[:, :, 2:6], 1)
        rows = tf.reshape(tf.gather(table, ids), [tf.size(ids), 4])  # of unknown length and batch: whole
        loss = tf.math.reduce_std(pooled @ w) + tf.math.reduce_std(tf.reshape(rows @ w, [-1]))
        slopes = [tf.convert_to_tensor(slope) for slope in v1.gradients(loss, [table, w])]
        tf.group([v.assign_sub(0.1 * slope) for v, slope in zip((table, w), slopes, strict=True)], name="train")
        tf.identity(loss, name="out_loss")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(graph, train_op="train", outputs=["out_loss"], init_op="init")
    feeds = [{"ids": np.random.default_rng(0).integers(0, 6, (5, 3))}] * 2
    expected, got = train(item, feeds), train(in_one_process(item, strategy, mode), feeds)
    for name, value in {**expected.fetched[1], **expected.variables}.items():
        np.testing.assert_allclose({**got.fetched[1], **got.variables}[name], value, 1e-9, err_msg=name)
