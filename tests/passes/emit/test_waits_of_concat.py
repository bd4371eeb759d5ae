"""TensorFlow's constant folding counts what a ConcatV2 waits for as an operand; so its first operand waits."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.ir.verify.expanded import check_expanded

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=(8, 3, 2))


def item() -> GraphItem:
    """Return an item whose shapes are joined of three parts, once their input was checked."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 3, 2], "x")
        w = v1.get_variable("w", initializer=np.ones((2, 2)), use_resource=True)
        first, three, two = v1.shape(x)[0:1], tf.constant([1]), tf.constant([6])
        with tf.control_dependencies([tf.debugging.check_numerics(x, "x")]):
            joined = tf.concat([first, three, two], 0, name="joined")
        rows = tf.reshape(x, joined)
        loss = tf.reduce_mean(tf.square(tf.reshape(rows, [-1, 2]) @ w), name="loss")
        v1.train.GradientDescentOptimizer(0.01).minimize(loss, name="train")
        v1.variables_initializer([w], name="init")
    return GraphItem.from_graph(graph, train_op="train", outputs=["loss"], init_op="init")


def test_no_concat_of_three_waits_for_anything_itself() -> None:
    new = ar.rewrite(item(), {"devices": ["CPU:0"], "microbatches": 2})
    joins = [n for n in new.graph_def.node if n.op == "ConcatV2" and n.attr["N"].i > 2]
    assert joins
    assert not any(name.startswith("^") for node in joins for name in node.input)
    waiting = [n for n in new.graph_def.node if n.name.endswith("/waits")]
    assert waiting, "the test is about nodes that wait"
    assert all(n.op == "Identity" and n.input[-1].startswith("^") and n.device for n in waiting)
    check_expanded(new.graph_bytes, item(), new.report.plan.all_devices, micro=2)


def test_a_session_of_a_server_runs_it() -> None:
    new = ar.rewrite(item(), {"devices": ["CPU:0"], "microbatches": 2})
    server = tf.distribute.Server.create_local_server()
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(new.graph_def, name="")
    with new.session() as session, v1.Session(server.target, graph=graph) as served:
        names = [f"{node.name}:0" for node in new.graph_def.node if node.op == "ConcatV2" and node.attr["N"].i > 2]
        assert all(list(value) == [4, 1, 6] for value in served.run(names, {"x:0": X}))
        session.run("init")
        assert np.isclose(session.run("loss", {"x": X}), np.mean(np.square(X.reshape(-1, 2) @ np.ones((2, 2)))))
