"""A run writes the variables that the same fetches write in the original graph, whatever is fetched, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from tests.support.training import MODES, distributed, placeholder, v1, variable

WORKERS = ["127.0.0.1:11", "127.0.0.1:12"]
SERVED = {"workers": WORKERS, "ps": ["127.0.0.1:21"]}
SERVERS = {"AllReduce": 0, "PS": 0, "PartitionedPS": 0, "FSDP": 0, "PSLoadBalancing": 1, "Parallax": 1}


def item_of(build: Callable[[], Any], outputs: list[str], *train: str, batch: str = "x") -> GraphItem:
    with tf.Graph().as_default() as graph:
        build()
        tf.group(v1.global_variables_initializer(), name="init")
    return GraphItem.from_graph(
        graph, train_op=list(train) or "train", outputs=outputs, init_op="init", batch_inputs={batch: 0}
    )


def rows_by_adam() -> GraphItem:
    """Adam reads the slots of rows anew behind their updates, and nothing uses what it reads."""

    def build() -> None:
        ids = v1.placeholder(tf.int32, [None], name="ids")
        loss = tf.reduce_mean(tf.gather(variable("rows", np.ones((4, 2))), ids) ** 2, name="loss")
        v1.train.AdamOptimizer(0.1).minimize(loss, name="train")

    return item_of(build, ["loss"], batch="ids")


def count() -> GraphItem:
    """A counter that no gradient leads to is read behind its update."""

    def build() -> None:
        x, w, seen = placeholder("x", None, 2), variable("w", np.ones((2, 1))), variable("seen", np.ones(3))
        update = seen.assign_add(np.ones(3))
        with tf.control_dependencies([update]):
            tf.identity(seen.read_value(), name="count")
        loss = tf.reduce_mean((x @ w) ** 2, name="loss")
        tf.group(v1.train.AdamOptimizer(0.1).minimize(loss, var_list=[w]), update, name="train")

    return item_of(build, ["loss", "count"])


def players() -> GraphItem:
    """One player looks, behind its update, at what the other one updates at any time."""

    def build() -> None:
        x, d, g = placeholder("x", None, 2), variable("d", np.ones((2, 1))), variable("g", np.ones((2, 2)))
        seen = v1.get_variable("seen", initializer=np.zeros((2, 2)), trainable=False, use_resource=True)
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        update = optimizer.minimize(tf.reduce_mean((x @ d) ** 2, name="loss"), var_list=[d])
        with tf.control_dependencies([update]):
            tf.group(seen.assign(g.read_value()), name="train_d")
        optimizer.minimize(tf.reduce_mean((x @ g) ** 2), var_list=[g], name="train_g")

    return item_of(build, ["loss"], "train_d", "train_g")


ITEMS = {"rows by Adam": rows_by_adam, "a counter": count, "players": players}


def differences(item: GraphItem, new: GraphItem) -> dict[str, Any]:
    """Return where a run of one output, target or initialiser writes something else."""
    names = {*item.targets, "init", *(info.tensor.partition(":")[0] for info in item.outputs.values())}
    names |= {variable.initializer for variable in item.variables.values() if variable.initializer}
    found = {name: new.layout.writes.differences([name]) for name in names}
    return {name: one for name, one in found.items() if any(one)}


@pytest.mark.parametrize("strategy", SERVERS)
@pytest.mark.parametrize("made", ITEMS.values(), ids=ITEMS)
def test_each_fetch_of_a_job_writes_what_it_writes_in_the_original(
    made: Callable[[], GraphItem], strategy: str
) -> None:
    item = made()
    cluster = SERVED if SERVERS[strategy] else {"workers": WORKERS}
    config = {"devices": ["CPU:0"], "strategy": {"name": strategy}, "cluster": cluster}
    for task in range(2):
        assert not differences(item, ar.rewrite(item, config, task=task)), task


@pytest.mark.parametrize("task", [0, 1])
def test_an_initialiser_of_one_variable_refreshes_its_copy_and_initialises_no_other(task: int) -> None:
    item = players()
    copies = {"variables": [{"match": ".*", "synchronizer": "ps", "proxy": True}]}
    config = {"devices": ["CPU:0"], "strategy": {"name": "PS"}, "cluster": SERVED, **copies}
    assert not differences(item, ar.rewrite(item, config, task=task))


@pytest.mark.parametrize("mode", MODES)
def test_one_player_trains_without_the_other(mode: str) -> None:
    item = players()
    with distributed(item, mode).session() as session:
        session.run("init")
        session.run("train_g", {"x": np.ones((4, 2))})
        np.testing.assert_array_equal(session.read_variable("d"), np.ones((2, 1)))
        assert (session.read_variable("g") != 1).all()


def test_what_would_not_write_what_it_writes_in_the_original_is_refused() -> None:
    """Between micro-batches nothing waits for what all of them update; what is not declared may be such."""

    def build() -> None:
        x, d, g = placeholder("x", None, 2), variable("d", np.ones((2, 1))), variable("g", np.ones((2, 2)))
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        first = optimizer.minimize(tf.reduce_mean((x @ d) ** 2, name="loss"), var_list=[d], name="first")
        with tf.control_dependencies([first]):
            second = optimizer.minimize(tf.reduce_mean(((x @ g) @ d.read_value()) ** 2), var_list=[g])
        tf.group(first, second, name="train")

    item = item_of(build, ["loss"])
    devices = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": "mirrored"}}
    feeds = {"x": np.ones((4, 2))}
    with ar.rewrite(item, {**devices, "microbatches": 2}).session() as session:
        session.run("init")
        with pytest.raises(ar.GraphError, match="a run of 'first' would not write 'd', as it does in the original"):
            session.run("first", feeds)
        session.run(["first", "train", "loss"], feeds)
        assert (session.read_variable("d") != 1).all()
