"""A shard that is gathered anew for the backward pass is read before its update, whatever TensorFlow optimises away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update

CONFIG = {"cluster": {"workers": ["a:1", "b:1"]}, "strategy": {"name": "FSDP"}}
BOTH = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "FSDP", "variables": "mirrored"}}
SIZE = 6


def step_with_gradients_handed_on_together(*, under_a_condition: bool = False) -> Any:
    """Return a step like those of Keras' optimizers: all gradients go through one IdentityN.

    Args:
        under_a_condition: whether updates are made in every other step only, as `gradient_accumulation_steps` does.
    """
    weights = [tf.Variable(np.random.default_rng(i).normal(size=(SIZE, SIZE)), dtype=tf.float64) for i in range(3)]
    count = tf.Variable(0, dtype=tf.int64)

    @tf.function(input_signature=[tf.TensorSpec([None, SIZE], tf.float64)])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_sum(tf.square(h))
        gradients = tf.raw_ops.IdentityN(input=tape.gradient(loss, weights))

        def update() -> Any:
            for w, gradient in zip(weights, gradients, strict=True):
                w.assign_sub(0.1 * gradient)
            return tf.constant(True)

        if under_a_condition:
            tf.cond(count % 2 > 0, update, lambda: tf.constant(False))
            count.assign_add(1)
        else:
            update()
        return loss

    return step


def reached(node: Node) -> set[Node]:
    """Return what waits for a node, if each value of an IdentityN waits for its own operand only."""
    seen: set[Node] = set()
    pending = [(use.node, use.index) for value in node.outputs for use in value.uses]
    pending += [(user, None) for user in node.control_users]
    while pending:
        user, index = pending.pop()
        if user.op == "IdentityN" and index is not None:
            pending += [(use.node, use.index) for use in user.output(index).uses]
        elif user not in seen:
            seen.add(user)
            pending += [(use.node, use.index) for value in user.outputs for use in value.uses]
            pending += [(other, None) for other in user.control_users]
    return seen


@pytest.mark.parametrize("under_a_condition", [False, True])
def test_every_read_of_a_shard_comes_before_its_update(under_a_condition: bool) -> None:
    step = step_with_gradients_handed_on_together(under_a_condition=under_a_condition)
    item = ar.GraphItem.from_function(step)
    graph = ar.rewrite(item, CONFIG, task=0).graph
    again = [node for node in graph if node.op == "ReadVariableOp" and "/again" in node.name]
    assert len(again) > 1
    for read in again:
        updates = [use.node for use in handle_uses(handle_node(read.inputs[0])) if is_update(use.node)]
        assert updates
        assert reached(read).issuperset(updates), read.name


def test_what_was_read_before_an_update_under_a_condition_is_not_gathered_after_it() -> None:
    w = tf.Variable(np.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            before = w.value()
            h = tf.tanh(x @ before)
            loss = tf.reduce_sum(h)
        slope = tape.gradient(loss, w)
        tf.cond(loss > -1e9, lambda: w.assign_sub(slope), lambda: w.read_value())
        return tf.reduce_sum((h @ w.read_value()) @ before)

    item = ar.GraphItem.from_function(step, tf.TensorSpec([None, SIZE], tf.float64))
    assert ar.rewrite(item, BOTH).variables["w"].shards is not None
    report = ar.verify(item, BOTH)
    assert report.ok, report
