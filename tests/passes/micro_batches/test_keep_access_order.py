"""What is read before an update stays before it, also where what lay between them need not be waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.analysis.variable_uses import completions
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.normalize.normalize import normalise
from tests.seeded_mistakes.draws import Draw
from tests.support.rewriting import run_pipeline


@pytest.mark.parametrize(("config", "behind"), [("micro_one", "assign-devices"), ("loop_one", "roll-loop")])
def test_an_update_that_waits_for_gradients_comes_behind_what_they_need_read(config: str, behind: str) -> None:
    draw, seen = Draw("ordered_updates", "own", config), list[str]()

    def look(name: str, graph: Graph) -> None:
        if name in ("order-accesses", behind):
            update, read = graph.nodes["AssignSubVariableOp"], graph.nodes["matmul/ReadVariableOp"]
            assert read in ancestors([update]), name
            seen.append(name)

    run_pipeline(draw.flat, draw.plan, observers=[look])
    assert seen == ["order-accesses", behind]


def _read_in_loop(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x])[1]


def _read_in_branch(x: Any, w: Any) -> Any:
    return tf.cond(tf.shape(x)[1] > 2, lambda: tf.tanh(x @ w), lambda: x)


@pytest.mark.parametrize("network", [_read_in_loop, _read_in_branch])
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"strategy": {"name": "AllReduce", "variables": "mirrored"}}])
def test_what_a_loop_or_branch_reads_is_read_before_weights_decay(network: Any, options: dict[str, Any]) -> None:
    w = tf.Variable(np.eye(4), dtype=tf.float64)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(network(x, w)))
        slope = tape.gradient(loss, w)
        w.assign_sub(0.01 * w, name="decay")
        w.assign_sub(0.1 * slope)
        return loss

    item = ar.GraphItem.from_function(step, tf.TensorSpec((None, 4), tf.float64))
    plan, seen = ar.build_plan(item, {"devices": ["CPU:0", "CPU:1"], **options}), list[str]()

    def look(name: str, graph: Graph) -> None:
        if name not in ("order-accesses", "assign-devices"):
            return
        order = topological_order(graph)
        always = unconditional_nodes(order)
        reads = [node for node in order if node.op == "ReadVariableOp" and node not in always]
        decay = next(node for node in order if node.op == "AssignSubVariableOp")
        ends = completions(order, always, reads)
        assert reads
        assert all(ends.values())
        assert ancestors([decay]).issuperset(end for found in ends.values() for end in found), name
        seen.append(name)

    run_pipeline(normalise(item), plan, observers=[look])
    assert seen == ["order-accesses", "assign-devices"]
