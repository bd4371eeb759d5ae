"""Keras mode: the same model object trains, tests, predicts and saves as before, over several replicas.

Each test does the same to a model on one device and to a distributed one, and compares everything that it can see. All
run with both Keras libraries: `keras` is the one of the test that runs.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.load.keras_library import LIBRARIES, optimizer_variables, path_of
from tests.support.keras_floats import keras_floats

pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")

MODES = ("shared", "mirrored")
SHARED = ("shared", pytest.param("mirrored", marks=pytest.mark.full))
MIRRORED = ("mirrored", pytest.param("shared", marks=pytest.mark.full))
"""What goes the same way in both modes runs in one of them; the matrix trains Keras models in both."""
keras: Any = None
LAYERS: Any = None


@pytest.fixture(autouse=True, params=LIBRARIES)
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take one library, in double precision: a wrong rule cannot hide behind rounding."""
    library = importlib.import_module(request.param)
    monkeypatch.setattr(sys.modules[__name__], "keras", library, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", library.layers, raising=False)
    with keras_floats("float64", library):
        yield


def config(mode: str) -> dict[str, Any]:
    return {"devices": ["CPU:0", "CPU:1"], "strategy": {"name": "AllReduce", "variables": mode}}


def compiled(model: Any, **options: Any) -> Any:
    settings = {
        "optimizer": keras.optimizers.Adam(0.01, clipnorm=1.0),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    model.compile(**(settings | options))
    return model


def classifier(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            LAYERS.Input((5,)),
            LAYERS.Dense(6, activation="tanh"),
            LAYERS.BatchNormalization(),
            LAYERS.Dropout(0.3, seed=3),
            LAYERS.Dense(3),
        ]
    )
    return compiled(model, **options)


def without_dropout(**options: Any) -> Any:
    """Build a model without dropout: Keras does not save the state of a seed, XLA draws other numbers, and what
    tf_keras draws begins anew in each trace.
    """
    keras.utils.set_random_seed(0)
    layers = [LAYERS.Input((5,)), LAYERS.Dense(4, activation="relu"), LAYERS.Dense(3)]
    return compiled(keras.Sequential(layers), **options)


def unbuilt(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    return compiled(keras.Sequential([LAYERS.Dense(6, activation="tanh"), LAYERS.Dense(3)]), **options)


def data(size: int = 22, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, 5)), rng.integers(0, 3, size)


def variables(model: Any) -> list[Any]:
    return [*model.variables, *(optimizer_variables(model.optimizer) if model.optimizer is not None else ())]


def assert_same_model(one: Any, other: Any) -> None:
    assert len(variables(one)) == len(variables(other))
    for a, b in zip(variables(one), variables(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-8, atol=1e-11, err_msg=path_of(a))


def assert_same(a: Any, b: Any) -> None:
    tf.nest.map_structure(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-11), a, b)


def compare(build: Callable[[], Any], use: Callable[[Any], Any], mode: str, **options: Any) -> tuple[Any, Any]:
    """Use a model and a distributed one alike; return both."""
    one, many = build(), build()
    assert ar.distribute(many, config(mode), **options) is many
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*runs on one device")  # nothing falls back unseen
        assert_same(use(one), use(many))
    assert_same_model(one, many)
    return one, many


def seeded_fit(model: Any, *args: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)  # tf_keras draws a model's first weights where it builds it
    return fit(model, *args, **options)


def fit(model: Any, *args: Any, **options: Any) -> Any:
    settings = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    return model.fit(*(args or data()), **(settings | options)).history


@pytest.mark.parametrize("mode", MODES)
def test_fit_evaluate_and_predict_give_what_one_device_gives(mode: str) -> None:
    x, y = data()

    def use(model: Any) -> Any:
        history = fit(model, validation_data=data(10, 2))
        return history, model.evaluate(x, y, batch_size=8, verbose=0), model.predict(x, batch_size=8, verbose=0)

    _, many = compare(classifier, use, mode)
    for function in (many.train_function, many.test_function, many.predict_function):
        (item,) = function.items  # one trace each, and it was rewritten
        assert any(node.name.startswith("replica_1/") for node in item.graph)


@pytest.mark.parametrize("mode", SHARED)
def test_weights_of_samples_and_classes_count(mode: str) -> None:
    def use(model: Any) -> Any:
        weights = np.linspace(0.1, 2, 22)
        first = fit(model, sample_weight=weights, validation_data=(*data(10, 2), weights[:10]))
        return first, fit(model, class_weight={0: 1.0, 1: 0.5, 2: 2.0})

    compare(classifier, use, mode)


@pytest.mark.parametrize("mode", MIRRORED)
def test_single_batches_of_any_size_can_be_trained_tested_and_predicted(mode: str) -> None:
    def use(model: Any) -> Any:
        results = []
        for size in (6, 1, 7, 2):
            x, y = data(size)
            results += [model.train_on_batch(x, y), model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0})]
            results += [model.train_on_batch(x, y, sample_weight=np.linspace(1, 2, size), return_dict=True)]
            results += [model.test_on_batch(x, y), model.predict_on_batch(x)]
        return results

    compare(without_dropout, use, mode)


