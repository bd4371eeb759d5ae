"""What one step may be given: of a batch of stated size, each worker's part and nothing else, whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.engine.batch_sizes import check_batch_sizes
from tests.support.linear_step import Linear, assert_same_state, batch, config
from tests.support.training import MODES, distributed, make_item, placeholder, variable

TWO_WORKERS = {"devices": ["CPU:0"], "cluster": {"workers": ["a:1", "b:1"]}}
SPECS = (tf.TensorSpec([6, 4], tf.float64), tf.TensorSpec([6, 3], tf.float64))
NAMED = {"x": 0, "y": 0}


@pytest.mark.parametrize("way", ["global", "per_worker"])
@pytest.mark.parametrize(("task", "part"), [(0, 3), (1, 2)])
def test_a_worker_gives_its_part_of_a_batch_of_stated_size_and_nothing_else(task: int, part: int, way: str) -> None:
    def forward() -> dict[str, Any]:
        return {"loss": tf.reduce_sum(placeholder("x", 5, 2) @ variable("w", np.ones((2, 1))))}

    new = ar.rewrite(make_item(forward, batch_inputs={"x": 0}), {**TWO_WORKERS, "input": way}, task=task)
    check_batch_sizes({"x": part}, new)
    for given in (5, 5 - part, 0, None):
        size = "unknown size" if given is None else given
        with pytest.raises(ar.GraphError, match=f"'x' is given a batch of {size}, and .* worker {task} has {part}"):
            check_batch_sizes({"x": given}, new)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [3, 6])
def test_an_input_of_open_size_has_the_size_that_another_one_states(mode: str, size: int) -> None:
    def forward() -> dict[str, Any]:
        w = variable("w", np.ones((2, 1)))
        apart = tf.reduce_mean(placeholder("y", None, 2) @ w)
        return {"loss": tf.reduce_mean(placeholder("x", 4, 2) @ w) + apart, "apart": apart}

    item = make_item(forward, batch_inputs=NAMED)
    with distributed(item, mode).session() as session:
        session.run(item.init_op)
        np.testing.assert_allclose(session.run("out_apart", {"y": np.ones((4, 2))}), 2.0)
        with pytest.raises(ar.GraphError, match=f"'y' is given a batch of {size}, and .* made for batches of 4"):
            session.run("out_apart", {"y": np.ones((size, 2))})


def with_specs(model: Linear) -> Any:
    return ar.distribute(model.step, config("shared"), *SPECS, batch_inputs=NAMED)


def with_signature(model: Linear) -> Any:
    return ar.distribute(tf.function(model.step, input_signature=SPECS), config("shared"), batch_inputs=NAMED)


def concrete(model: Linear) -> Any:
    return ar.distribute(tf.function(model.step).get_concrete_function(*SPECS), config("shared"), batch_inputs=NAMED)


@pytest.mark.parametrize("made", [with_specs, with_signature, concrete])
def test_a_function_is_given_as_many_examples_as_it_states(made: Callable[[Linear], Any]) -> None:
    one, many = Linear(), Linear()
    step = made(many)
    one.step(*batch(6))
    step(*batch(6))
    assert_same_state(one, many)
    with pytest.raises(ar.GraphError, match="'x' is given a batch of 5, and the step is made for batches of 6"):
        step(*batch(5))
    assert_same_state(one, many)


def test_a_function_inside_of_another_one_has_to_know_that_it_is_given_as_many() -> None:
    step = with_specs(Linear())
    whole = tf.function(step, input_signature=[tf.TensorSpec([None, 4], tf.float64), SPECS[1]], autograph=False)
    with pytest.raises(ar.GraphError, match=r"'x' is given a batch of unknown size, and .* made for batches of 6"):
        whole(*batch(6))


def test_a_function_of_one_input_refuses_micro_batches_of_different_sizes_where_it_is_asked_to() -> None:
    w = tf.Variable(1.0)
    more = {"microbatches": 2, "accumulation": {"uneven": "error"}}
    step = ar.distribute(lambda x: w.assign_sub(w * tf.reduce_mean(x)), {**config("shared"), **more})
    step(tf.ones([4, 2]))
    with pytest.raises(ar.GraphError, match="batch of 5 examples in 'x' cannot be divided"):
        step(tf.ones([5, 2]))
