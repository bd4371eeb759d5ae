"""Trace the `train_step` of a compiled Keras model or .keras file on `(x, y[, sample_weight])` to a TrainingGraph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.load import keras_library
from autograph_rewrite.load.functions import from_concrete, of_any_batch, trace
from autograph_rewrite.training_graph import TrainingGraph

_ARGUMENTS = ("x", "y", "sample_weight")


def from_keras(
    model: Any, *specs: Any, batch_inputs: Mapping[str, int | None] | None = None, step: str = "train_step"
) -> TrainingGraph:
    """Trace a step of a model. See `GraphItem.from_keras`.

    Args:
        model: of Keras 3 on the TensorFlow backend, or of tf_keras; compiled, unless `step` is "predict_step".
        specs: x, y and sample_weight; each a spec, an array, a Keras input or a nest of them, or None.
        batch_inputs: axis by argument path.
        step: "train_step", "test_step" or "predict_step".

    Raises:
        GraphError: the model is another object or not compiled, or tracing raised.
    """
    _check(model, specs, step)
    alone = len(specs) == 1 and not isinstance(specs[0], tuple | list)  # `fit(x)` gives a step x, not a tuple of it
    function = step_function(model, step, 0 if alone else len(specs))
    concrete = trace(function, [of_any_batch(spec) for spec in specs], {})
    return from_concrete(concrete, batch_inputs=batch_inputs, search=(model,))


def from_file(path: Path, batch_inputs: Mapping[str, int | None] | None = None) -> TrainingGraph:
    """Read a model that `model.save` wrote, and trace its step; the specs of its labels follow from its losses.

    Raises:
        GraphError: the model cannot be loaded, was saved without being compiled, or its labels are not known.
    """
    import keras

    hint = "begin with the script that trains it: autograph-rewrite VERB train.py"
    try:
        model = keras.saving.load_model(path)
    except (ValueError, TypeError, OSError) as error:
        raise GraphError(f"Keras cannot load the model: {error}", hint=hint) from error
    if not getattr(model, "inputs", None) or not model.compiled:
        raise GraphError("the model was saved without its inputs or without compile()", hint=hint)
    try:
        given = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        return from_keras(model, given, _labels(model), batch_inputs=batch_inputs)
    except GraphError as error:
        raise GraphError(f"the labels that this model wants are not known: {error.problem}", hint=hint) from error


def _labels(model: Any) -> Any:
    """Return the specs of a model's labels: class numbers for sparse losses, else as the outputs."""
    import keras
    import tensorflow as tf

    def label(output: Any, loss: Any) -> Any:
        name = loss if isinstance(loss, str) else getattr(loss, "name", None) or type(loss).__name__
        if "sparse" in str(name).lower():
            return tf.TensorSpec(output.shape[:-1], tf.int64)
        return tf.TensorSpec(output.shape, output.dtype if output.dtype.startswith("float") else "float32")

    outputs, losses = model.outputs[0] if isinstance(model, keras.Sequential) else model.output, model.loss
    if isinstance(outputs, Mapping):
        return {key: label(one, losses[key] if isinstance(losses, Mapping) else losses) for key, one in outputs.items()}
    if isinstance(outputs, list | tuple):
        each = list(losses.values()) if isinstance(losses, Mapping) else losses
        each = each if isinstance(each, list | tuple) else [losses] * len(outputs)
        return [label(one, loss) for one, loss in zip(outputs, each, strict=True)]
    return label(outputs, losses)


def step_function(model: Any, step: str, arguments: int) -> Callable[..., Any]:
    """Return a model's step as a function of `arguments` parameters named x, y, sample_weight.

    A step takes one `data` argument; separate parameters name the graph's inputs x, y and sample_weight.

    Args:
        step: name of its method, such as "train_step".
        arguments: the length of the tuple (x, y, sample_weight) that the step takes; 0: it takes x itself.
    """
    run = getattr(model, step)

    def step_0(x: Any) -> Any:
        return run(x)

    def step_1(x: Any) -> Any:
        return run((x,))

    def step_2(x: Any, y: Any) -> Any:
        return run((x, y))

    def step_3(x: Any, y: Any, sample_weight: Any) -> Any:
        return run((x, y, sample_weight))

    return (step_0, step_1, step_2, step_3)[arguments]


def require_usable(model: Any, *, is_trained: bool = True) -> None:
    """Require that Keras runs on TensorFlow, and that the model is compiled if it is trained.

    Raises:
        GraphError: Keras has another backend, or the model is not compiled.
    """
    runs_on = keras_library.backend(model)
    if runs_on != "tensorflow":
        raise GraphError(
            f"Keras runs on {runs_on} here; its steps are not TensorFlow graphs",
            hint="set KERAS_BACKEND=tensorflow before importing keras",
        )
    if is_trained and not keras_library.is_compiled(model):
        raise GraphError(f"the model '{model.name}' is not compiled", hint="call model.compile(...) first")


def _check(model: Any, specs: tuple[Any, ...], step: str) -> None:
    if not keras_library.is_model(model):
        raise GraphError(f"expected a Keras model, not {type(model).__module__}.{type(model).__name__}")
    require_usable(model, is_trained=step != "predict_step")
    if not 1 <= len(specs) <= len(_ARGUMENTS):
        raise GraphError(
            f"from_keras takes the specs of {', '.join(_ARGUMENTS)}, not {len(specs)} of them",
            hint="for example from_keras(model, tf.TensorSpec([None, 3]), tf.TensorSpec([None]))",
        )
