"""In the normal form each value of an IdentityN goes its way alone, as TensorFlow's optimisations let it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.normalize.normalize import normalise, separate_identities
from autograph_rewrite.training_graph import TensorInfo
from tests.support.training import assert_trains_alike, make_item, placeholder, variable

X = np.arange(8.0).reshape(4, 2)


def graph_of_pairs() -> Graph:
    graph = Graph()
    first, second = (graph.add("Const", name=name, attrs={"value": 1.0, "dtype": 2}).output() for name in "ab")
    ready = graph.add("NoOp", name="ready")
    pair = graph.add("IdentityN", [first, second], name="pair", controls=[ready])
    graph.add("Neg", [pair.output(1)], name="reader")
    graph.add("NoOp", name="user", controls=[pair])
    return graph


def test_readers_wait_for_one_value_and_control_users_for_all() -> None:
    graph = graph_of_pairs()
    separate_identities(graph, declared=())
    assert (graph.node("pair").op, [value.name for value in graph.node("pair").inputs]) == ("Identity", ["a"])
    assert [value.name for value in graph.node("reader").inputs] == ["pair/1"]
    assert {node.name for node in graph.node("user").controls} == {"pair", "pair/1"}
    assert all(graph.node(name).controls == (graph.node("ready"),) for name in ("pair", "pair/1"))


def test_what_is_read_from_outside_keeps_its_name() -> None:
    graph = graph_of_pairs()
    separate_identities(graph, declared=["pair"])
    assert [value.name for value in graph.node("pair").inputs] == ["pair/0", "pair/1"]
    assert [value.name for value in graph.node("reader").inputs] == ["pair/1"]
    assert not graph.node("pair").control_users


def gradients_handed_on_together() -> dict[str, Any]:
    x, w, u = placeholder("x", None, 2), variable("w", np.eye(2)), variable("u", np.ones(2))
    both = tf.raw_ops.IdentityN(input=[x @ w, x * u], name="both")
    return {"loss": tf.reduce_sum(both[0] * both[1])}


def test_a_program_trains_alike_and_its_outputs_are_still_there() -> None:
    item = make_item(gradients_handed_on_together)
    flat = normalise(item)
    assert [node.name for node in flat.graph if node.op == "IdentityN" and len(node.inputs) > 1] == []
    both = TensorInfo(name="out_both", tensor="both:1", dtype="float64", shape=(None, 2))
    assert_trains_alike(replace(item, outputs={**item.outputs, "out_both": both}), [{"x": X}] * 2)
