"""A Keras model in an elastic job: each `fit` knows which one it is, and goes on where the last snapshot was.

A loop around `train_on_batch` is the program's own; it is led as one around a function is (`own_loop`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from autograph_rewrite import tf_private
from autograph_rewrite.load.signature.keras_library import wraps
from autograph_rewrite.load.signature.keras_state import callbacks_of, variables_of
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.elastic.callback_state import Array
from autograph_rewrite.runtime.elastic.job_memory import JobMemory
from autograph_rewrite.runtime.elastic.own_loop import OwnLoop


def seed(memory: JobMemory) -> None:
    """Let a program that has set no random seed draw the same in all generations."""
    if tf_private.global_seed() is None:
        tensorflow().random.set_seed(memory.seed)


def _unattended(_: Callable[[], str | None]) -> AbstractContextManager[None]:
    return nullcontext()


def make_elastic(
    model: Any,
    memory: JobMemory,
    every: int,
    around: Callable[[Callable[[], str | None]], AbstractContextManager[None]] = _unattended,
) -> None:
    """Let a model's `fit` take snapshots, and begin at the last one.

    Args:
        model: a distributed Keras model.
        every: how many steps there are from one snapshot to the next.
        around: given what takes a snapshot when the job ends, a context for each `fit`.
    """
    object.__setattr__(model, "fit", _fitting(model.fit, memory, every, around))
    object.__setattr__(model, "train_on_batch", _stepping(model, model.train_on_batch))


def _stepping(model: Any, train_on_batch: Callable[..., Any]) -> Callable[..., Any]:
    is_back = False
    name = ""

    def read() -> dict[str, Array]:
        return {name: variable.numpy() for name, variable in _numbered(model).items()}

    def come_back(loop: OwnLoop, call: inspect.BoundArguments) -> None:
        if not loop.values(name, loop.known(name)):
            return
        if not model.optimizer.built or not model.built:
            batch = [call.arguments.get(given) for given in ("x", "y", "sample_weight")]
            model._symbolic_build(data_batch=tuple(part for part in batch if part is not None))
        variables = _numbered(model)
        for key, value in loop.values(name, variables).items():
            variables[key].assign(value)

    @wraps(train_on_batch)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_back, name
        loop = OwnLoop.here()
        assert loop is not None
        name = name or loop.unique("train_on_batch")
        loop.before(name, read)
        if not is_back:
            is_back = True
            come_back(loop, inspect.signature(train_on_batch).bind(*args, **kwargs))
        logs = train_on_batch(*args, **kwargs)
        loop.after(name)
        return logs

    return stepped


def _numbered(model: Any) -> dict[str, Any]:
    """Return the variables of a model that training changes, by number: names depend on what else there is."""
    known = {id(v): v for v in (*variables_of(model), *model.metrics_variables)}
    return {str(number): variable for number, variable in enumerate(known.values())}


def _fitting(
    fit: Callable[..., Any],
    memory: JobMemory,
    every: int,
    around: Callable[[Callable[[], str | None]], AbstractContextManager[None]],
) -> Callable[..., Any]:
    numbers = count(1)

    @wraps(fit)
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
        with around(position.save):
            return fit(*call.args, **call.kwargs)

    return fitted
