"""Residuals are variables: zero at first, one per replica, updated by the step that uses them, saved and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite import GraphItem
from autograph_rewrite.errors import GraphError
from tests.support.compressing import LIMIT, MODES, Net, Sums, batch, config, graph_item, residuals_of, sums_item

v1 = tf.compat.v1
ROWS = np.random.default_rng(0).normal(size=(2, 6, 7)).astype(np.float32)


def sums(mode: str, compressor: str = "topk") -> Sums:
    return Sums(sums_item(shape=(6, 7)), config(mode, compressor))


@pytest.mark.parametrize("mode", MODES)
def test_state_is_listed_apart_from_the_variables_with_its_shape(mode: str):
    new = ar.rewrite(sums_item(shape=(6, 7)), config(mode, "powersgd"))

    assert list(new.variables) == ["w"]
    assert {name: (v.shape, v.dtype, v.trainable) for name, v in new.state.items()} == {
        "w/autograph_residual": ((6, 7), "float32", False),
        "w/autograph_q": ((7, 2), "float32", False),
    }
    handles = [node for node in new.graph if node.op == "VarHandleOp" and "residual" in node.name]
    assert [node.attr("shape") for node in handles] == [(6, 7), (6, 7)]
    assert len({node.attr("shared_name") for node in handles}) == 2


@pytest.mark.parametrize("mode", MODES)
def test_residuals_start_at_zero_and_the_init_op_resets_them(mode: str):
    with sums(mode) as session:
        assert not session.residual().any()
        session.step(ROWS)
        assert session.residual().any()
        session.session.run("init")
        assert not session.residual().any()


def test_a_session_has_residuals_before_anything_was_initialised():
    new = ar.rewrite(sums_item(), config("shared", "topk"))
    with new.session() as session:
        assert session.read_variable("w/autograph_residual").shape == (2, 8)
        session.write_variable("w", np.zeros(8, np.float32))
        session.run("train", {"x": np.ones((2, 8), np.float32)}, timeout_ms=LIMIT)


@pytest.mark.parametrize("mode", MODES)
def test_residuals_are_read_and_written_by_replica(mode: str):
    with sums(mode) as session:
        session.session.write_variable("w/autograph_residual", ROWS)
        assert np.array_equal(session.residual(), ROWS)
        with pytest.raises(GraphError, match="a value for each of 2 replicas, not 3"):
            session.session.write_variable("w/autograph_residual", np.zeros((3, 6, 7), np.float32))
        with pytest.raises(GraphError, match="no variable 'w/autograph_residua'"):
            session.session.read_variable("w/autograph_residua")


@pytest.mark.parametrize("mode", MODES)
def test_looking_at_a_gradient_does_not_change_the_residuals(mode: str):
    with sums(mode) as session:
        session.step(ROWS)
        before = session.residual()
        session.session.run(["applied", "loss"], {"x": ROWS}, timeout_ms=LIMIT)
        assert np.array_equal(session.residual(), before)


@pytest.mark.parametrize("mode", MODES)
def test_each_of_two_train_ops_updates_its_own_residuals(mode: str):
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 8], name="x")
        for name in ("a", "b"):
            w = v1.get_variable(name, initializer=np.zeros(8, np.float32), use_resource=True)
            (gradient,) = v1.gradients(tf.reduce_sum(x * w), [w])
            tf.group(w.assign_sub(gradient), name=f"train_{name}")
        tf.reduce_sum(x, name="loss")
        tf.group(v1.global_variables_initializer(), name="init")
    item = GraphItem.from_graph(graph, train_op=["train_a", "train_b"], outputs=["loss"], init_op="init")
    with ar.rewrite(item, config(mode, "topk")).session() as session:
        session.run("init")
        feeds = {"x": np.arange(16, dtype=np.float32).reshape(2, 8)}
        session.run("train_a", feeds, timeout_ms=LIMIT)
        kept = [session.read_variable(f"{name}/autograph_residual").any() for name in ("a", "b")]
        assert kept == [True, False]
        session.run("train_b", feeds, timeout_ms=LIMIT)
        assert session.read_variable("b/autograph_residual").any()


@pytest.mark.parametrize("mode", MODES)
def test_a_saver_saves_and_restores_residuals(mode: str, tmp_path: Path):
    with sums(mode, "powersgd") as first:
        first.step(ROWS)
        with first.session.graph.as_default():
            path = v1.train.Saver(first.session.state).save(first.session.tf_session, str(tmp_path / "state"))
        assert [name for name, _ in tf.train.list_variables(path)] == [
            f"w/autograph_{what}/replica_{r}" for what in ("q", "residual") for r in range(2)
        ]
        with sums(mode, "powersgd") as second:
            with second.session.graph.as_default():
                v1.train.Saver(second.session.state).restore(second.session.tf_session, path)
            assert np.array_equal(second.residual(), first.residual())
            for _ in range(3):
                assert np.array_equal(first.step(ROWS), second.step(ROWS))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("traced", ["before restoring", "at the first call"])
def test_a_checkpoint_saves_and_restores_residuals(mode: str, traced: str, tmp_path: Path):
    specs = [tf.TensorSpec([None, 6]), tf.TensorSpec([None, 4])] if traced == "before restoring" else []
    net, again = Net(), Net()
    step = ar.distribute(net.step, config(mode, "topk"))
    for i in range(3):
        step(**batch(i))
    path = tf.train.Checkpoint(net=_module(net), step=step).save(str(tmp_path / "checkpoint"))
    assert "step/state/w1.Sautograph_residual.Sreplica_1/.ATTRIBUTES/VARIABLE_VALUE" in dict(
        tf.train.list_variables(path)
    )

    resumed = ar.distribute(again.step, config(mode, "topk"), *specs)
    status = tf.train.Checkpoint(net=_module(again), step=resumed).restore(path)
    for i in range(3, 6):
        expected, actual = step(**batch(i)), resumed(**batch(i))
        assert float(expected["loss"]) == float(actual["loss"])
    status.assert_consumed()
    kept = residuals_of(step)
    assert kept
    assert all(np.array_equal(value, kept[name]) for name, value in residuals_of(resumed).items())


def _module(net: Net) -> Any:
    module = tf.Module()
    module.weights = list(net.weights.values())
    return module


def test_more_replicas_than_were_saved_start_at_zero(tmp_path: Path):
    net = Net()
    step = ar.distribute(net.step, config("shared", "topk"))
    step(**batch(0))
    path = tf.train.Checkpoint(step=step).save(str(tmp_path / "checkpoint"))
    wider = ar.distribute(net.step, config("shared", "topk", 3), tf.TensorSpec([None, 6]), tf.TensorSpec([None, 4]))
    tf.train.Checkpoint(step=wider).restore(path)

    for name, rows in residuals_of(wider).items():
        assert np.array_equal(rows[:2], residuals_of(step)[name])
        assert not rows[2].any()


def test_a_step_without_state_can_be_in_a_checkpoint_all_the_same(tmp_path: Path):
    net = Net()
    step = ar.distribute(net.step, config("shared"))
    step(**batch(0))
    checkpoint = tf.train.Checkpoint(step=step)
    checkpoint.restore(checkpoint.save(str(tmp_path / "checkpoint"))).assert_consumed()


def test_a_rewritten_graph_is_saved_with_its_state_and_a_function_is_not(tmp_path: Path):
    new = ar.rewrite(sums_item(), config("shared", "topk"))
    new.save(tmp_path / "graph.ar")
    with GraphItem.load(tmp_path / "graph.ar").session() as session:
        session.run("init")
        feeds = {"x": np.array([[4, 3, 2, 1], [1, 2, 3, 4]], np.float32).repeat(2, axis=1)}
        applied = [session.run(["applied", "train"], feeds, timeout_ms=LIMIT)[0] for _ in range(2)]
        assert not np.array_equal(applied[0], applied[1])  # the second step sends what the first kept back
    net = Net()
    function = GraphItem.from_function(net.step, tf.TensorSpec([None, 6]), tf.TensorSpec([None, 4]))
    with pytest.raises(GraphError, match="live outside of its graph"):
        ar.rewrite(function, config("shared", "topk")).save(tmp_path / "function.ar")


def test_the_original_does_not_learn_of_the_state():
    item = graph_item()
    ar.rewrite(item, config("mirrored", "powersgd"))

    assert not item.state
    assert not [node for node in item.graph if "autograph" in node.name]
