"""What somebody writes between two steps is noticed, whether a variable is watched by its contents or its buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.runtime.function import mirrored_variables
from tests.support.linear_step import Linear, assert_same_state, batch, config


def mirrors_of(step: Any) -> list[Any]:
    return list(step._mirrors._known.values())


@pytest.fixture
def pair() -> tuple[Linear, Linear]:
    return Linear(), Linear()


@pytest.fixture(params=["contents", "buffers"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "buffers":
        monkeypatch.setattr(mirrored_variables, "SMALL", -1)


WRITES: dict[str, Callable[[Linear], Any]] = {
    "assign": lambda model: model.w.assign(tf.ones([4, 3], tf.float64)),
    "assign_add in place": lambda model: model.w.assign_add(tf.ones([4, 3], tf.float64)),
    "a scalar": lambda model: model.rate.assign(0.01),
    "another function": lambda model: tf.function(lambda: model.velocity.assign_add(model.velocity))(),
    "two writes": lambda model: (model.w.assign(model.w * 2), model.w.assign(model.w + 1)),
    "a scatter": lambda model: tf.raw_ops.ResourceScatterUpdate(
        resource=model.w.handle, indices=[1], updates=tf.ones([1, 3], tf.float64)
    ),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.usefixtures("watched")
def test_writes_to_a_captured_variable_reach_all_mirrors(write: str, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    step = ar.distribute(many.step, config("mirrored"))
    for _ in range(2):
        for model, run in ((one, one.step), (many, step)):
            run(*batch(5))
            WRITES[write](model)
            run(*batch(5))
            run(*batch(4))
    assert_same_state(one, many)
    mirrored = mirrors_of(step)
    assert len(mirrored) == 4
    for variable in mirrored:
        for copy in variable.copies.values():
            np.testing.assert_allclose(copy.numpy(), variable.value().numpy(), rtol=1e-12)


@pytest.mark.usefixtures("watched")
def test_a_restored_checkpoint_reaches_all_mirrors(tmp_path: Any, pair: tuple[Linear, Linear]) -> None:
    one, many = pair
    step = ar.distribute(many.step, config("mirrored"))
    for model, run in ((one, one.step), (many, step)):
        checkpoint = tf.train.Checkpoint(w=model.w, velocity=model.velocity, count=model.count)
        run(*batch(5))
        path = checkpoint.save(str(tmp_path / str(id(model))))
        run(*batch(4))
        checkpoint.restore(path).assert_consumed()
        run(*batch(3))
    assert_same_state(one, many)


@pytest.mark.usefixtures("watched")
def test_mirrors_are_left_alone_while_nobody_writes(
    pair: tuple[Linear, Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ar.distribute(pair[1].step, config("mirrored"))
    step(*batch(5))
    refreshed = []
    mirrored = mirrors_of(step)
    for variable in mirrored:
        monkeypatch.setattr(variable, "refresh", lambda value, variable=variable: refreshed.append(variable))
    step(*batch(5))
    assert refreshed == []
    pair[1].rate.assign(0.2)
    step(*batch(5))
    assert [variable.handle is pair[1].rate.handle for variable in refreshed] == [True]


@pytest.mark.usefixtures("watched")
def test_variables_and_their_mirrors_are_updated_in_place(pair: tuple[Linear, Linear]) -> None:
    step = ar.distribute(pair[1].step, config("mirrored"))
    step(*batch(5))
    (weights,) = (variable for variable in mirrors_of(step) if variable.handle is pair[1].w.handle)

    def addresses() -> set[int]:
        (copy,) = weights.copies.values()
        return {np.asarray(value).ctypes.data for value in (weights.value(), copy.read_value())}

    for _ in range(3):
        before = addresses()
        step(*batch(5))
        assert addresses() == before  # copying would double the memory of a large model


@pytest.mark.usefixtures("watched")
def test_a_write_between_steps_of_two_traces_is_noticed_once(
    pair: tuple[Linear, Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_momentum(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ pair[1].w - y))
        pair[1].w.assign_sub(0.01 * tape.gradient(loss, pair[1].w))
        return loss

    def either(x: Any, y: Any, has_momentum: bool) -> Any:
        return pair[1].step(x, y)["loss"] if has_momentum else without_momentum(x, y)

    step = ar.distribute(either, config("mirrored"))
    for has_momentum in (True, False, True, False):
        step(*batch(5), has_momentum)
    refreshed = []
    for variable in mirrors_of(step):
        monkeypatch.setattr(variable, "refresh", lambda value, variable=variable: refreshed.append(variable))
    for has_momentum in (True, False, False, True):
        step(*batch(5), has_momentum)
    assert refreshed == []
    pair[1].w.assign_add(pair[1].w)
    for has_momentum in (False, True, False):
        step(*batch(5), has_momentum)
    assert [variable.handle is pair[1].w.handle for variable in refreshed] == [True]


def test_of_many_variables_that_are_alike_only_those_are_told_that_were_written() -> None:
    variables = [tf.Variable(tf.fill([3], float(number))) for number in range(5)]

    def train(x: Any) -> Any:
        for variable in variables:
            variable.assign_sub(0.1 * tf.reduce_mean(x) * variable)
        return tf.reduce_sum(x)

    step = ar.distribute(train, config("mirrored"))
    step(tf.ones([4]))
    (traced,) = step._traces
    watching = traced.step._guard
    assert watching.before() == []
    assert len(watching.before()) == 5, "of a step that has failed nothing is known"
    step(tf.ones([4]))
    variables[3].scatter_nd_update([[1]], [7.0])
    assert [variable.handle is variables[3].handle for variable, _ in watching.before()] == [True]


class Table:
    """A table of which each step updates some rows, which lets TensorFlow copy all of it when somebody reads it."""

    def __init__(self) -> None:
        self.rows = tf.Variable(np.random.default_rng(0).normal(size=(40, 3)), name="table")
        self.optimizer = tf.compat.v1.train.AdagradOptimizer(0.1, 0.1)

    def step(self, ids: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(self.rows, ids) - y))
        self.optimizer.apply_gradients([(tape.gradient(loss, self.rows), self.rows)])
        return loss

    @property
    def variables(self) -> list[Any]:
        return [self.rows, self.optimizer.get_slot(self.rows, "accumulator")]


IDS, TARGETS = tf.constant([3, 1, 3, 7]), np.random.default_rng(1).normal(size=(4, 3))


@pytest.mark.parametrize("mode", ["mirrored", "shared"])
@pytest.mark.usefixtures("watched")
def test_a_table_and_the_slot_of_an_optimizer_of_v1_are_updated_as_on_one_device(mode: str) -> None:
    one, two = Table(), Table()
    plain, step = tf.function(one.step), ar.distribute(two.step, config(mode))
    for number in range(6):
        np.testing.assert_allclose(plain(IDS, TARGETS), step(IDS, TARGETS), rtol=1e-12)
        if number == 2:
            for model in (one, two):
                model.rows.scatter_update(tf.IndexedSlices(tf.ones([1, 3], tf.float64), [7]))
        if number == 4:
            for model in (one, two):
                model.variables[1].assign(model.variables[1] * 2)
    for a, b in zip(one.variables, two.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12)


def test_a_table_of_which_rows_are_updated_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrored_variables, "SMALL", -1)
    model = Table()
    step = ar.distribute(model.step, config("mirrored"))
    for _ in range(2):
        step(IDS, TARGETS)
    watched = mirrors_of(step)
    assert {id(variable.handle) for variable in watched} == {id(variable.handle) for variable in model.variables}
    for _ in range(3):
        before = [np.asarray(variable.seen).ctypes.data for variable in watched]
        step(IDS, TARGETS)
        assert [np.asarray(variable.seen).ctypes.data for variable in watched] == before
