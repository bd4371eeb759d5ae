"""`profile`: run some steps of a distributed function, session or model, and measure their time on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.profile import Profile
from autograph_rewrite.load.keras_library import is_model
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine.session import DistributedSession
from autograph_rewrite.runtime.engine.tracing import Observed, Recording
from autograph_rewrite.runtime.function.function import DistributedFunction
from autograph_rewrite.runtime.keras_model import functions_of
from autograph_rewrite.training_graph import TrainingGraph

WARM_UP = 2
"""Steps before the measured ones: the first steps trace, connect and allocate."""


def profile(
    target: Any,
    *args: Any,
    steps: int = 5,
    warmup: int = WARM_UP,
    original: TrainingGraph | None = None,
    machine: Machine | None = None,
    **kwargs: Any,
) -> Profile:
    """Run some steps and return their profile.

    Args:
        target: a distributed function; a session of a rewritten item; a distributed Keras model; or any other function,
            of which only the names of kernels are known.
        *args: the arguments of the function; the fetches and feeds of the session; x and y of `train_on_batch`.
        steps: how many steps are measured.
        warmup: how many steps run before, at least one.
        original: for a session, the graph before it was rewritten, to predict its step.
        machine: the speed of the devices, for the prediction; None: round figures.
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
    """Return a function that runs one step."""
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
    """Return the functions or sessions of a target that report their steps, and their rewritten graphs."""
    if isinstance(target, DistributedSession):
        return [target], [target.item]
    functions = [target] if isinstance(target, DistributedFunction) else []
    functions += functions_of(target) if is_model(target) else []
    return functions, [item for function in functions for item in function.items]


# A Keras callback that profiles some batches of `fit`, on all ranks, and logs the profile for TensorBoard.
#
# model.fit(x, y, callbacks=[ar.ProfileCallback("logs", skip=10, steps=5)])
#
#     logs/profile.json         the timeline of all ranks, for Perfetto and `report --measured`
#     logs/events.out...        profile/step_seconds, profile/examples_per_second, profile/rank_0/CPU:0/compute, ...

TIMES = ("compute", "communication", "idle")


class ProfileCallback(tensorflow().keras.callbacks.Callback):  # type: ignore[misc]
    """Profiles batches of the first `fit` that uses this callback.

    Args:
        log_dir: where TensorBoard looks.
        skip: how many batches run before the measured ones, at least one.
        steps: how many batches are measured.

    Attributes:
        profile: the result; None until it is complete.
    """

    def __init__(self, log_dir: str | Path, *, skip: int = 10, steps: int = 5) -> None:
        super().__init__()
        if skip < 1 or steps < 1:
            raise GraphError(f"there is nothing to profile in {steps} steps after {skip}", hint="give 1 or more")
        self.profile: Profile | None = None
        self._folder, self._skip, self._count = Path(log_dir), skip, steps
        self._batches = 0
        self._recording: Recording | None = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin to measure after `skip` batches."""
        if self._batches == self._skip and self.profile is None:
            functions = functions_of(self.model)
            if not functions:
                hint = "model = ar.distribute(model, config) before fit"
                raise GraphError(f"the model '{self.model.name}' is not distributed, so it has no profile", hint=hint)
            self._recording = Recording(functions, [item for function in functions for item in function.items])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End after enough batches, and write the profile."""
        self._batches += 1
        if self._recording is not None and self._batches == self._skip + self._count:
            self._end()

    def on_train_end(self, logs: Any = None) -> None:
        """End with fewer batches, if the data have ended before."""
        if self._recording is not None:
            self._end()

    def _end(self) -> None:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        self.profile = recording.end()
        if not recording.ranks.is_chief:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.profile.save(self._folder / "profile.json")
        tf = tensorflow()
        step = int(self.model.optimizer.iterations)
        with tf.summary.create_file_writer(str(self._folder)).as_default():
            for name, value in scalars(self.profile):
                data = tf.constant(value, tf.float32)
                tf.summary.write(f"profile/{name}", data, step=step, metadata=_shown_by(tf, "scalars"))
            text = tf.constant(f"```\n{self.profile}```")
            tf.summary.write("profile", text, step=step, metadata=_shown_by(tf, "text"))


def _shown_by(tf: Any, plugin: str) -> Any:
    """Return the metadata of `tf.summary.scalar` and `tf.summary.text`, which themselves need TensorBoard installed."""
    made = tf.compat.v1.SummaryMetadata()
    made.plugin_data.plugin_name = plugin
    made.data_class = {"scalars": 1, "text": 2}[plugin]  # DATA_CLASS_SCALAR, DATA_CLASS_TENSOR
    return made


def scalars(profile: Profile) -> Iterator[tuple[str, float]]:
    """Yield the figures of a profile by name."""
    figures = profile.figures()
    for name in ("step_seconds", "predicted_step_seconds", "examples_per_second", "flops_per_second"):
        if figures[name]:
            yield name, figures[name]
    yield "exposed_communication_seconds", figures["exposed_seconds"]
    yield "attributed", figures["attributed"]["share"]
    for row in figures["devices"]:
        for key in TIMES:
            place = f"rank_{row['rank']}/{row['device']}/{key}"
            yield place, row[key]
            if row["predicted"]:
                yield f"{place}_predicted", row["predicted"][key]
