"""Run a Keras model in a job of several workers: each takes its slice of every batch, and worker 0 saves.

    worker 0    batch[0:16]  ──┐
    worker 1    batch[16:32] ──┴──► one step on the whole batch, the same logs and weights everywhere

With `input: per_worker` the data is split already, and the batch of a step consists of the workers' batches.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autograph_rewrite import tf_private
from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.load.keras_library import callbacks_of, is_legacy, library_of, variables_of, wraps
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.data import rows
from autograph_rewrite.runtime.function.arguments import leaf_paths
from autograph_rewrite.runtime.job import exchanges, liveness
from autograph_rewrite.runtime.job.digests import (
    Beside,
    StepAccount,
    adopt_from_chief,
    common_seed,
    described,
    difference,
)
from autograph_rewrite.runtime.job.exchanges import Rendezvous
from autograph_rewrite.runtime.job.liveness import missing
from autograph_rewrite.runtime.job.tf_server import counts

_HINT = "give all workers the same data in the same order, or set input: per_worker"
_SMALL = 2**22
"""Bytes of a batch up to which its digest is made before the step, and exchanged by the step."""
WRITES = ("save", "save_weights", "export")


class KerasJob:
    """Takes one worker's part of the batches of a model, and changes the model's methods for a job.

    Args:
        splits: whether all workers are given the same data.
        batch_inputs: axis by argument path, as in `ar.distribute`.
        whole: the kinds of steps for which every worker feeds the whole batch, because workers hold stages.
    """

    def __init__(
        self,
        member: Membership,
        seconds: float,
        *,
        splits: bool,
        batch_inputs: Mapping[str, int | None] | None,
        whole: Collection[str],
    ) -> None:
        self._tf = tensorflow()
        self._member = member
        self._seconds = seconds
        self.splits, self._whole = splits, frozenset(whole)
        self._axes = dict(batch_inputs or {})
        self._given = 0
        self._batches: Counter[str] = Counter()
        self._beside = Beside(member, seconds) if splits else None
        self._pending: tuple[Callable[[], StepAccount], str] | None = None
        self._untold: set[str] = set()  # kinds whose steps exchange no digest

    def install(self, model: Any) -> None:
        """Let all workers shuffle alike, and only worker 0 write files, for which the others wait.

        Raises:
            ClusterError: the workers have set different seeds, or a worker is missing.
        """
        if self.splits:
            given = tf_private.global_seed()
            seed = common_seed(self._member, self._seconds, given)
            if given is None:
                self._tf.random.set_seed(seed)
        files = WrittenFiles(
            self._member, self._seconds, lambda: self._given, functools.partial(_is_asynchronous, model)
        )
        for name in WRITES:
            object.__setattr__(model, name, files.of_chief(getattr(model, name), name))
        backups = Backups(self._member, self._seconds, model, files)
        object.__setattr__(model, "fit", files.at_end(backups.fitting(model.fit), "fit"))

    def part(self, data: Any, kind: str) -> Any:
        """Return this worker's part of a batch that all workers are given; for a step in stages, all of it.

        The whole batches of all workers are compared, by the step itself (see `tell`) or, if they are large, while the
        step runs: see `problem`.
        """
        self._given += 1
        if self._beside is None or kind in self._whole:  # a session in stages feeds and compares the whole batch
            return data
        self._batches[kind] += 1
        account = functools.partial(_account, self._tf, data, f"batch {self._batches[kind]} to {kind} on")
        if kind not in self._untold and _size(self._tf, data) <= _SMALL:
            self._pending = account, kind
        else:
            self._beside.start(account)
        axes = iter([self._axes.get(_named(path), 0) for path in _paths(data)] if self._axes else ())
        return self._tf.nest.map_structure(lambda leaf: self._cut(leaf, next(axes, 0)), data)

    def problem(self, *, failed: bool = False) -> ClusterError | None:
        """Return the error of a step whose batch differs between workers.

        Raises:
            ClusterError: a worker is missing.
        """
        if self._beside is None:
            return None
        pending, self._pending = self._pending, None
        if pending is not None and failed:  # the step has not begun here: do the others do something else?
            return difference(self._member, pending[0]())
        if pending is not None:  # the step did not take the digest, as it exchanges none
            self._untold.add(pending[1])
            self._beside.start(pending[0])
        return self._beside.problem(failed=failed)

    def tell(self) -> StepAccount | None:
        """Return the account of the batch, for the step that is given a part of it to compare."""
        pending, self._pending = self._pending, None
        return pending[0]() if pending is not None else None

    def _cut(self, leaf: Any, axis: int | None) -> Any:
        if axis is None or leaf is None:
            return leaf
        workers, task = len(self._member.workers), self._member.task
        if isinstance(leaf, self._tf.RaggedTensor | self._tf.SparseTensor):
            return rows(leaf, workers, task)
        if not hasattr(leaf, "shape") or len(leaf.shape) <= axis:
            return leaf
        ends = bounds(int(leaf.shape[axis]), workers)
        return leaf[(slice(None),) * axis + (slice(ends[task], ends[task + 1]),)]


def _account(tf: Any, data: Any, what: str) -> StepAccount:
    """Return a worker's account of a batch: a description of each tensor of each of its parts."""
    given = {}
    for path, leaf in zip(_paths(data), tf.nest.flatten(data), strict=True):
        for number, part in enumerate(tf.nest.flatten(leaf, expand_composites=True)):
            if part is not None:
                given[f"'{_named(path)}'{f' ({number})' if number else ''}"] = described(part)
    return StepAccount(what, given, hint=_HINT)


