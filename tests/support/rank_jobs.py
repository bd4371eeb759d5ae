"""Jobs of several ranks, rewritten from zoo entries: one graph per rank, as each of the processes would make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.config.config import Config
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise
from autograph_rewrite.runtime.function.session_step import stand_alone
from autograph_rewrite.strategies import builder_for
from tests.support.rewriting import run_pipeline
from tests.zoo import ZOO
from tests.zoo.training import control_flow

v1 = tf.compat.v1
LAYOUTS = (("mirrored", 1), ("mirrored", 2), ("shared", 2))
RANKS = (2, 3)
SERVED = (("PS", 1, 2, 1), ("PSLoadBalancing", 2, 3, 2), ("Parallax", 1, 3, 2))
"""Strategies, with the devices of each rank, the ranks, and the servers."""


@dataclass(frozen=True)
class Job:
    """One entry on several ranks: the graphs, and the item that they were made of."""

    name: str
    original: GraphItem
    graphs: tuple[Graph, ...]

    def clone(self) -> Job:
        """Return a copy whose graphs may be changed."""
        with no_garbage_collection():
            return replace(self, graphs=tuple(graph.clone() for graph in self.graphs))


def served_jobs(name: str, each: Sequence[tuple[str, int, int, int]] = SERVED, **options: Any) -> Iterator[Job]:
    """Yield an entry in jobs with parameter servers."""
    item = item_of(name, **options)
    flat = normalise(stand_alone(item) if item.binding is not None else item)
    for strategy, devices, ranks, servers in each:
        yield served_job(name, flat, ranks, servers, devices, strategy={"name": strategy})


def served_job(name: str, flat: GraphItem, ranks: int, servers: int, devices: int = 1, **more: Any) -> Job:
    """Rewrite a normalised item for every rank of a job with parameter servers."""
    cluster = {
        job: [f"127.0.0.1:{at}{i}" for i in range(n)] for job, at, n in (("workers", 1, ranks), ("ps", 2, servers))
    }
    each = [f"CPU:{i}" for i in range(devices)]
    config = Config.of({"devices": each, "cluster": cluster, "strategy": {"name": "PS"}, **more})
    plan = builder_for(config).build(flat, config)
    items = [run_pipeline(flat, plan, task=rank) for rank in range(ranks)]
    graphs = tuple(serde.from_bytes(one.graph_bytes) for one in items)
    return Job(f"{name}, {config.strategy.name} x {devices}, {ranks} ranks, {servers} servers", flat, graphs)


def item_of(name: str, **options: Any) -> GraphItem:
    """Wrap an entry of the zoo, or of `EXTRA`, as its user would."""
    if name in EXTRA:
        return EXTRA[name]()
    case = ZOO[name]
    built = case.build(**{"dtype": case.dtypes[0], **options})
    if case.kind == "graph":
        return ar.GraphItem.from_graph(
            built.graph,
            train_op=built.train_op,
            outputs=list(built.outputs),
            init_op=built.init_op,
            batch_inputs=dict(built.batch_inputs) or None,
        )
    if case.kind == "function":
        return ar.GraphItem.from_function(built.step, *built.specs, batch_inputs=dict(built.batch_inputs))
    x, y = tf.nest.map_structure(lambda v: tf.TensorSpec([None, *v.shape[1:]], v.dtype), built.feeds(0, 4))
    return ar.GraphItem.from_keras(built.model, x, y)


def norm_in_loop() -> GraphItem:
    """Return a recurrent step that takes the mean of the batch off in every iteration: collectives in a loop."""

    def forward(x: Any, weights: Any) -> Any:
        def body(i: Any, state: Any) -> tuple[Any, Any]:
            state = tf.tanh(tf.matmul(state, weights))
            return i + 1, state - tf.reduce_mean(tf.square(state), 0)

        with control_flow(v2=False):
            return v1.while_loop(lambda i, _: i < 3, body, [tf.constant(0), x])[1]

    return _regression(forward)


def draws() -> GraphItem:
    """Return a step with dropout that has no seed: what one rank draws, all use."""
    return _regression(lambda x, weights: tf.matmul(v1.nn.dropout(x, rate=0.5), weights))


def _regression(forward: Callable[[Any, Any], Any]) -> GraphItem:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        weights = v1.get_variable("weights", initializer=np.eye(3, dtype=np.float32), use_resource=True)
        bias = v1.get_variable("bias", initializer=np.zeros(3, np.float32), use_resource=True)
        loss = tf.reduce_mean(tf.square(forward(x, weights) + bias), name="loss")
        with control_flow(v2=False):
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        tf.reduce_mean(tf.abs(x), name="scale")
        v1.global_variables_initializer()
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss", "scale"], init_op="init")


EXTRA = {"norm_in_loop": norm_in_loop, "draws": draws}


def jobs_of(name: str, item: GraphItem, each: Sequence[int] = RANKS, **strategy: Any) -> Iterator[Job]:
    """Yield an item in every layout on each number of ranks, by turns with small sums in one shot and around rings."""
    flat = normalise(item)
    for at, (mode, devices) in enumerate(LAYOUTS):
        for ranks in each:
            hint = {"hint": ("ring", "auto")[(at + ranks) % 2]}
            yield job_of(name, flat, mode, devices, ranks, **hint | strategy)


def job_of(name: str, flat: GraphItem, mode: str, devices: int, ranks: int, **strategy: Any) -> Job:
    """Rewrite a normalised item for every rank."""
    config = Config.of(
        {
            "devices": [f"CPU:{i}" for i in range(devices)],
            "cluster": {"workers": [f"127.0.0.1:{rank + 1}" for rank in range(ranks)]},
            "strategy": {"name": "AllReduce", "variables": mode, **strategy},
        }
    )
    plan = builder_for(config).build(flat, config)
    items = [run_pipeline(flat, plan, task=rank) for rank in range(ranks)]
    with no_garbage_collection():
        graphs = tuple(serde.from_bytes(one.graph_bytes) for one in items)
    return Job(f"{name}, {mode} x {devices}, {ranks} ranks", flat, graphs)
