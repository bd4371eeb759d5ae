"""What no server takes goes between the workers of a job with servers, and a run is over for all of them at once."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.config.config import Config
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.runtime.engine.staleness_clock import FinishTogether
from autograph_rewrite.runtime.job.digests import ancestors
from autograph_rewrite.strategies import builder_for
from tests.support.rank_jobs import item_of
from tests.support.rewriting import run_pipeline
from tests.support.small_items import regression

WORKERS, SERVERS = ["127.0.0.1:11", "127.0.0.1:12"], ["127.0.0.1:21", "127.0.0.1:22"]
OWN = "/job:worker/replica:0/task:1/"


def rank_1(item: GraphItem, strategy: str, *, servers: int = 1, **more: Any) -> GraphItem:
    """Rewrite an item for the second of two workers."""
    cluster = {"workers": WORKERS, **({"ps": SERVERS[:servers]} if servers else {})}
    config = Config.of({"devices": ["CPU:0"], "cluster": cluster, "strategy": {"name": strategy}, **more})
    flat = normalise(item)
    return run_pipeline(flat, builder_for(config).build(flat, config), task=1)


def lowerings(item: GraphItem) -> tuple[set[str], set[str]]:
    """Return the lowerings of edges that stores on servers carry, and of those that collectives do."""
    edges = item.report.plan.edges
    stored = {edge.lowering for edge in edges if edge.lowered.is_stored}
    return stored, {edge.lowering for edge in edges if edge.is_collective}


def test_servers_take_what_is_for_their_variables_and_nothing_else() -> None:
    item = rank_1(item_of("language_model"), "Parallax")
    plan = item.report.plan
    assert {edge.owner for edge in plan.edges if edge.lowered.is_stored} == set(plan.homes) != set()
    dense = {request.name for request in plan.variables} - set(plan.homes)
    assert dense & {edge.owner for edge in plan.edges if edge.is_collective}


def test_text_goes_through_a_server_as_no_collective_knows_it() -> None:
    graph = tf.Graph()
    v1 = tf.compat.v1
    with graph.as_default():
        words = v1.placeholder(tf.string, [None], name="words")
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        w = v1.get_variable("w", [3, 1], use_resource=True)
        loss = tf.reduce_mean(tf.square(x @ w), name="loss")
        tf.identity(words, name="said")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.group(v1.global_variables_initializer(), name="init")
    inputs = {"x": 0, "words": 0}
    item = GraphItem.from_graph(graph, train_op="train", outputs=["loss", "said"], init_op="init", batch_inputs=inputs)
    stored, collective = lowerings(rank_1(item, "PS"))
    assert stored == {"accumulator", "server_gather"}
    assert collective


@pytest.mark.parametrize(
    ("model", "strategy", "more"),
    [
        pytest.param("lstm_v1", "PS", {}, id="a loop reads a variable on a server"),
        pytest.param("cond_v1", "PS", {}, id="a branch does"),
        pytest.param("loss_scaling", "PS", {}, id="a branch updates one"),
        pytest.param("mlp", "PS", {"servers": 0}, id="a worker is the server"),
        pytest.param("mlp", "PSLoadBalancing", {"servers": 2}, id="there are two servers"),
    ],
)
def test_all_goes_through_servers_where_runs_cannot_end_together(model: str, strategy: str, more: Any) -> None:
    stored, collective = lowerings(rank_1(item_of(model), strategy, **more))
    assert stored
    assert not collective


def test_a_loop_that_reads_copies_on_the_worker_hinders_nothing() -> None:
    proxies = {"variables": [{"match": ".*", "synchronizer": "ps", "proxy": True}]}
    assert lowerings(rank_1(item_of("lstm_v1"), "PS", **proxies))[1]


class Runs:
    """What the runs of a worker fetch."""

    def __init__(self, item: GraphItem) -> None:
        self.item, self.graph = item, tf.Graph()
        with self.graph.as_default():
            tf.graph_util.import_graph_def(item.graph_def, name="")
        addresses = tuple(WORKERS)
        member = Membership(workers=addresses, task=1, job="worker", ps=tuple(SERVERS[:1]), source="a test")
        self.finish = FinishTogether(item, member, self.graph)

    def of(self, *names: str) -> list[Any]:
        """Return what is fetched for these."""
        return self.finish.of([self.graph.as_graph_element(name) for name in names])


def test_a_run_is_over_behind_all_that_is_fetched_and_what_servers_compute_comes_here_first() -> None:
    runs = Runs(rank_1(regression(), "PS"))
    loss, train, last = runs.of("loss:0", "train")
    assert last.type == "CollectiveReduceV2"
    assert train is runs.graph.get_operation_by_name("train")
    behind = ancestors([last])
    assert {loss.op, train} <= behind
    read, over = runs.of("w/Read:0", "loss:0")[::2]
    assert read.device.startswith(OWN)
    assert read.op in ancestors([over])
    assert runs.graph.get_tensor_by_name("w/Read:0").device.startswith("/job:ps/")


def test_a_run_that_meets_nobody_is_left_as_it_is() -> None:
    runs = Runs(rank_1(regression(), "PS"))
    assert [one.name for one in runs.of("init")] == ["init"]


def test_runs_are_joined_once_and_alike_in_all_workers() -> None:
    runs = Runs(rank_1(regression(), "PS"))
    before = len(runs.graph.get_operations())
    first = runs.of("loss:0")
    added = len(runs.graph.get_operations())
    assert added > before
    assert runs.of("loss:0") is first
    assert len(runs.graph.get_operations()) == added