def _size(tf: Any, data: Any) -> int:
    parts = tf.nest.flatten(data, expand_composites=True)
    return sum(
        int(np.prod(part.shape)) * np.dtype(tf.as_dtype(part.dtype).as_numpy_dtype).itemsize
        for part in parts
        if hasattr(part, "dtype")
    )


def _paths(data: Any) -> list[str]:
    """Return the paths of the leaves of a batch: "0/image", "1"."""
    return [path.lstrip("/") for path in leaf_paths(data, "")]


def _named(path: str) -> str:
    """Return what messages call a part of (x, y, sample_weight)."""
    position, _, rest = path.partition("/")
    name = dict(zip("012", ("x", "y", "sample_weight"), strict=True)).get(position, position)
    return f"{name}/{rest}" if rest else name


def _is_asynchronous(model: Any) -> bool:
    """Return whether the workers train without waiting for each other."""
    items = getattr(getattr(model, "train_function", None), "items", ())
    return any(item.report is not None and item.report.plan.is_asynchronous for item in items)


# BackupAndRestore in a job: the chief writes backups atomically, and all workers restore from them.
#
#     save      new weights ─► weights     killed before: the old epoch
#               new epoch   ─► epoch       killed between the two: the new epoch is found, and known to be the weights'
#     restore   worker 0's weights and epoch go to all, who may not see its files
#
# Keras overwrites first one file, and then the other. When any process dies, the launcher also ends worker 0, possibly
# between the two.