def two_inputs() -> Any:
    keras.utils.set_random_seed(0)
    dense, ids = keras.Input((5,), name="dense"), keras.Input((4,), dtype="int32", name="ids")
    words = LAYERS.GlobalAveragePooling1D()(LAYERS.Embedding(7, 3)(ids))
    joined = LAYERS.Concatenate()([LAYERS.Dense(4, activation="relu")(dense), words])
    outputs = {"kind": LAYERS.Dense(3, name="kind")(joined), "size": LAYERS.Dense(1, name="size")(joined)}
    model = keras.Model({"dense": dense, "ids": ids}, outputs)
    loss = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile(optimizer="rmsprop", loss=loss, metrics={"kind": ["accuracy"], "size": ["mae"]})
    return model


@pytest.mark.parametrize("mode", SHARED)
def test_nested_inputs_and_outputs_keep_their_names(mode: str) -> None:
    rng = np.random.default_rng(1)
    x = {"dense": rng.normal(size=(14, 5)), "ids": rng.integers(0, 7, (14, 4)).astype("int32")}
    y = {"kind": rng.integers(0, 3, 14), "size": rng.normal(size=(14, 1))}

    def use(model: Any) -> Any:
        history = fit(model, x, y, batch_size=5)
        return history, model.predict(x, batch_size=5, verbose=0), model.evaluate(x, y, verbose=0, return_dict=True)

    compare(two_inputs, use, mode)


@pytest.mark.parametrize("mode", MIRRORED)
def test_several_steps_per_execution_are_run(mode: str) -> None:
    x, y = data(29)

    def use(model: Any) -> Any:
        history = fit(model, x, y, validation_data=(x, y))
        return history, model.predict(x, batch_size=4, verbose=0)

    compare(lambda: without_dropout(steps_per_execution=3), use, mode)


def test_datasets_generators_and_changing_shapes_can_be_trained_on() -> None:
    def sequences() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([LAYERS.Input((None, 5)), LAYERS.GlobalAveragePooling1D(), LAYERS.Dense(3)])
        return compiled(model)

    def batches() -> Iterator[Any]:
        rng = np.random.default_rng(0)
        for size, length in ((4, 3), (6, 2), (3, 2), (5, 6)):
            yield rng.normal(size=(size, length, 5)), rng.integers(0, 3, size)

    def use(model: Any) -> Any:
        dataset = tf.data.Dataset.from_tensor_slices((np.ones((11, 2, 5)), data(11)[1])).batch(4)
        first = model.fit(dataset, epochs=2, verbose=0).history
        return first, model.fit(batches(), verbose=0).history

    one, many = sequences(), ar.distribute(sequences(), config("mirrored"))
    assert_same(use(one), use(many))
    # Keras counts one step more: it finds the end of a generator inside its step.
    assert int(many.optimizer.iterations) == int(one.optimizer.iterations) == 6 + 4 + 1
    for a, b in zip(one.variables, many.variables, strict=True):
        assert_same(a.numpy(), b.numpy())


@pytest.mark.parametrize("mode", SHARED)
def test_what_keras_does_without_a_batch_where_data_of_unknown_length_end_is_done(mode: str) -> None:
    def use(model: Any) -> Any:
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), "sparse_categorical_crossentropy")
        x, y = data()
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda *_: True)
        history = model.fit(batches, epochs=2, verbose=0).history
        # tf_keras knows the length after the first epoch.
        assert int(model.optimizer.iterations) == (2 * 3 + 1 if keras.__name__ == "tf_keras" else 2 * (3 + 1))
        return history

    compare(classifier, use, mode)


