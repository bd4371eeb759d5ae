"""Which lengths may differ between workers: found by what depends on them, and said where they may not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar

F = tf.float64
CONFIG = {"cluster": {"workers": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "devices": ["CPU:0"]}
X, IDS = tf.TensorSpec([None, None, 4], F), tf.TensorSpec([None, None], tf.int64)


def plan_of(loss: Callable[..., Any], *specs: tf.TensorSpec, shape: tuple[int, ...] = (4, 4), **more: Any) -> ar.Plan:
    """Return the plan of two workers for a step that descends along the gradient of a loss."""
    w = tf.Variable(np.full(shape, 0.5), name="w")

    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            result = loss(w, *given)
        first = result[0] if isinstance(result, tuple) else result
        w.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(first, w)))
        return result

    return ar.build_plan(ar.GraphItem.from_function(step, *specs), {**CONFIG, **more})


def ragged(plan: ar.Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(given.ragged for given in plan.batch_inputs)


RAGGED = {
    "a mean of tokens": lambda w, x: tf.reduce_mean((x @ w) ** 2),
    "a mean of sums over time": lambda w, x: tf.reduce_mean(tf.reduce_sum((x @ w) ** 2, [1, 2])),
    "a mean over time of each example": lambda w, x: tf.reduce_mean(tf.reduce_mean(x @ w, 1) ** 2),
    "a mean that divides by sizes": lambda w, x: tf.reduce_sum((x @ w) ** 2) / tf.cast(tf.size(x), F),
    "a size of one's own": lambda w, x: tf.reduce_sum(x @ w) / tf.cast(tf.shape(x)[0] * tf.shape(x)[1], F),
    "weights of places in time": lambda w, x: tf.reduce_mean(
        (x @ w) * tf.cast(tf.range(tf.shape(x)[1]), F)[None, :, None]
    ),
    "tokens as rows": lambda w, x: tf.reduce_mean((tf.reshape(x, [-1, 4]) @ w) ** 2),
    "attention": lambda w, x: tf.reduce_mean(tf.nn.softmax(x @ w @ tf.transpose(x, [0, 2, 1])) @ x),
    "the last place": lambda w, x: tf.reduce_mean((x @ w)[:, -1] ** 2),
    "a loop over time": lambda w, x: tf.reduce_mean(
        tf.while_loop(
            lambda t, _: t < tf.shape(x)[1],
            lambda t, h: (t + 1, tf.tanh(h @ w + x[:, t])),
            (0, tf.zeros([tf.shape(x)[0], 4], F)),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 4])),
        )[1]
    ),
}


@pytest.mark.parametrize("name", RAGGED)
def test_workers_may_have_sequences_of_other_lengths(name: str) -> None:
    plan = plan_of(RAGGED[name], X)
    assert ragged(plan) == ((1,),), plan.notes
    assert not any("one length" in note for note in plan.notes)


def _total_by_place(w: Any, x: Any) -> Any:
    return tf.reduce_sum(tf.reduce_sum(x @ w, 0) ** 2)


REFUSED = {
    "a sum over examples at each place, squared": (_total_by_place, "it is exchanged"),
    "a total divided by a length": (
        lambda w, x: tf.reduce_sum(x @ w) / tf.cast(tf.shape(x)[1], F),
        "an output that depends",
    ),
    "a length as an output": (lambda w, x: (tf.reduce_mean(x @ w), tf.shape(x)[1]), "an output that depends"),
    "noise that all agree on": (
        lambda w, x: tf.reduce_mean(x @ w + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=F)),
        "takes its part of a whole",
    ),
    "rows that a mask keeps, whole": (
        lambda w, x: tf.reduce_mean(tf.boolean_mask(x @ w, x[..., 0] > 0) ** 2),
        "meets a length with what all workers have added up or gathered",
    ),
    "places in rows of the whole batch": (
        lambda w, x: tf.reduce_mean(tf.reduce_sum(tf.math.top_k(tf.transpose(x @ w, [0, 2, 1]), 1)[0], [1, 2])),
        "is exchanged, and its shape may depend",
    ),
    "a branch by the length": (
        lambda w, x: tf.cond(tf.shape(x)[1] > 3, lambda: tf.reduce_mean(x @ w), lambda: tf.reduce_sum(x @ w)),
        "chooses a branch|exchanged|depends on the length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_needs_one_length_says_which_op_does(name: str) -> None:
    loss, why = REFUSED[name]
    plan = plan_of(loss, X)
    assert ragged(plan) == ((),)
    (note,) = [note for note in plan.notes if "one length" in note]
    assert re.search(
        rf"dimension 1 of '\w+' has to have one length in all workers, because of \w+ '.*: .*({why})", note
    )


def test_each_dimension_is_judged_by_itself() -> None:
    plan = plan_of(
        lambda w, x: tf.reduce_sum(tf.reduce_sum(x, 0) ** 2, 1)[0] * tf.reduce_sum(w),
        tf.TensorSpec([None, None, None], F),
    )
    assert ragged(plan) == ((),)
    both = plan_of(lambda w, x: tf.reduce_mean(x) * tf.reduce_sum(w), tf.TensorSpec([None, None, None], F))
    assert ragged(both) == ((1, 2),)


def test_an_output_in_blocks_is_padded_where_nobody_else_reads_it_whole() -> None:
    plan = plan_of(lambda w, x: (tf.reduce_mean(x @ w), x @ w), X)
    assert ragged(plan) == ((1,),)
    (edge,) = [edge for edge in plan.edges if edge.padded]
    assert (edge.padded, edge.lowering, edge.reason) == ((1,), "host_gather", "it is an output")
    assert (edge.value, "sizes") in {(other.value, other.to) for other in plan.edges}


def test_padding_none_and_one_process_leave_lengths_as_they_are() -> None:
    assert ragged(plan_of(RAGGED["a mean of tokens"], X, padding="none")) == ((),)
    alone = plan_of(RAGGED["a mean of tokens"], X, cluster=None, devices=["CPU:0", "CPU:1"])
    assert ragged(alone) == ((),)


def test_positions_are_looked_up_in_the_true_length() -> None:
    tokens = tf.constant(np.ones((9, 4)))
    plan = plan_of(
        lambda w, ids: tf.reduce_mean((tf.gather(tokens, ids) * tf.gather(w, tf.range(tf.shape(ids)[1]))) ** 2),
        IDS,
        shape=(9, 4),
    )
    assert ragged(plan) == ((1,),), plan.notes
