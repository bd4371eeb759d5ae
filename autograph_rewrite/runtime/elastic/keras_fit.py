"""`fit` of a model in an elastic job: each call knows which one it is, and goes on where the last snapshot was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import count
from typing import Any

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.load.signature.keras_state import callbacks_of
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.elastic.job_memory import JobMemory


def seed(memory: JobMemory) -> None:
    """Let a program that has set no random seed draw the same in all generations.

    Args:
        memory: of the job.
    """
    from tensorflow.python.eager import context

    if context.global_seed() is None:
        tensorflow().random.set_seed(memory.seed)


def make_elastic(model: Any, memory: JobMemory, every: int) -> None:
    """Let a model's `fit` take snapshots, and begin at the last one.

    Args:
        model: a distributed Keras model.
        memory: of the job.
        every: how many steps there are from one snapshot to the next.
    """
    object.__setattr__(model, "fit", _fitting(model.fit, memory, every))
    object.__setattr__(model, "train_on_batch", _refused)


def _refused(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "a loop around train_on_batch is the program's own, and an elastic job could not go on in it",
        hint="call fit, or distribute a function and call it in a loop over ar.shard_dataset",
    )


def _fitting(fit: Callable[..., Any], memory: JobMemory, every: int) -> Callable[..., Any]:
    numbers = count(1)

    @functools.wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        import keras

        from autograph_rewrite.runtime.elastic.fit_position import FitPosition

        call = inspect.signature(fit).bind(*args, **kwargs)
        call.apply_defaults()
        own = callbacks_of(call.arguments.get("callbacks"))
        if not any(isinstance(callback, keras.callbacks.History) for callback in own):
            own.append(keras.callbacks.History())
        position = FitPosition(memory, f"fit-{next(numbers)}", memory.every(every), own)
        position.begin_at(call.arguments.get("initial_epoch", 0))
        call.arguments["callbacks"] = [*own, position]
        return fit(*call.args, **call.kwargs)

    return fitted
