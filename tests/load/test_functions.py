"""Functions and Keras models become items: arguments by path, captured variables by their public names."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite.errors import GraphError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.keras_models import from_keras
from autograph_rewrite.normalize.normalize import normalise
from tests.zoo import FUNCTIONS, MODELS

Spec = tf.TensorSpec
Pair = namedtuple("Pair", "left right")


def axes(item: GraphItem) -> dict[str, int | None]:
    return {name: info.batch_axis for name, info in item.inputs.items()}


def test_arguments_are_named_by_path_in_tensorflows_own_order() -> None:
    def step(x: Any, d: Any, *rest: Any, training: bool = True, scale: Any = None) -> Any:
        y = x * d["b"][0] + scale + tf.reduce_sum(rest[0])
        return {"y": y, "nested": (tf.reduce_sum(y), [tf.cast(d["a"], y.dtype)])} if training else y

    item = GraphItem.from_function(
        step,
        Spec([None, 3]),
        {"b": [Spec([])], "a": Spec([None], tf.int32)},
        Spec([2]),
        training=True,
        scale=Spec([]),
    )
    assert axes(item) == {"x": 0, "d/a": 0, "d/b/0": None, "rest_0": None, "scale": None}
    assert item.inputs["d/a"].dtype == "int32"
    assert list(item.outputs) == ["nested/0", "nested/1/0", "y"]
    assert item.outputs["y"].shape == (None, 3)
    assert item.binding.inputs == tuple(info.tensor.partition(":")[0] for info in item.inputs.values())


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda x: x * 2, ["output_0"]),
        (lambda x: (x, [x + 1]), ["output_0", "output_1/0"]),
        (lambda x: Pair(x, x + 1), ["left", "right"]),
        (lambda x: {"b": x, "a": x + 1}, ["a", "b"]),
        (lambda x: None, []),
    ],
)
def test_results_are_named_by_key_or_by_position(result: Any, names: list[str]) -> None:
    assert list(GraphItem.from_function(result, Spec([None])).outputs) == names


def test_arrays_tensors_and_keras_inputs_stand_for_their_specs() -> None:
    item = GraphItem.from_function(
        lambda a, b, c: tf.reduce_sum(a) + tf.reduce_sum(b["k"]) + tf.reduce_sum(c),
        np.ones((2, 3), np.float32), {"k": tf.ones([4])}, keras.Input((5,)),
    )  # fmt: skip
    assert {name: info.shape for name, info in item.inputs.items()} == {"a": (2, 3), "b/k": (4,), "c": (None, 5)}
    assert axes(item) == {"a": None, "b/k": None, "c": 0}


def test_a_batch_may_be_named_by_argument_or_by_path() -> None:
    def step(x: Any, y: Any) -> Any:
        return x["a"] * x["b"] + y

    specs = ({"a": Spec([4, 2]), "b": Spec([4, 2])}, Spec([None, 2]))
    assert axes(GraphItem.from_function(step, *specs, batch_inputs={"x": 0})) == {"x/a": 0, "x/b": 0, "y": None}
    assert axes(GraphItem.from_function(step, *specs, batch_inputs={"x/b": -2}))["x/b"] == 0
    with pytest.raises(GraphError, match="'z' is not an input") as caught:
        GraphItem.from_function(step, *specs, batch_inputs={"z": 0})
    assert "x/a" in (caught.value.hint or "")


def test_the_parts_of_sparse_and_ragged_arguments_are_batches_only_when_named() -> None:
    sparse = GraphItem.from_function(lambda s: tf.sparse.reduce_sum(s), tf.SparseTensorSpec([None, 3]))
    assert axes(sparse) == {"s/indices": None, "s/values": None, "s/dense_shape": None}
    ragged = GraphItem.from_function(lambda r: tf.reduce_sum(r), tf.RaggedTensorSpec([None, None]))
    assert axes(ragged) == {"r/flat_values": None, "r/row_splits_0": None}


def test_an_iterator_argument_gives_what_it_yields_as_batch() -> None:
    data = tf.data.Dataset.from_tensor_slices(np.ones((6, 3))).batch(2)
    item = GraphItem.from_function(lambda it: tf.reduce_sum(next(it)), iter(data))
    assert axes(item) == {"it": None, "IteratorGetNext": 0}
    assert item.inputs["it"].dtype == "resource"


def test_captured_variables_have_unique_names_in_capture_order() -> None:
    a, b = tf.Variable(1.0, name="w"), tf.Variable([1.0, 2.0], name="w", trainable=False)
    big = tf.constant(np.ones((30, 30)), tf.float32)

    def step(x: Any) -> Any:
        b.assign_add(x[:2] * a)
        return tf.reduce_sum(big) * x

    item = GraphItem.from_function(step, Spec([None]))
    assert sorted(item.variables) == ["w", "w_1"]
    assert {v.shape: v.trainable for v in item.variables.values()} == {(): True, (2,): False}
    assert all(v.captured and v.initializer is None for v in item.variables.values())
    captures = item.binding.captures
    assert {id(c.variable) for c in captures if c.variable is not None} == {id(a), id(b)}
    assert [c.value.shape.as_list() for c in captures if c.variable is None] == [[30, 30]]
    assert [item.graph.node(target).op for target in item.targets] == ["AssignAddVariableOp"]


def test_a_variable_made_while_tracing_is_captured_like_any_other() -> None:
    made: list[Any] = []

    @tf.function
    def step(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(2.0, name="late"))
        return x * made[0]

    assert list(GraphItem.from_function(step, Spec([None])).variables) == ["late"]


def test_tracing_twice_gives_the_same_graph() -> None:
    v = [tf.Variable(float(i), name=f"v{i}") for i in range(6)]

    def step(x: Any) -> Any:
        for each in v:
            each.assign_add(tf.reduce_sum(x) * each)
        return tf.add_n(v)

    first, second = (normalise(GraphItem.from_function(step, Spec([None]))) for _ in range(2))
    assert first.graph_bytes == second.graph_bytes
    assert first.targets == second.targets


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_the_functions_of_the_zoo_give_their_own_names(case: Any) -> None:
    built = case.build()
    item = GraphItem.from_function(built.step, *built.specs)
    assert axes(item) == {**dict.fromkeys(item.inputs, None), **built.batch_inputs}
    assert len(item.variables) == len(set(map(id, built.variables.values())))


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_the_models_of_the_zoo_give_every_variable_by_its_keras_path(case: Any) -> None:
    built = case.build()
    model = built.model
    specs = [tf.nest.map_structure(lambda a: Spec([None, *a.shape[1:]], a.dtype), part) for part in built.feeds(0, 4)]
    item = GraphItem.from_keras(model, *specs)
    every = {v.path: v for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)}
    assert set(item.variables) <= set(every)
    assert {v.path for v in model.trainable_variables} <= set(item.variables)
    assert {c.name: c.variable is every[c.name] for c in item.binding.captures if c.name} == dict.fromkeys(
        item.variables, True
    )
    assert "loss" in item.outputs
    assert set(axes(item).values()) == {0}


def dense_model(built: bool = True) -> Any:
    layers = [keras.layers.Dense(2, name="d"), keras.layers.BatchNormalization(name="n"), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*([keras.Input((3,))] if built else []), *layers])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def test_a_model_that_is_not_built_is_built_by_tracing() -> None:
    model = dense_model(built=False)
    item = GraphItem.from_keras(model, Spec([None, 3]), Spec([None, 2]), Spec([None]))
    assert axes(item) == {"x": 0, "y": 0, "sample_weight": 0}
    assert list(item.outputs) == ["loss", "mae"]
    assert model.built
    assert any(name.endswith("d/kernel") for name in item.variables)
    assert any("velocity" in name for name in item.variables)


def test_the_other_steps_of_a_model_can_be_traced_too() -> None:
    model = dense_model()
    assert list(from_keras(model, Spec([None, 3]), Spec([None, 2]), step="test_step").outputs) == ["loss", "mae"]
    assert list(from_keras(model, Spec([None, 3]), step="predict_step").outputs) == ["output_0"]


class Trainer:
    def __init__(self) -> None:
        self.parts = {"model": dense_model()}
        self.optimizer = keras.optimizers.SGD(0.1)

    def step(self, x: Any, y: Any) -> Any:
        model = self.parts["model"]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss


WRAPS = (lambda f: f, tf.function, functools.partial, lambda f: lambda x, y: f(x, y))


@pytest.mark.parametrize("wrap", WRAPS, ids=["method", "tf.function", "partial", "closure"])
def test_keras_variables_keep_their_paths_in_a_custom_loop(wrap: Any) -> None:
    trainer = Trainer()
    item = GraphItem.from_function(wrap(trainer.step), Spec([None, 3]), Spec([None, 2]))
    paths = {v.path for v in (*trainer.parts["model"].variables, *trainer.optimizer.variables)}
    assert set(item.variables) <= paths
    assert any(name.endswith("d/kernel") for name in item.variables)


def test_what_cannot_be_traced_is_a_graph_error_with_the_cause() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("my own mistake")

    with pytest.raises(GraphError, match=r"'broken' cannot be traced: KeyError[\s\S]*my own mistake"):
        GraphItem.from_function(broken, Spec([None]))
    with pytest.raises(GraphError, match="missing a required argument: 'y'"):
        GraphItem.from_function(lambda x, y: x + y, Spec([None]))
    with pytest.raises(GraphError, match="expected a function"):
        GraphItem.from_function(3, Spec([None]))


def test_what_is_no_compiled_keras_model_is_a_graph_error() -> None:
    with pytest.raises(GraphError, match="expected a Keras model"):
        GraphItem.from_keras(tf.Module(), Spec([None]))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(GraphError, match="is not compiled"):
        GraphItem.from_keras(model, Spec([None, 3]), Spec([None]))
    with pytest.raises(GraphError, match="takes the specs of x, y, sample_weight"):
        GraphItem.from_keras(dense_model())