def test_batch_inputs_say_which_axis_counts_examples() -> None:
    class TimeMajor(keras.Model):
        """Takes [time, batch, features]."""

        def __init__(self) -> None:
            super().__init__()
            self.dense = LAYERS.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.dense(tf.reduce_mean(inputs, 0))

    def build() -> Any:
        keras.utils.set_random_seed(0)
        model = TimeMajor()
        model(np.zeros((2, 1, 5)))
        return compiled(model)

    def use(model: Any) -> Any:
        x = np.random.default_rng(0).normal(size=(2, 7, 5))
        one_batch = tf.data.Dataset.from_tensors((x, data(7)[1]))  # of arrays, tf_keras compares the sizes
        return model.fit(one_batch, verbose=0).history, model.predict_on_batch(x)

    # Unnamed, time is taken for a batch of its own size: the numbers are the same, only time is divided.
    assert_same(use(ar.distribute(build(), config("shared"))), use(build()))
    one, many = build(), ar.distribute(build(), config("shared"), batch_inputs={"x": 1, "y": 0})
    x, y = np.random.default_rng(0).normal(size=(2, 7, 5)), data(7)[1]
    assert_same(one.predict_on_batch(x), many.predict_on_batch(x))
    # Keras weighs the loss by the length of axis 0, so only the weights can be compared.
    one.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
    many.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
    for a, b in zip(one.trainable_variables, many.trainable_variables, strict=True):
        assert_same(a.numpy(), b.numpy())


def halving() -> Any:
    """Return a callback that halves the learning rate after every second batch."""

    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch % 2:
                self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2

    return Halve()


@pytest.mark.parametrize("mode", SHARED)
def test_callbacks_see_and_change_the_model(mode: str, tmp_path: Path) -> None:
    def use(model: Any) -> Any:
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
            halving(),
            keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(str(tmp_path / f"{id(model)}.weights.h5"), save_weights_only=True),
        ]
        first = fit(model, epochs=4, callbacks=callbacks)
        model.load_weights(str(tmp_path / f"{id(model)}.weights.h5"))
        return first, fit(model)

    compare(lambda: classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9)), use, mode)


@pytest.mark.parametrize("mode", MIRRORED)
def test_weights_that_are_set_or_loaded_are_trained_on(mode: str) -> None:
    start = classifier().get_weights()

    def use(model: Any) -> Any:
        fit(model)
        model.set_weights(start)
        model.optimizer.learning_rate = 0.5
        history = fit(model)
        for metric in model.metrics:
            metric.reset_state()
        return history

    compare(classifier, use, mode)


def test_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    def use(model: Any) -> Any:
        fit(model)
        model.save(str(tmp_path / "model.keras"))
        loaded = keras.models.load_model(str(tmp_path / "model.keras"))
        assert "make_train_function" not in vars(loaded)
        assert_same_model(model, loaded)
        clone = keras.models.clone_model(model)
        assert "make_train_function" not in vars(clone)
        copied = copy.deepcopy(model)
        assert "make_train_function" not in vars(copied)
        x, _ = data(4)
        tf.saved_model.save(model, str(tmp_path / "saved"))
        model.export(str(tmp_path / "exported"))
        exported = tf.saved_model.load(str(tmp_path / "exported"))
        np.testing.assert_allclose(exported.serve(tf.constant(x)), model.predict(x, verbose=0), rtol=1e-8)
        return fit(loaded), fit(model)

    compare(without_dropout, use, "mirrored")


@pytest.mark.parametrize("mode", MIRRORED)
def test_compiling_anew_keeps_a_model_distributed(mode: str) -> None:
    def use(model: Any) -> Any:
        first = fit(model)
        compiled(model, optimizer=keras.optimizers.Adagrad(0.1), loss="mse", metrics=["mae"])
        return first, fit(model, data()[0], np.eye(3)[data()[1]])

    _, many = compare(classifier, use, mode)
    assert many.train_function.items


@pytest.mark.parametrize("mode", SHARED)
def test_a_model_that_is_not_built_is_built_by_its_first_batch(mode: str) -> None:
    compare(unbuilt, seeded_fit, mode)


def test_a_forced_xla_compilation_is_left_out_and_noted() -> None:
    _, many = compare(lambda: without_dropout(jit_compile=True), fit, "shared")
    assert "without XLA" in str(many.train_function.items[0].report)


