"""Function mode: a distributed function is called like the original, and does to its variables what that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.errors import GraphError
from autograph_rewrite.runtime.function.mirrored_variables import Mirrors
from autograph_rewrite.runtime.function.step import BoundStep
from tests.support.linear_step import Linear, assert_same_state, batch, config

MODES = ("shared", "mirrored")


@pytest.fixture
def pair() -> tuple[Linear, Linear]:
    return Linear(), Linear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_distributed_function_trains_like_the_original_for_any_batch_size(
    mode: str, replicas: int, pair: tuple[Linear, Linear]
) -> None:
    one, many = pair
    step = ar.distribute(many.step, config(mode, replicas))
    for size in (6, 7, 2, 1, 6):
        expected, got = one.step(*batch(size)), step(*batch(size))
        assert set(got) == {"loss", "prediction"}
        np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-12)
        np.testing.assert_allclose(got["prediction"], expected["prediction"], rtol=1e-12)
        assert_same_state(one, many)
    assert len(step.items) == 1  # one trace for all sizes
    names = {node.name for node in step.items[0].graph}
    assert any(name.startswith(f"replica_{replicas - 1}/") for name in names)  # the work really is spread


@pytest.mark.parametrize("mode", MODES)
def test_the_result_keeps_the_structure_of_the_original(mode: str) -> None:
    w = tf.Variable([[1.0]])

    def step(pair: tuple[Any, dict[str, Any]], *, scale: float = 2.0) -> tuple[Any, list[Any], dict[str, Any], None]:
        x, y = pair[0], pair[1]["y"]
        loss = tf.reduce_sum(x @ w - y) * scale
        w.assign_sub([[0.1]] * loss)
        return loss, [x @ w, (y,)], {"b": tf.shape(x), "a": loss}, None

    distributed = ar.distribute(step, config(mode))
    x = tf.ones([5, 1])
    loss, (product, (y,)), named, nothing = distributed((x, {"y": x * 2}))
    assert nothing is None
    assert list(named) == ["b", "a"]
    np.testing.assert_allclose(loss, -10.0)
    np.testing.assert_allclose(named["a"], -10.0)
    np.testing.assert_array_equal(named["b"], [5, 1])
    np.testing.assert_allclose(product, x * 2)
    np.testing.assert_allclose(y, x * 2)
    distributed((x, {"y": x}), scale=3.0)
    assert len(distributed.items) == 2  # a Python value is part of the trace
    np.testing.assert_allclose(w.numpy(), [[2.0 - 1.5]])
    distributed((x, {"y": x}), scale=True)
    distributed((x, {"y": x}), scale=1)
    assert len(distributed.items) == 4  # and so is its type


def test_a_plan_can_be_given_instead_of_a_config(pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    specs = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64))
    plan = ar.build_plan(ar.GraphItem.from_function(many.step, *specs), config("mirrored"))
    step = ar.distribute(many.step, plan)
    one.step(*batch(5))
    step(*batch(5))
    assert_same_state(one, many)


def test_numpy_arrays_and_keyword_arguments_are_taken(pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    step = ar.distribute(many.step, config("shared"))
    x, y = (tensor.numpy() for tensor in batch(5))
    one.step(x, y)
    step(y=y, x=x)
    assert_same_state(one, many)


def test_another_size_of_another_axis_is_traced_once_more_and_then_any_size_fits() -> None:
    w = tf.Variable(1.0)

    def step(x: Any) -> Any:
        loss = tf.reduce_sum(tf.reduce_mean(x, axis=1)) * w
        w.assign_sub(0.001 * loss)
        return loss

    distributed = ar.distribute(step, config("shared"))
    for length in (3, 4, 5, 6):
        np.testing.assert_allclose(distributed(tf.ones([4, length])), 4 * w.numpy() / (1 - 0.004), rtol=1e-5)
    assert len(distributed.items) == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_function_made_for_specs_refuses_other_arguments(mode: str, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    specs = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64))
    step = ar.distribute(many.step, config(mode), *specs)
    one.step(*batch(4))
    step(*batch(4))
    assert_same_state(one, many)
    with pytest.raises(ar.GraphError, match=r"was made for \(float64\[None, 4\].*not for \(float64\[5, 3\]"):
        step(tf.zeros([5, 3], tf.float64), batch(5)[1])


def test_a_static_batch_is_distributed_when_it_is_named(pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    specs = (tf.TensorSpec([6, 4], tf.float64), tf.TensorSpec([6, 3], tf.float64))
    step = ar.distribute(many.step, config("shared"), *specs, batch_inputs={"x": 0, "y": 0})
    one.step(*batch(6))
    step(*batch(6))
    assert_same_state(one, many)


def test_batch_inputs_of_different_sizes_are_refused_before_anything_runs(pair: tuple[Linear, Linear]) -> None:
    _, many = pair
    step = ar.distribute(many.step, config("shared"))
    with pytest.raises(ar.GraphError, match=r"x: 6, y: 5"):
        step(batch(6)[0], batch(5)[1])  # at the first call
    step(*batch(6))
    with pytest.raises(ar.GraphError, match=r"x: 6, y: 5"):
        step(batch(6)[0], batch(5)[1])
    assert many.count.numpy() == 1


def test_an_input_that_all_replicas_share_is_named_in_batch_inputs() -> None:
    w = tf.Variable(tf.ones([3, 2]))

    def step(x: Any, weights: Any) -> Any:
        loss = tf.reduce_sum((x @ w) * weights)
        w.assign_sub(0.1 * loss * tf.ones_like(w))
        return loss

    distributed = ar.distribute(step, config("mirrored"), batch_inputs={"x": 0})
    np.testing.assert_allclose(distributed(tf.ones([5, 3]), tf.constant([1.0, 2.0])), 45.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_step_raises_the_original_error_and_the_next_one_is_right(
    mode: str, pair: tuple[Linear, Linear]
) -> None:
    one, many = pair

    def checked(model: Linear) -> Callable[[Any, Any], Any]:
        def step(x: Any, y: Any) -> Any:
            return model.step(tf.debugging.check_numerics(x, "bad input"), y)

        return step

    step, original = ar.distribute(checked(many), config(mode)), tf.function(checked(one))
    x, y = batch(6)
    broken = tf.tensor_scatter_nd_update(x, [[5, 0]], [np.nan])
    for run in (step, original):
        run(x, y)
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
            run(broken, y)
    for a, b in zip(one.variables, many.variables, strict=True):
        b.assign(a)  # how far a failed step came is undefined
    for run in (step, original):
        run(x, y)
    assert_same_state(one, many)


@pytest.mark.parametrize("mode", MODES)
def test_a_distributed_function_works_inside_another_function(mode: str, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    step = ar.distribute(many.step, config(mode))

    @tf.function
    def twice(x: Any, y: Any) -> Any:
        step(x, y)
        many.rate.assign(many.rate * 0.5)
        return step(x, y)["loss"]

    one.step(*batch(6))
    one.rate.assign(one.rate * 0.5)
    expected = one.step(*batch(6))["loss"]
    np.testing.assert_allclose(twice(*batch(6)), expected, rtol=1e-12)
    assert_same_state(one, many)
    one.step(*batch(4))
    step(*batch(4))  # and afterwards by itself
    assert_same_state(one, many)


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_an_iterator_may_be_an_argument(mode: str, drop_remainder: bool, pair: tuple[Linear, Linear]) -> None:
    one, many = pair

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices(batch(10)).batch(4, drop_remainder=drop_remainder)

    @tf.function
    def step(iterator: Any) -> Any:
        return many.step(*next(iterator))

    distributed = ar.distribute(step, config(mode))
    iterator = iter(dataset())
    for x, y in dataset():
        one.step(x, y)
        distributed(iterator)
    assert_same_state(one, many)
    with pytest.raises(tf.errors.OutOfRangeError):
        distributed(iterator)


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_other_sizes_may_be_drawn_in_a_loop(mode: str, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    data = tf.data.Dataset.from_tensor_slices(batch(10)).batch(4)

    @tf.function
    def steps(iterator: Any, count: Any) -> Any:
        rows = tf.constant(0)
        for _ in tf.range(count):
            x, y = next(iterator)
            many.step(x, y)
            rows += tf.shape(x)[0]
        return rows

    distributed = ar.distribute(steps, config(mode))
    for x, y in data:
        one.step(x, y)
    assert distributed(iter(data), tf.constant(3)) == 10
    assert_same_state(one, many)


Loop = Callable[[Linear, Any], Any]


def over_dataset(model: Linear, data: Any) -> Any:
    total = tf.constant(0.0, tf.float64)
    for x, y in data:
        total += model.step(x, y)["loss"]
    return total


def until_enough(model: Linear, data: Any) -> Any:
    rows = tf.constant(0)
    for x, y in data:
        model.step(x, y)
        rows += tf.shape(x)[0]
        if rows >= 8:
            break
    return rows


def some_skipped(model: Linear, data: Any) -> Any:
    total = tf.constant(0.0, tf.float64)
    for index, (x, y) in data.enumerate():
        if index == 1:
            continue
        total += tf.cast(index, tf.float64) * model.step(x, y)["loss"]
    return total


def two_epochs(model: Linear, data: Any) -> Any:
    losses = tf.TensorArray(tf.float64, 0, dynamic_size=True)
    for epoch in tf.range(2):
        for i, (x, y) in data.enumerate():
            losses = losses.write(3 * epoch + tf.cast(i, tf.int32), model.step(x, y)["loss"])
    return losses.stack()


def reduced(model: Linear, data: Any) -> Any:
    return data.reduce(tf.constant(0.0, tf.float64), lambda total, batch: total + model.step(*batch)["loss"])


def over_iterator(model: Linear, data: Any) -> Any:
    return over_dataset(model, iter(data))


@pytest.mark.parametrize("loop", [over_dataset, until_enough, some_skipped, two_epochs, reduced, over_iterator])
def test_a_function_may_loop_over_a_dataset(loop: Loop, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    data = tf.data.Dataset.from_tensor_slices(batch(11)).batch(4)
    expected = tf.function(lambda data: loop(one, data))(data)
    distributed = ar.distribute(tf.function(lambda data: loop(many, data)), config("mirrored"))
    np.testing.assert_allclose(distributed(data), expected, rtol=1e-12)
    assert_same_state(one, many)
    assert any("OptionalGetValue" in name for name in distributed.items[0].inputs)


def test_several_processes_do_not_loop_over_a_dataset_in_the_function(pair: tuple[Linear, Linear]) -> None:
    data = tf.data.Dataset.from_tensor_slices(batch(11)).batch(4)
    item = ar.GraphItem.from_function(tf.function(lambda data: over_dataset(pair[0], data)), data)
    with pytest.raises(GraphError, match=r"2 processes cannot do together(.|\n)*let the loop stand outside"):
        ar.rewrite(item, {"devices": ["CPU:0"], "cluster": {"workers": ["127.0.0.1:1", "127.0.0.1:2"]}}, task=0)


def targets(model: Linear) -> Iterator[tuple[str, Any]]:
    specs = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64))
    yield "a tf.function", tf.function(model.step)
    yield "an input signature", tf.function(model.step, input_signature=specs)
    yield "a concrete function", tf.function(model.step).get_concrete_function(*specs)
    yield "a plain function", lambda x, y: model.step(x, y)


@pytest.mark.parametrize("kind", [kind for kind, _ in targets(Linear())])
def test_every_kind_of_function_can_be_distributed(kind: str, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    step = ar.distribute(dict(targets(many))[kind], config("mirrored"))
    one.step(*batch(5))
    step(*batch(5))
    assert_same_state(one, many)


def test_an_item_that_was_not_rewritten_runs_as_the_original_does(pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    specs = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64))
    item = ar.GraphItem.from_function(many.step, *specs)
    loss, prediction = BoundStep(item, Mirrors())(list(batch(5)))
    expected = one.step(*batch(5))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-12)
    np.testing.assert_allclose(prediction, expected["prediction"], rtol=1e-12)
    assert_same_state(one, many)


def test_a_variable_as_an_argument_is_refused_with_the_way_out() -> None:
    weight = tf.Variable(1.0, name="weight")

    def train(x: Any, w: Any = weight) -> Any:
        w.assign_sub(tf.reduce_mean(x))
        return w.read_value()

    step = ar.distribute(train, {"devices": ["CPU:0"], "strategy": {"name": "AllReduce"}})
    with pytest.raises(ar.GraphError, match=r"variable 'weight:0' as an argument"):
        step(tf.ones([4]))
