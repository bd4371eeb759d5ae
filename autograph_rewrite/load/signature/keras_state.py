"""The parts of a Keras `fit` that outlive a process: variables of model and optimizer, and the callbacks given."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.load.signature.keras_library import build_optimizer, optimizer_variables


def variables_of(model: Any) -> list[Any]:
    """Return the variables of a Keras model and its optimizer, each once; the optimizer makes its own now, if it can.

    Args:
        model: built or not, compiled or not.
    """
    build_optimizer(model)
    optimizer = getattr(model, "optimizer", None)
    own = optimizer_variables(optimizer) if optimizer is not None else ()
    return list({id(variable): variable for variable in (*model.variables, *own)}.values())


def callbacks_of(given: Any) -> list[Any]:
    """Return the callbacks that `fit` was given: none, one, several or a CallbackList."""
    given = getattr(given, "callbacks", given)
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