def own_step() -> Any:
    """Return a model with a train step of its own, over batches of its own form."""

    class OwnStep(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = LAYERS.Dense(3)
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = self(data["features"])
                loss = self.compute_loss(y=data["label"], y_pred=logits)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.seen.assign_add(tf.cast(tf.shape(logits)[0], self.seen.dtype))
            return {"loss": loss, "seen": self.seen}

    return OwnStep()


@pytest.mark.parametrize("mode", MODES)
def test_a_train_step_of_the_users_own_is_distributed(mode: str) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(0)
        return compiled(own_step(), metrics=None)

    def use(model: Any) -> Any:
        x, y = data(13)
        dataset = tf.data.Dataset.from_tensor_slices({"features": x, "label": y}).batch(4)
        return seeded_fit(model, dataset, batch_size=None)

    compare(build, use, mode)


def test_a_train_step_of_the_users_own_is_an_item_that_is_given_what_fit_gives_it() -> None:
    batch = {"features": tf.TensorSpec([None, 5], tf.float64), "label": tf.TensorSpec([None], tf.int64)}
    item = ar.GraphItem.from_keras(compiled(own_step(), metrics=None), batch)
    assert {"x/features", "x/label"} == set(item.inputs)
    assert ar.verify(item, config("shared")).ok


def test_what_cannot_be_distributed_besides_training_runs_as_it_is_and_says_so() -> None:
    from autograph_rewrite.runtime.keras_model import distribute_keras

    def refuse(item: Any, *, training: bool) -> Any:
        raise ar.PassError("not this one")

    x, y = data(9)
    one, many = classifier(), distribute_keras(classifier(), refuse, None, None, steps=1)
    with pytest.warns(UserWarning, match="evaluate runs on one device: not this one"):
        assert_same(one.evaluate(x, y, verbose=0), many.evaluate(x, y, verbose=0))
    with pytest.warns(UserWarning, match="predict runs on one device: not this one"):
        assert_same(one.predict(x, verbose=0), many.predict(x, verbose=0))
    with pytest.raises(ar.PassError, match="not this one"):
        fit(many)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: keras.Sequential([LAYERS.Dense(3)]), "is not compiled"),
        (lambda: "model", "cannot distribute an object of type str"),
    ],
)
def test_what_is_no_compiled_model_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ar.GraphError, match=message):
        ar.distribute(build(), config("shared"))(1)


def test_a_model_that_runs_eagerly_has_no_graph_to_distribute() -> None:
    model = ar.distribute(classifier(run_eagerly=True), config("shared"))
    with pytest.raises(ar.GraphError, match="run_eagerly"):
        fit(model)


def test_a_model_of_another_strategy_is_refused() -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = classifier()
    with pytest.raises(ar.GraphError, match=r"scope of a tf\.distribute strategy"):
        ar.distribute(model, config("shared"))


def test_losses_that_a_model_adds_and_layers_of_low_precision_are_trained_on() -> None:
    class Adds(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.dense = LAYERS.Dense(4, dtype="mixed_float16"), LAYERS.Dense(3)

        def call(self, inputs: Any) -> Any:
            logits = self.dense(self.low(inputs))
            self.add_loss(tf.reduce_mean(logits**2))
            return logits

    def build() -> Any:
        keras.utils.set_random_seed(0)
        return compiled(Adds())

    with keras_floats("float32", keras):
        one, many = build(), ar.distribute(build(), config("mirrored"))
        for a, b in zip(seeded_fit(one)["loss"], seeded_fit(many)["loss"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3)  # of float16


def test_a_model_of_either_library_is_an_item_whose_slots_have_the_librarys_names(tmp_path: Path) -> None:
    is_legacy = keras.__name__ == "tf_keras"
    optimizer = (keras.optimizers.legacy if is_legacy else keras.optimizers).Adam(0.01)
    model = without_dropout(optimizer=optimizer)
    item = ar.GraphItem.from_keras(model, tf.TensorSpec([None, 5], tf.float64), tf.TensorSpec([None], tf.int64))
    ending = "/kernel/m" if is_legacy else "_kernel_momentum"
    slots = [name for name in item.variables if re.match(r"(?i)adam(_\d+)?/", name) and name.endswith(ending)]
    assert len(slots) == 2
    assert ar.verify(item, config("shared")).ok
    fit(ar.distribute(model, config("shared")))
    ar.report(model, str(tmp_path / "report.html"))
    assert ending in (tmp_path / "report.html").read_text()
