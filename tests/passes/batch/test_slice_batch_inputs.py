"""An iterator inside a graph gives every process the whole batch: each takes its rows, if all surely get the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.traversal import ancestors

v1 = tf.compat.v1
CLUSTER = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1", "c:1"]}}
Pipeline = Callable[[Any], Any]


def item_of(
    pipeline: Pipeline = lambda data: data, *, initializable: bool = False, seed: int | None = None
) -> GraphItem:
    """Return a graph with an iterator inside, which trains on batches of 7."""
    graph = tf.Graph()
    with graph.as_default():
        if seed is not None:
            v1.set_random_seed(seed)
        data = pipeline(tf.data.Dataset.from_tensor_slices(np.arange(21.0))).batch(7)
        make = v1.data.make_initializable_iterator if initializable else v1.data.make_one_shot_iterator
        x = make(data).get_next(name="next")
        w = v1.get_variable("w", initializer=np.float64(0), use_resource=True)
        tf.group(w.assign_add(tf.reduce_sum(x)), name="train")
        tf.group(v1.variables_initializer([w]), name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["next"], init_op="init")


@pytest.mark.parametrize(("task", "rows"), [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6])])
def test_each_process_takes_its_rows(task: int, rows: list[int]) -> None:
    new = ar.rewrite(item_of(), CLUSTER, task=task)
    assert new.report.plan.batch_inputs[0].whole
    graph_def = new.graph_def
    for node in graph_def.node:
        node.device = ""  # those of another process
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        assert session.run("next/own_part:0").tolist() == rows
    assert new.inputs["next"].tensor == "next/own_part:0"


def test_the_part_is_resolved_alike_for_all_processes() -> None:
    plans = [ar.rewrite(item_of(), CLUSTER, task=task).report.plan for task in range(3)]
    assert plans[0] == plans[1] == plans[2] == ar.build_plan(item_of(), CLUSTER)


BY_CHANCE: dict[str, tuple[Pipeline, str]] = {
    "shuffle": (lambda data: data.shuffle(5), "has no seed"),
    "map": (lambda data: data.map(lambda x: x + tf.random.uniform([], dtype=tf.float64)), "has no seed"),
    "nested": (
        lambda data: data.interleave(lambda x: tf.data.Dataset.from_tensors(x).shuffle(2), cycle_length=2),
        "has no seed",
    ),
    "order": (
        lambda data: data.map(lambda x: x + 1, num_parallel_calls=2, deterministic=False),
        "does not keep the order",
    ),
}


@pytest.mark.parametrize("initializable", [False, True])
@pytest.mark.parametrize("case", BY_CHANCE)
def test_a_pipeline_that_differs_from_process_to_process_is_refused(case: str, initializable: bool) -> None:
    pipeline, problem = BY_CHANCE[case]
    item = item_of(pipeline, initializable=initializable)
    with pytest.raises(GraphError, match=f"{problem}.*, so every process would make another batch") as caught:
        ar.rewrite(item, CLUSTER, task=0)
    assert "input: per_worker" in str(caught.value)


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda data: data.shuffle(5, seed=1),
        lambda data: data.map(lambda x: x + tf.random.uniform([], dtype=tf.float64)),
    ],
)
def test_a_pipeline_with_a_seed_is_taken(pipeline: Pipeline) -> None:
    ar.rewrite(item_of(pipeline, seed=1), CLUSTER, task=0)
    ar.rewrite(item_of(lambda data: data.shuffle(5, seed=1)), CLUSTER, task=0)


@pytest.mark.parametrize("static", [False, True])
def test_where_the_data_end_nobody_has_begun_to_exchange_anything(static: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        data = tf.data.Dataset.from_tensor_slices(np.arange(21.0)).batch(7, drop_remainder=static)
        x = v1.data.make_one_shot_iterator(data).get_next(name="next")
        w = v1.get_variable("w", initializer=np.float64(0), use_resource=True)
        tf.group(w.assign_add(tf.reduce_sum(x)), name="train")
    item = GraphItem.from_graph(graph, train_op="train", batch_inputs={"next": 0})
    collectives = [node for node in ar.rewrite(item, CLUSTER, task=1).graph if node.op.startswith("Collective")]
    assert len(collectives) == 2, "sizes with digests, and the gradient"
    for node in collectives:
        assert "next" in {one.name for one in ancestors([node])}, node
