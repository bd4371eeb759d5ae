"""hierarchical: segments within segments; collection: what a collection of the graph lists is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import PlanError
from tests.passes.rematerialize.test_rematerialize import (
    LOOP,
    MICRO,
    MODELS,
    ONE,
    SMALL,
    SQRT,
    TWO,
    assert_same,
    peak_bytes,
    rewritten,
)
from tests.passes.rematerialize.test_stages import FEEDS, stages
from tests.support.recomputed import chain, executed
from tests.support.training import make_item, placeholder, v1, variable

NESTED = {"policy": "hierarchical"}
COLLECTION = {"policy": "collection"}


@pytest.mark.parametrize("name", MODELS)
def test_segments_within_segments_train_to_the_same_variables(name: str) -> None:
    forward, given = MODELS[name]
    item = make_item(forward)
    assert_same(item, rewritten(item, ONE, NESTED), given)


@pytest.mark.parametrize("config", [TWO, MICRO, LOOP], ids=["two", "micro", "loop"])
def test_segments_within_segments_of_replicas_and_micro_batches(config: Mapping[str, Any]) -> None:
    item = make_item(chain(27))
    new = rewritten(item, config, NESTED)
    assert any(segment.inside for segment in new.report.recomputed.segments)
    assert_same(item, new, SMALL)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "loop"])
def test_segments_within_segments_of_stages(schedule: str) -> None:
    item = make_item(chain())
    config = stages(schedule)
    config["pipeline"] |= {"stages": 2, "boundaries": ["layer_12/act"]}
    new = rewritten(item, config, NESTED)
    assert any(segment.inside for segment in new.report.recomputed.segments)
    assert_same(item, new, FEEDS)


def test_what_is_inside_is_computed_three_times_and_survives_tensorflow() -> None:
    item = make_item(chain(64))
    new = ar.rewrite(item, {**ONE, "remat": NESTED})
    made = [node for node in new.graph if "remat/" in node.name]
    names = [re.sub(r".*remat/\d+/", "", node.name) for node in made]
    assert max(map(names.count, names)) == 2
    assert executed(new, SMALL[0])["Tanh"] == 64 + sum(node.op == "Tanh" for node in made)
    once = ar.rewrite(item, {**ONE, "remat": SQRT}).report.recomputed
    added = sum(segment.all_flops for segment in new.report.recomputed.segments)
    assert 1.2 < added / sum(segment.all_flops for segment in once.segments) < 2


def test_segments_within_segments_need_a_part_of_the_memory_when_measured() -> None:
    item = make_item(chain(64, 16))
    assert peak_bytes(item, "hierarchical") < 0.4 * peak_bytes(item, "none")  # 0.2 to 0.3: the runtime runs ahead


def test_the_longer_a_chain_the_more_is_saved_by_segments_within_segments() -> None:
    def predicted(layers: int, policy: str) -> float:
        item = make_item(chain(layers, 16))
        plan = ar.build_plan(item, {**ONE, "remat": {"policy": policy}})
        return ar.simulate(item, plan, batch=512).devices[0].peak_bytes

    ratios = [predicted(layers, "hierarchical") / predicted(layers, "sqrt") for layers in (32, 64, 144)]
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[2] < 0.7


def collected(h: Any) -> Mapping[str, Any]:
    """Return layers of which each third is in the collection of checkpoints."""
    for i in range(9):
        h = tf.tanh(h @ variable(f"w{i}", np.eye(4) * 0.6 + 0.1), name=f"h{i}")
        if i % 3 == 2:
            v1.add_to_collection("checkpoints", h)
    return {"loss": tf.reduce_mean(h**2)}


def test_a_collection_is_kept_and_the_rest_is_computed_again() -> None:
    item = make_item(lambda: collected(placeholder("x", None, 4)))
    new = rewritten(item, ONE, COLLECTION)
    segments = new.report.recomputed.segments
    assert [segment.kept for segment in segments] == [(), ("h2",), ("h5",)]
    given = [{"x": one["x"]} for one in SMALL]
    assert_same(item, new, given)


def test_a_collection_comes_with_a_meta_graph_and_an_archive(tmp_path: Any) -> None:
    graph = tf.Graph()
    with graph.as_default():
        loss = collected(placeholder("x", None, 4))["loss"]
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        v1.global_variables_initializer()
        meta = v1.train.export_meta_graph(graph=graph)
    item = ar.GraphItem.from_graph(meta, train_op="train", outputs=[loss.op.name], init_op="init")
    item.save(tmp_path / "item.ar")
    for one in (item, ar.GraphItem.load(tmp_path / "item.ar")):
        assert len(ar.rewrite(one, {**ONE, "remat": COLLECTION}).report.recomputed.segments) == 3


def test_a_function_may_collect_too_and_an_empty_collection_is_an_error() -> None:
    weights = [tf.Variable(np.eye(4) * 0.5 + 0.1 * i) for i in range(6)]

    def step(x: Any, keep: bool = True) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i, w in enumerate(weights):
                h = tf.tanh(h @ w)
                if keep and i % 2:
                    v1.add_to_collection("checkpoints", h)
            loss = tf.reduce_mean(h**2)
        for w, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * slope)
        return loss

    spec = tf.TensorSpec([None, 4], tf.float64)
    item = ar.GraphItem.from_function(step, spec)
    assert len(ar.rewrite(item, {**ONE, "remat": COLLECTION}).report.recomputed.segments) == 3
    with pytest.raises(PlanError, match="nothing on the way to the loss is in the graph's collection 'checkpoints'"):
        ar.rewrite(ar.GraphItem.from_function(lambda x: step(x, False), spec), {**ONE, "remat": COLLECTION})