@dataclass(frozen=True)
class Backups:
    """Changes the callbacks of a model's `fit` for one worker."""

    member: Membership
    seconds: float
    """How long to wait for the others."""
    model: Any
    files: WrittenFiles

    def fitting(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's `fit` with its callbacks changed."""

        @wraps(fit)
        def fitted(*args: Any, **kwargs: Any) -> Any:
            callbacks = library_of(self.model).callbacks
            for callback in callbacks_of(inspect.signature(fit).bind(*args, **kwargs).arguments.get("callbacks")):
                if isinstance(callback, callbacks.BackupAndRestore):
                    (self._change_legacy if is_legacy(self.model) else self._change)(callback)
                if isinstance(callback, callbacks.CSVLogger) and not self.member.is_chief:
                    callback.filename = os.devnull
            return fit(*args, **kwargs)

        return fitted

    def _change(self, callback: Any) -> None:
        callback._load_model = functools.partial(self._load, callback)
        callback._save_model = self.files.of_chief(functools.partial(_save, callback), "BackupAndRestore")
        if not self.member.is_chief:
            callback.delete_checkpoint = False

    def _change_legacy(self, callback: Any) -> None:
        """Do as `_change` for tf_keras: TensorFlow's checkpoints are atomic, and the callback has a training state."""
        begin = callback.on_train_begin

        def on_train_begin(logs: Any = None) -> None:
            begin(logs)
            state = callback._training_state
            is_restored = state.read_checkpoint_manager.latest_checkpoint is not None
            counters = [state._ckpt_saved_epoch, state._ckpt_saved_batch, self.model._train_counter]
            self._adopt([is_restored], lambda: [*variables_of(self.model), *counters])
            state.back_up = self.files.of_chief(state.back_up, "BackupAndRestore")
            if not self.member.is_chief:
                state.delete_backup = lambda: None

        callback.on_train_begin = on_train_begin

    def _load(self, callback: Any) -> None:
        model = self.model
        if self.member.is_chief:
            _finish_saving(callback)
            type(callback)._load_model(callback)
        mine = [os.path.exists(callback._weights_path), model._initial_epoch or 0]
        model._initial_epoch = self._adopt(mine, lambda: variables_of(model))[1]

    def _adopt(self, mine: Sequence[int], variables: Callable[[], Sequence[Any]]) -> list[int]:
        """Begin where worker 0 does.

        Args:
            mine: whether this worker has restored a backup, then other numbers for worker 0 to send to all.
            variables: returns the variables that take worker 0's values if it has restored a backup.

        Returns:
            worker 0's `mine`.

        Raises:
            ClusterError: a worker is missing.
        """
        told = Rendezvous(self.member, self.seconds).rows(np.array(mine, np.int64), "restore a backup")[0]
        if told[0]:
            known = variables()
            values = adopt_from_chief(self.member, self.seconds, (variable.numpy() for variable in known))
            for variable, value in zip(known, values, strict=True):
                if not self.member.is_chief:
                    variable.assign(value)
        return [int(number) for number in told]


def _save(callback: Any) -> None:
    """Write weights and epoch to new files, then rename these to the old names."""
    if "://" in callback.backup_dir:  # an object store: writes are atomic, and files cannot be renamed
        type(callback)._save_model(callback)
        return
    weights, metadata = callback._weights_path, callback._training_metadata_path
    new_weights, new_metadata = _new(weights), _new(metadata)
    callback._weights_path, callback._training_metadata_path = new_weights, new_metadata
    try:
        type(callback)._save_model(callback)
    finally:
        callback._weights_path, callback._training_metadata_path = weights, metadata
    with open(new_metadata, encoding="utf-8") as file:
        said = json.load(file)
    with open(new_metadata, "w", encoding="utf-8") as file:
        json.dump({**said, "weights": _stamp(new_weights)}, file)  # Keras ignores other keys
    os.replace(new_weights, weights)
    os.replace(new_metadata, metadata)


def _finish_saving(callback: Any) -> None:
    """Rename the new epoch file if the process was killed after renaming only the weights."""
    new_metadata = _new(callback._training_metadata_path)
    with suppress(OSError, ValueError, KeyError):
        with open(new_metadata, encoding="utf-8") as file:
            said = json.load(file)
        if said["weights"] == _stamp(callback._weights_path):
            os.replace(new_metadata, callback._training_metadata_path)


def _stamp(path: str) -> list[int]:
    """Return size and time of a file, which a rename keeps and no other file has."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _new(path: str) -> str:
    """Return `backup/new.latest.weights.h5` for `backup/latest.weights.h5`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"new.{name}")


# Files that worker 0 writes for all: the others wait until they are complete, and raise an error if that fails.
#
#     worker 0   model.save(path) ─► whole ─► a flag on the device of each other worker, and on with the program
#     worker 1   model.save(path) ─► looks for the flag on its device ─► keras.saving.load_model(path)
#
# Worker 0 does not wait: it may save alone (`if task == 0`), and end after that. A flag names the batch of the model
# and the path, so that a flag that no worker looked for is not mistaken for a later one.


Result = TypeVar("Result")
_LOOK, _ASK, _TELLS, _OTHER = 0.01, 1.0, 3.0, 0.5
"""Seconds between two looks for a flag; between two looks at worker 0; that worker 0 takes at most to put flags; after
which a flag of another path is accepted."""
_SAID = 1_000
"""Characters of an error that are kept for the others."""


class _Told(NamedTuple):
    """A call that has ended on worker 0."""

    what: str
    when: str
    path: str = ""
    error: str = ""


