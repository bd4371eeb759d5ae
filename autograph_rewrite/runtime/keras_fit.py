"""Let a Keras `fit` go on at its last snapshot, in an elastic job or after it was asked to end.

A loop around `train_on_batch` belongs to the program; it resumes as a loop around a function does (`own_loop`).
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import keras
import numpy as np

from autograph_rewrite import tf_private
from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.load.keras_library import callbacks_of, variables_of, wraps
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.exchanges import Rendezvous
from autograph_rewrite.runtime.job.job_memory import JobMemory, Snapshot
from autograph_rewrite.runtime.job.own_loop import Array, OwnLoop, set_state, state_of
from autograph_rewrite.runtime.job.stop import Stop, is_wanted


def seed(memory: JobMemory) -> None:
    """Set the same random seed in all generations, if the program has set none."""
    if tf_private.global_seed() is None:
        tensorflow().random.set_seed(memory.seed)


def make_elastic(model: Any, memory: JobMemory, every: int) -> None:
    """Let a model's `fit`, or a loop around `train_on_batch`, take snapshots and begin at the last one."""
    object.__setattr__(model, "fit", _fitting(model.fit, memory, every))
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


def _changed(model: Any) -> list[Any]:
    """Return the variables of a model that training changes."""
    known = (*variables_of(model), *model.metrics_variables)
    return list({id(variable): variable for variable in known}.values())


def _numbered(model: Any) -> dict[str, Any]:
    """Return the changed variables by number: names depend on which other objects exist."""
    return {str(number): variable for number, variable in enumerate(_changed(model))}


def _fitting(fit: Callable[..., Any], memory: JobMemory, every: int) -> Callable[..., Any]:
    numbers = count(1)

    @wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        call, own = call_of(fit, args, kwargs)
        return FitPosition(memory, f"fit-{next(numbers)}", memory.every(every), own).run(fit, call)

    return fitted


