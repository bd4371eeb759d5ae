"""A model with `local_sgd` meets where an epoch ends, and before it evaluates or predicts: variables are averaged.

step ─► step ─► ... ─► averaged ─► validation ─► logs of the epoch ─► callbacks: checkpoints save what all have
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from autograph_rewrite.load.signature.keras_library import as_callback, wraps
from autograph_rewrite.load.signature.keras_state import callbacks_of
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.keras.model import functions_of

AVERAGED = ("get_metrics_result", "evaluate", "predict", "test_on_batch", "predict_on_batch")
"""Methods that tell of the model as it is: metrics are asked for where an epoch ends."""


def average_in_fit(model: Any) -> None:
    """Let a model average what replicas have trained by themselves before metrics or callbacks tell of an epoch.

    Args:
        model: a distributed Keras model.
    """
    object.__setattr__(model, "fit", _fitting(model, model.fit))
    for name in AVERAGED:
        object.__setattr__(model, name, _averaged(model, getattr(model, name)))


def _average(model: Any) -> None:
    for function in functions_of(model):
        function.average_variables()


def _averaged(model: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if tensorflow().executing_eagerly():  # a step that is being traced has what it has
            _average(model)
        return method(*args, **kwargs)

    return called


def _fitting(model: Any, fit: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        class Averages:
            """Averages at the end of each epoch."""

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                """Average before the callbacks behind this one."""
                _average(model)

        call = inspect.signature(fit).bind(*args, **kwargs)
        call.apply_defaults()
        call.arguments["callbacks"] = [as_callback(Averages, model)(), *callbacks_of(call.arguments.get("callbacks"))]
        return fit(*call.args, **call.kwargs)

    return fitted
