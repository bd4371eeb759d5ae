"""`profile`: run some steps of something distributed, and say where their time went, on all ranks of its job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.load.keras_library import is_model
from autograph_rewrite.runtime.engine.recording import Observed, Recording
from autograph_rewrite.runtime.engine.session import DistributedSession
from autograph_rewrite.runtime.function.function import DistributedFunction
from autograph_rewrite.runtime.keras.model import functions_of
from autograph_rewrite.training_graph import TrainingGraph

WARM_UP = 2
"""Steps that run before those that are measured: the first ones trace, connect and allocate."""


def profile(
    target: Any,
    *args: Any,
    steps: int = 5,
    warmup: int = WARM_UP,
    original: TrainingGraph | None = None,
    machine: Machine | None = None,
    **kwargs: Any,
) -> Profile:
    """Run some steps and return where their time went.

    Args:
        target: a distributed function; a session of a rewritten item; a distributed Keras model; or a function of one's
            own, of which nothing is known but the names of its kernels.
        *args: what the function is called with; the fetches and feeds of the session; x and y of `train_on_batch`.
        steps: how many are measured.
        warmup: how many run before, at least one.
        original: of a session, the graph before it was rewritten, to predict its step.
        machine: how fast devices are, for the prediction; left out, round figures.
        **kwargs: as `args`.

    Raises:
        GraphError: there is nothing to run, or TensorFlow's profiler is running already.
        ClusterError: a rank of the job is missing.
    """
    if steps < 1 or warmup < 1:
        raise GraphError(f"there is nothing to profile in {steps} steps after {warmup}", hint="give 1 or more of both")
    run = _runner(target)
    for _ in range(warmup):
        run(*args, **kwargs)
    observed, items = _observed(target)
    recording = Recording(observed, items)
    try:
        for _ in range(steps):
            with nullcontext() if observed else recording.tracer.step():
                run(*args, **kwargs)
    except BaseException:
        recording.cancel()
        raise
    return recording.end(original, machine)


def _runner(target: Any) -> Callable[..., Any]:
    """Return what runs one step."""
    if isinstance(target, DistributedSession):
        return target.run
    if is_model(target):
        run: Callable[..., Any] = target.train_on_batch
        return run
    if isinstance(target, TrainingGraph) or not callable(target):
        hint = "give what ar.distribute returned, a session of a rewritten item, or a function"
        raise GraphError(f"an object of type {type(target).__name__} runs no step", hint=hint)
    return cast("Callable[..., Any]", target)


def _observed(target: Any) -> tuple[Sequence[Observed], Sequence[TrainingGraph]]:
    """Return what tells of its steps, and what was rewritten of it."""
    if isinstance(target, DistributedSession):
        return [target], [target.item]
    functions = [target] if isinstance(target, DistributedFunction) else []
    functions += functions_of(target) if is_model(target) else []
    return functions, [item for function in functions for item in function.items]