def call_of(
    fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[inspect.BoundArguments, list[Any]]:
    """Return the call of a `fit`, and its callbacks with the History that `fit` would make itself."""
    call = inspect.signature(fit).bind(*args, **kwargs)
    call.apply_defaults()
    own = callbacks_of(call.arguments.get("callbacks"))
    if not any(isinstance(callback, keras.callbacks.History) for callback in own):
        own.append(keras.callbacks.History())
    return call, own


# The position of a `fit`: its last callback takes snapshots, and leads a re-formed job to the last snapshot.
#
#   epochs        0          1          2
#   before        ────────── ──────s──  ✕          s: the snapshot, every `snapshot_steps` steps; ✕: a worker is lost
#   re-formed     ░░░░░░░░░░ ░░░░░░│──  ────       ░: data are drawn and dropped; │: values, callbacks, metrics as at s
#
# Drawing the data again brings shuffles, generators and seeds to the state that they had. Meanwhile nothing is computed
# or printed, and no other callback is called.

_MUTED = (
    *(f"on_{what}_{when}" for what in ("epoch", "train_batch", "batch") for when in ("begin", "end")),
    *(f"on_test_{what}{when}" for what in ("", "batch_") for when in ("begin", "end")),
)
_COMPUTING = ("evaluate", "get_metrics_result")
"""Methods of the model that `fit` calls at the end of an epoch."""


class FitPosition(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the epochs and steps of one `fit`, takes snapshots, and resumes at the last one.

    Args:
        every: how many steps there are from one snapshot to the next.
        others: all other callbacks, a History among them.
    """

    def __init__(self, memory: JobMemory | SnapshotFile, name: str, every: int, others: Sequence[Any]) -> None:
        super().__init__()
        self._memory, self._name, self._every, self._others = memory, name, every, others
        self._found = memory.load(name)
        self._first = self._epoch = self._steps = self._since = 0
        self._skips = self._has_stepped = False
        self._done = 0
        self._logs: Any = {}
        self._batch: Any = None
        self._end_skipping: Callable[[], None] = _nothing
        if self._found is not None:
            self._mute()

    def run(self, fit: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """Call `fit` with this as its last callback; take a snapshot if the process is asked to end."""
        self._first = call.arguments.get("initial_epoch", 0)
        call.arguments["callbacks"] = [*self._others, self]
        stop = Stop.here()
        stop.begin_loop()
        stop.add(self.save)
        try:
            return fit(*call.args, **call.kwargs)
        finally:
            with suppress(ValueError):
                stop.remove(self.save)

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the first snapshot, or begin to skip to the position of the last one."""
        self._first = self.model._initial_epoch or self._first
        if self._found is None:
            self._take(self._first, 0, {})
            return
        self._first = self._found.position["first"]
        self.model._initial_epoch = self._first
        self._skip()
        self._arrive_at(self._first, 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch, self._steps = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a step, and take a snapshot if one is due."""
        self._steps += 1
        self._done += self.model.steps_per_execution
        self._logs = logs or {}
        if self._skips:
            self._arrive_at(self._epoch, self._steps)
            return
        if not self._has_stepped:
            self._has_stepped = True
            self._memory.did_step()
        self._since += self.model.steps_per_execution
        if self._since >= self._every:
            self._take(self._epoch, self._steps, self._logs)

    def save(self) -> str | None:
        """Take a snapshot as the job ends; return its description, on all workers.

        None if the last snapshot is still valid.
        """
        if self._skips or not self._has_stepped:
            return None
        self._take(self._epoch, self._steps, self._logs)
        return f"a snapshot of epoch {self._epoch + 1}, step {self._steps}"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take a snapshot; let others join if they want to."""
        if self._skips:
            self._arrive_at(epoch + 1, 0)
            return
        self._take(epoch + 1, 0, {})
        if self._memory.lets_join and self._memory.rank == 0:
            self._memory.wait_to_join()

    def _take(self, epoch: int, steps: int, logs: Any) -> None:
        """Let worker 0 take a snapshot; all workers have the same values, and build the optimizer if needed."""
        self._since = 0
        variables = _changed(self.model)
        if self._memory.rank:
            return
        arrays: list[Array] = [variable.numpy() for variable in variables]
        callbacks = [state_of(callback, arrays) for callback in self._others]
        position = {
            "first": self._first,
            "epoch": epoch,
            "steps": steps,
            "logs": {name: float(value) for name, value in logs.items() if np.ndim(value) == 0},
            "stop": bool(self.model.stop_training),
            "variables": [variable.path for variable in variables],
            "callbacks": callbacks,
        }
        self._memory.save(self._name, Snapshot(position, arrays), self._done)

    def _mute(self) -> None:
        """Keep skipped steps from all other callbacks."""
        for callback in self._others:
            for name in _MUTED:
                object.__setattr__(callback, name, self._unless_skipping(getattr(callback, name)))
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                object.__setattr__(callback, "on_train_begin", _nothing)  # do not restore: the snapshot is newer
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True

    def _unless_skipping(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def heard(*args: Any, **kwargs: Any) -> Any:
            return None if self._skips else hook(*args, **kwargs)

        return heard

    def _skip(self) -> None:
        """Draw data without computing, until `_end_skipping`."""
        assert self._found is not None
        model, step, logs = self.model, self.model.train_function, self._found.position["logs"]
        talks = keras.config.is_interactive_logging_enabled()

        def draw(iterator: Any) -> Any:
            batches = list(islice(iterator, model.steps_per_execution))
            if not batches:
                raise StopIteration
            self._batch = batches[-1]
            return dict(logs)

        def end() -> None:
            model.train_function = step
            for name in _COMPUTING:
                object.__delattr__(model, name)
            if talks:
                keras.config.enable_interactive_logging()

        model.train_function = draw
        for name in _COMPUTING:
            object.__setattr__(model, name, lambda *_, **__: {})
        keras.config.disable_interactive_logging()
        self._skips, self._end_skipping = True, end

    def _arrive_at(self, epoch: int, steps: int) -> None:
        """If this is the position of the snapshot, restore it and go on from here.

        Raises:
            ClusterError: the program has other variables or callbacks than at the snapshot.
        """
        assert self._found is not None
        position, arrays = self._found.position, self._found.arrays
        if (epoch, steps) != (position["epoch"], position["steps"]):
            return
        self._end_skipping()
        self._skips = False
        variables = _changed(self.model)
        if len(variables) != len(position["variables"]) and self._batch is not None:
            # Metrics, and layers without an input shape, make their variables at the first batch.
            self.model._symbolic_build(data_batch=self._batch)
            variables = _changed(self.model)
        if len(variables) != len(position["variables"]) or len(position["callbacks"]) != len(self._others):
            raise ClusterError(
                f"the model '{self.model.name}' is another one than before the job was re-formed",
                hint="what a program builds may not depend on how many workers there are, or on their number",
            )
        for variable, value in zip(variables, arrays[: len(variables)], strict=True):
            variable.assign(value)
        for callback, state in zip(self._others, position["callbacks"], strict=True):
            set_state(callback, state, arrays)
        self.model.stop_training = position["stop"]
        self._found = None


def _nothing(*_: Any, **__: Any) -> None:
    return None


# `fit` of a model whose process may be asked to end: its position is saved in the folder of BackupAndRestore.


def make_preemptible(model: Any, member: Membership | None, seconds: float) -> None:
    """Let a model's `fit` end between two steps, and go on there in the next run.

    Args:
        member: this process; None where there are no others.
    """
    if is_wanted():
        object.__setattr__(model, "fit", _keeping(model.fit, member, seconds))


def _keeping(fit: Callable[..., Any], member: Membership | None, seconds: float) -> Callable[..., Any]:
    """Return a `fit` whose position is saved, if it has a BackupAndRestore with a local folder."""
    numbers = count(1)

    @wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:
        call, own = call_of(fit, args, kwargs)
        folders = [callback.backup_dir for callback in own if isinstance(callback, keras.callbacks.BackupAndRestore)]
        number = next(numbers)
        if not folders or "://" in folders[0]:
            Stop.here().begin_loop()
            return fit(*call.args, **call.kwargs)
        file = SnapshotFile(Path(folders[0]) / f"preempted-{number}.npz", member, seconds)
        return PreemptedFit(file, own).run(fit, call)

    return fitted


# A `fit` with BackupAndRestore that was asked to end goes on at the very step when the program runs again.
#
#     epoch 3, behind step 17 of 40   SIGTERM ─► all workers end, worker 0 writes backup/preempted-1.npz
#     the next run                    17 batches of epoch 3 are drawn and dropped; step 18 is as it would have been
#
# Keras' backup is of the end of an epoch, or begins an epoch again with weights that have seen a part of it.


class PreemptedFit(FitPosition):
    """Counts the steps of a `fit`, and takes a snapshot only when the process is asked to end."""

    def __init__(self, file: SnapshotFile, others: Sequence[Any]) -> None:
        self._file = file
        self._where: tuple[int, int, Mapping[str, Any]] = 0, 0, {}
        super().__init__(file, "", 1, others)

    def save(self) -> str | None:
        """Write a snapshot and return its description; None before `fit` has begun, or while it skips."""
        if self._skips or self.model is None:
            return None  # the existing file is still valid
        super()._take(*self._where)
        return f"the fit, in {self._file.path}"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Remove the snapshot: the backup of this epoch is newer."""
        super().on_epoch_end(epoch, logs)
        if not self._skips:
            self._file.remove()

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the snapshot: the fit is complete."""
        self._file.remove()

    def _take(self, epoch: int, steps: int, logs: Any) -> None:
        """Store the position for `save`, without a snapshot."""
        self._where = epoch, steps, dict(logs)


class SnapshotFile:
    """The snapshot of one fit: worker 0 writes, reads and sends it to the others, which may not see its files.

    Args:
        member: this process; None where there are no others.
    """

    lets_join = False

    def __init__(self, path: Path, member: Membership | None, seconds: float) -> None:
        self.path, self._member, self._seconds = path, member, seconds
        self.rank = member.task if member is not None else 0

    def load(self, _: str) -> Snapshot | None:
        """Return the snapshot; None if there is none, or it is damaged."""
        data = self.path.read_bytes() if self.rank == 0 and self.path.is_file() else b""
        if self._member is not None:
            data = Rendezvous(self._member, self._seconds).contents(data, "restore a fit")[0]
        if not data:
            return None
        try:
            return Snapshot.read(io.BytesIO(data))
        except Exception as error:  # numpy, zipfile and json raise many types for damaged files
            warn_user(f"{self.path} is damaged, and left out: {type(error).__name__}: {error}")
            return None

    def save(self, _: str, snapshot: Snapshot, step: int = 0) -> None:
        """Replace the last snapshot."""
        written = io.BytesIO()
        snapshot.write(written)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, written.getvalue())

    def remove(self) -> None:
        """Remove the file, on worker 0."""
        if self.rank == 0:
            self.path.unlink(missing_ok=True)

    def did_step(self) -> None:
        """Do nothing: no launcher asks."""

    def wait_to_join(self) -> None:
        """Do nothing: no worker joins."""