class WrittenFiles:
    """Lets worker 0 write the files of one model, and the others wait for them.

    Args:
        at: returns how many batches the model was given.
        is_alone: returns whether workers train without waiting for each other.
    """

    def __init__(self, member: Membership, seconds: float, at: Callable[[], int], is_alone: Callable[[], bool]) -> None:
        self._member, self._seconds, self._at, self._is_alone = member, seconds, at, is_alone
        self._name = f"files.{next(counts().channels)}"
        self._is_writing = False
        self._runs = 0
        self._flags: exchanges.Flags | None = None
        self._seen = 0
        self._told: list[_Told] = []

    def of_chief(self, write: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a method that only worker 0 runs, and that returns on all workers once worker 0 has run it.

        Args:
            write: writes files; its first argument is a path, if it has one.
        """

        @wraps(write)
        def written(*args: Any, **kwargs: Any) -> Any:
            if self._is_writing:  # a call within `write`
                return write(*args, **kwargs)
            told = self._call(what, args, kwargs)
            if not self._member.is_chief:
                return self._wait(told)
            self._is_writing = True
            try:
                return self._run_and_tell(functools.partial(write, *args, **kwargs), told)
            finally:
                self._is_writing = False

        return written

    def at_end(self, run: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a method that all workers run, and that returns once worker 0 has run it: its callbacks write, too."""

        @wraps(run)
        def ran(*args: Any, **kwargs: Any) -> Any:
            self._runs += 1
            told = _Told(what, f"call {self._runs}")
            call = functools.partial(run, *args, **kwargs)
            if self._member.is_chief:
                return self._run_and_tell(call, told)
            result = call()
            self._wait(told)
            return result

        return ran

    def _call(self, what: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Told:
        path = next(iter((*args, *kwargs.values())), "")
        return _Told(what, f"batch {self._at()}", str(path) if isinstance(path, str | os.PathLike) else "")

    def _run_and_tell(self, call: Callable[[], Result], told: _Told) -> Result:
        """Make a call on worker 0, and tell the others that it has ended or failed."""
        try:
            result = call()
        except Exception as error:
            self._tell(told._replace(error=f"{type(error).__name__}: {error}"[:_SAID]))
            raise
        self._tell(told)
        return result

    def _tell(self, told: _Told) -> None:
        def put() -> None:
            statuses = liveness.ask(liveness.others(self._member, {"worker": self._member.workers}), liveness.PATIENCE)
            there = liveness.workers_in(name for name, status in statuses.items() if status == "OK")
            with suppress(Exception):  # the next step reports a worker that has just gone
                exchanges.put(self._member, self._name, there, text=json.dumps(told))

        if self._is_alone():
            return
        # In a thread: a session waits without end for a worker that ends while it opens.
        thread = threading.Thread(target=put, name="autograph_flags", daemon=True)
        thread.start()
        thread.join(_TELLS)

    def _wait(self, call: _Told) -> None:
        """Wait until worker 0 has told of a call.

        Raises:
            ClusterError: the call has failed on worker 0, or worker 0 is missing, or does not make it in time.
        """
        if self._is_alone():
            return
        began = asked = time.monotonic()
        doing, lookout = f"be done with '{call.what}'", liveness.PeerMonitor(self._member, self._seconds)
        lost: list[str] = []
        while (told := self._answer(call, is_late=bool(lost) or time.monotonic() - began > _OTHER)) is None:
            now = time.monotonic()
            if lost or now - began > self._seconds:
                raise missing(self._member, doing, self._seconds, lost=lost)
            if now - asked > _ASK:  # worker 0 may have put the flag and ended: look once more
                lost, asked = [name for name in lookout.lost() if name.startswith("worker 0 ")], now
            else:
                time.sleep(_LOOK)
        self._told.remove(told)
        if told.error:
            raise ClusterError(
                f"'{call.what}' has failed on worker 0, which writes for all: {told.error}",
                hint="look at what it printed last",
            )

    def _answer(self, call: _Told, *, is_late: bool) -> _Told | None:
        """Return worker 0's flag of a call; None if there is none yet.

        Args:
            is_late: whether to accept a flag of another path, too: each worker may save under its own.
        """
        if self._flags is None:
            self._flags = exchanges.Flags(self._member, self._name, [self._member.task])
        for at in range(self._seen, self._flags.counts()[0]):
            self._told += [_Told(*json.loads(text)) for text in self._flags.texts(at)]
            self._seen = at + 1
        found = [told for told in self._told if (told.what, told.when) == (call.what, call.when)]
        return next((told for told in found if told.path == call.path), found[0] if found and is_late else None)
