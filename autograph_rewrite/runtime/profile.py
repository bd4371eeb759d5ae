"""`profile`: run some steps of something distributed, and say where their time went, on all ranks of its job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.profile.profile import Profile
from autograph_rewrite.item import GraphItem, RewrittenTrace
from autograph_rewrite.runtime.distribute import is_keras_model, traces_of
from autograph_rewrite.runtime.function.function import DistributedFunction
from autograph_rewrite.runtime.keras.model import functions_of
from autograph_rewrite.runtime.session.session import DistributedSession
from autograph_rewrite.runtime.tracing.all_ranks import Ranks
from autograph_rewrite.runtime.tracing.prediction import prediction
from autograph_rewrite.runtime.tracing.tracer import Tracer

_Observed = DistributedFunction | DistributedSession
WARM_UP = 2
"""Steps that run before those that are measured: the first ones trace, connect and allocate."""


def profile(
    target: Any,
    *args: Any,
    steps: int = 5,
    warmup: int = WARM_UP,
    original: GraphItem | None = None,
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
    observed, known = _observed(target), _traces(target)
    ranks = Ranks([trace.rewritten for trace in known])
    tracer, marks = Tracer(), ranks.meet()
    tracer.start()
    try:
        _run_observed(lambda: run(*args, **kwargs), observed, tracer, steps)
    except BaseException:
        tracer.cancel()
        raise
    trace = tracer.stop(marks)
    said: tuple[Any, Any] = None, ()
    if ranks.is_chief and tracer.traces:
        first = tracer.traces[0]
        what = first if original is None else RewrittenTrace(original, first.rewritten)
        said = prediction(what, tracer.examples[0] * ranks.cut_among(first.rewritten), machine)
    traces, text = ranks.gather(trace, json.dumps(said))
    return Profile.of(traces, *json.loads(text))


def _run_observed(run: Callable[[], Any], observed: Sequence[_Observed], tracer: Tracer, steps: int) -> None:
    """Run the steps with a tracer that is told of them; without anything that tells it, each run is one."""
    before = [one.observer for one in observed]
    for one in observed:
        one.observer = tracer
    try:
        for _ in range(steps):
            with nullcontext() if observed else tracer.step():
                run()
    finally:
        for one, old in zip(observed, before, strict=True):
            one.observer = old


def _runner(target: Any) -> Callable[..., Any]:
    """Return what runs one step."""
    if isinstance(target, DistributedSession):
        return target.run
    if is_keras_model(target):
        run: Callable[..., Any] = target.train_on_batch
        return run
    if isinstance(target, GraphItem) or not callable(target):
        hint = "give what ar.distribute returned, a session of a rewritten item, or a function"
        raise GraphError(f"an object of type {type(target).__name__} runs no step", hint=hint)
    return cast("Callable[..., Any]", target)


def _observed(target: Any) -> list[_Observed]:
    """Return what tells of its steps."""
    if isinstance(target, (DistributedFunction, DistributedSession)):
        return [target]
    return list(functions_of(target)) if is_keras_model(target) else []


def _traces(target: Any) -> Sequence[RewrittenTrace]:
    """Return what was rewritten, as far as that is known."""
    if isinstance(target, DistributedSession):
        return [RewrittenTrace(target.item, target.item)]
    return traces_of(target) if _observed(target) else []
