"""ar.explain and ar.verify take what ar.distribute has returned."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar

TWO = {"devices": ["CPU:0", "CPU:1"]}


def a_model() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return ar.distribute(model, TWO)


def a_function() -> Any:
    w = tf.Variable(tf.ones([3, 1]))

    def step(x: Any) -> Any:
        w.assign_sub(0.1 * tf.reduce_sum(x, 0)[:, None])
        return tf.reduce_mean(x @ w)

    return ar.distribute(step, TWO)


def trained_model() -> Any:
    model = a_model()
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    model.predict_on_batch(np.ones((4, 3)))
    return model


def trained_function() -> Any:
    function = a_function()
    function(tf.ones([4, 3]))
    return function


@pytest.mark.parametrize("made", [trained_model, trained_function])
def test_what_was_distributed_is_explained_and_verified(made: Any) -> None:
    given = made()
    assert "2 replicas" in ar.explain(given)
    report = ar.verify(given)
    assert report.ok
    assert ar.verify(given, {"devices": ["CPU:0", "CPU:1", "CPU:2"]}, steps=1).ok


def test_each_trace_is_explained() -> None:
    assert ar.explain(trained_model()).count("The graph of") == 2


def test_verifying_leaves_the_variables_as_they_are() -> None:
    model = trained_model()
    before = [np.array(weight) for weight in model.get_weights()]
    ar.verify(model)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("made", [a_model, a_function])
@pytest.mark.parametrize("verb", [ar.explain, ar.verify])
def test_what_has_run_no_step_has_nothing_to_tell(made: Any, verb: Any) -> None:
    with pytest.raises(ar.GraphError, match=r"has run no step on several devices yet[\s\S]*run a step"):
        verb(made())


@pytest.mark.parametrize("verb", [ar.explain, ar.verify])
def test_something_else_is_refused_by_its_type(verb: Any) -> None:
    with pytest.raises(ar.GraphError, match=r"object of type function[\s\S]*what ar\.distribute has returned"):
        verb(lambda x: x)


def a_plain_function() -> Any:
    w = tf.Variable(tf.ones([3, 1]))

    def step(x: Any) -> Any:
        w.assign_sub(0.1 * tf.reduce_sum(x, 0)[:, None])
        return tf.reduce_mean(x @ w)

    return step


def test_what_distribute_takes_is_traced_for_specs() -> None:
    step, specs = a_plain_function(), [tf.TensorSpec([None, 3])]
    assert ar.verify(step, "all_reduce", specs=specs).ok
    assert ar.bisect(step, "all_reduce", specs=specs).ok
    assert ar.reduce(step, "all_reduce", specs=specs).kind == ""
    assert ar.simulate(step, "all_reduce", specs=specs).replicas == 2
    assert "2 replicas" in ar.explain(step, "all_reduce", specs=specs)


def test_a_model_that_nobody_has_distributed_is_traced_for_specs() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert ar.verify(model, "all_reduce", specs=[np.ones((4, 3)), np.ones((4, 1))]).ok


def test_something_distributed_is_simulated_by_its_own_plan() -> None:
    step = trained_function()
    assert ar.simulate(step).replicas == 2


def test_an_item_takes_no_specs() -> None:
    item = ar.GraphItem.from_function(a_plain_function(), tf.TensorSpec([None, 3]))
    with pytest.raises(ar.GraphError, match="needs no specs"):
        ar.verify(item, "all_reduce", specs=[tf.TensorSpec([None, 3])])
