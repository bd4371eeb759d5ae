"""A shard that is gathered anew for the backward pass is read before its update, whatever TensorFlow optimises away."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.variable_ops import is_update

CONFIG = {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "FSDP", "variables": "mirrored"}}
SIZE = 6


def step_with_gradients_handed_on_together() -> Any:
    """Return a step like those of Keras' optimizers: all gradients go through one IdentityN."""
    weights = [tf.Variable(np.random.default_rng(i).normal(size=(SIZE, SIZE)), dtype=tf.float64) for i in range(3)]

    @tf.function(input_signature=[tf.TensorSpec([None, SIZE], tf.float64)])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.tanh(h @ w)
            loss = tf.reduce_sum(tf.square(h))
        gradients = tf.raw_ops.IdentityN(input=tape.gradient(loss, weights))
        for w, gradient in zip(weights, gradients, strict=True):
            w.assign_sub(0.1 * gradient)
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


def test_every_read_of_a_shard_comes_before_its_update() -> None:
    item = ar.GraphItem.from_function(step_with_gradients_handed_on_together())
    graph = ar.rewrite(item, CONFIG).graph
    again = [node for node in graph if node.op == "ReadVariableOp" and "/again" in node.name]
    assert len(again) > 1
    for read in again:
        handle = read.inputs[0]
        updates = [use.node for use in handle.uses if is_update(use.node)]
        assert updates
        assert reached(read).issuperset(updates), read.name
