"""Hide the differences between the two Keras libraries: Keras 3, and tf_keras, which is Keras 2."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

LIBRARIES = ("keras", "tf_keras")


def _imported() -> list[Any]:
    """Return the libraries that the program has imported; it has no objects of others."""
    return [sys.modules[name] for name in LIBRARIES if hasattr(sys.modules.get(name), "Model")]


def is_model(target: Any) -> bool:
    """Return whether an object is a Keras model."""
    return any(isinstance(target, library.Model) for library in _imported())


def library_of(model: Any) -> Any:
    """Return the library of a model."""
    return next(library for library in _imported() if isinstance(model, library.Model))


def is_legacy(model: Any) -> bool:
    """Return whether a model is one of tf_keras."""
    return bool(library_of(model).__name__ == "tf_keras")


def wraps(method: Callable[..., Any]) -> Callable[[Wrapper], Wrapper]:
    """Return `functools.wraps` for a method, whose signature keeps `self`, as decorators of tf_keras need it."""

    def wrapped(wrapper: Wrapper) -> Wrapper:
        made = functools.wraps(method)(wrapper)
        made.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return cast(Wrapper, made)

    return wrapped


def backend(model: Any) -> str:
    """Return the backend of a model's library."""
    return "tensorflow" if is_legacy(model) else str(library_of(model).config.backend())


def strategy_of(model: Any) -> Any:
    """Return the tf.distribute strategy in whose scope a model was made; None without one."""
    return model._distribution_strategy if is_legacy(model) else model._distribute_strategy


def is_compiled(model: Any) -> bool:
    """Return whether a model has an optimizer, or was compiled without one."""
    return getattr(model, "optimizer", None) is not None or bool(
        model._is_compiled if is_legacy(model) else model.compiled
    )


def count_steps(model: Any, kind: str, steps: int) -> None:
    """Add to the model's step counter, if its library counts inside the step.

    Args:
        kind: "train", "test" or "predict".
    """
    if is_legacy(model):
        getattr(model, f"_{kind}_counter").assign_add(steps)


def path_of(variable: Any) -> str:
    """Return the name of a variable for users: its path in Keras 3, else TensorFlow's name."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer; in legacy ones, `variables` is a method."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def build_optimizer(model: Any) -> None:
    """Make the optimizer of a model create its variables now, if it can and has not."""
    optimizer = getattr(model, "optimizer", None)  # a model that is not compiled may lack the attribute
    if optimizer is None or getattr(optimizer, "built", False) or not model.built or not model.trainable_variables:
        return
    build = optimizer.build if hasattr(optimizer, "build") else optimizer._create_all_weights
    build(model.trainable_variables)


# The state of a Keras `fit` that outlives a process: variables of model and optimizer, and callbacks.


def variables_of(model: Any) -> list[Any]:
    """Return the variables of a Keras model and its optimizer, each once, after building the optimizer if possible."""
    build_optimizer(model)
    optimizer = getattr(model, "optimizer", None)
    own = optimizer_variables(optimizer) if optimizer is not None else ()
    return list({id(variable): variable for variable in (*model.variables, *own)}.values())


def callbacks_of(given: Any) -> list[Any]:
    """Return the `callbacks` argument of `fit` (None, one, several or a CallbackList) as a list."""
    given = getattr(given, "callbacks", given)
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
