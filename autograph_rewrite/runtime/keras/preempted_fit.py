"""`fit` of a model whose process may be asked to end: a loop of its own, which is kept where BackupAndRestore says."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import keras

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.load.keras_library import callbacks_of, wraps
from autograph_rewrite.runtime.job.job_memory import Snapshot
from autograph_rewrite.runtime.job.rendezvous import Rendezvous
from autograph_rewrite.runtime.job.stop import Stop, is_wanted
from autograph_rewrite.runtime.keras.elastic_fit import FitPosition


def make_preemptible(model: Any, member: Membership | None, seconds: float) -> None:
    """Let a model's `fit` end between two steps, and go on there in the next run.

    Args:
        model: a distributed Keras model.
        member: this process; None: there is no other.
        seconds: how long to wait for the others.
    """
    if is_wanted():
        object.__setattr__(model, "fit", _fitting(model.fit, member, seconds))


@contextmanager
def saved_at_the_end(save: Callable[[], str | None]) -> Iterator[None]:
    """Give a context in which a `fit` is saved if its process is asked to end.

    Args:
        save: saves it, and returns what was saved.
    """
    stop = Stop.here()
    stop.begin_loop()
    stop.add(save)
    try:
        yield
    finally:
        with suppress(ValueError):
            stop.remove(save)


def _fitting(fit: Callable[..., Any], member: Membership | None, seconds: float) -> Callable[..., Any]:
    numbers, stop = count(1), Stop.here()

    @wraps(fit)
    def fitted(*args: Any, **kwargs: Any) -> Any:

        call, position = kept(fit, args, kwargs, next(numbers), member, seconds)
        if position is None:
            stop.begin_loop()
            return fit(*call.args, **call.kwargs)
        with saved_at_the_end(position.save):
            return fit(*call.args, **call.kwargs)

    return fitted


# A `fit` with BackupAndRestore that was asked to end goes on at the very step when the program runs again.
#
#     epoch 3, behind step 17 of 40   SIGTERM ─► all workers end, worker 0 writes backup/preempted-1.npz
#     the next run                    17 batches of epoch 3 are drawn and dropped; step 18 is as it would have been
#
# Keras' own backup is of the end of an epoch, or begins an epoch anew with weights that have seen a part of it.


class PreemptedFit(FitPosition):
    """Knows where a `fit` is, and writes that down when the process ends.

    Args:
        file: keeps its snapshot.
        others: all other callbacks, a History among them.
    """

    def __init__(self, file: SnapshotFile, others: Sequence[Any]) -> None:
        self._file = file
        self._where: tuple[int, int, Mapping[str, Any]] = 0, 0, {}
        super().__init__(file, "", 1, others)

    def save(self) -> str | None:
        """Write down where the fit is; return what was written; None before its first step is behind it."""
        if self._skips or self.model is None:
            return None  # the file that is there still holds
        super()._take(*self._where)
        return f"the fit, in {self._file.path}"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The backup of this epoch is newer than the snapshot."""
        super().on_epoch_end(epoch, logs)
        if not self._skips:
            self._file.remove()

    def on_train_end(self, logs: Any = None) -> None:
        """Nothing is left to go on with."""
        self._file.remove()

    def _take(self, epoch: int, steps: int, logs: Any) -> None:
        """Remember where it would be taken."""
        self._where = epoch, steps, dict(logs)


class SnapshotFile:
    """The snapshot of one fit: worker 0 writes and reads it, and hands it to the others, who may not see its files.

    Args:
        path: where it is.
        member: this process; None: there is no other.
        seconds: how long to wait for the others.
    """

    lets_join = False

    def __init__(self, path: Path, member: Membership | None, seconds: float) -> None:
        self.path, self._member, self._seconds = path, member, seconds
        self.rank = member.task if member is not None else 0

    def load(self, _: str) -> Snapshot | None:
        """Return the snapshot; None if there is none, or it is damaged."""
        data = self._read() if self.rank == 0 else b""
        if self._member is not None:
            data = Rendezvous(self._member, self._seconds).contents(data, "restore a fit")[0]
        if not data:
            return None
        try:
            return Snapshot.read(io.BytesIO(data))
        except Exception as error:  # of numpy, zipfile and json, whatever was damaged
            warn_user(f"{self.path} is damaged, and left out: {type(error).__name__}: {error}")
            return None

    def _read(self) -> bytes:
        return self.path.read_bytes() if self.path.is_file() else b""

    def save(self, _: str, snapshot: Snapshot, step: int = 0) -> None:
        """Write the snapshot in place of the last one.

        Args:
            _: its name, which the path says already.
            step: behind which it was taken.
        """
        written = io.BytesIO()
        snapshot.write(written)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, written.getvalue())

    def remove(self) -> None:
        """Take it away: something newer is there."""
        if self.rank == 0:
            self.path.unlink(missing_ok=True)

    def did_step(self) -> None:
        """Nobody asks."""

    def wait_to_join(self) -> None:
        """Nobody joins."""


def kept(
    fit: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, member: Membership | None, seconds: float
) -> tuple[inspect.BoundArguments, PreemptedFit | None]:
    """Return the call of a `fit` with what keeps it; None where no BackupAndRestore says where.

    Args:
        fit: the method.
        number: which fit of the program it is.
        member: this process; None: there is no other.
        seconds: how long to wait for the others.
    """
    call = inspect.signature(fit).bind(*args, **kwargs)
    call.apply_defaults()
    own = callbacks_of(call.arguments.get("callbacks"))
    folders = [callback.backup_dir for callback in own if isinstance(callback, keras.callbacks.BackupAndRestore)]
    if not folders or "://" in folders[0]:
        return call, None
    if not any(isinstance(callback, keras.callbacks.History) for callback in own):
        own.append(keras.callbacks.History())
    position = PreemptedFit(SnapshotFile(Path(folders[0]) / f"preempted-{number}.npz", member, seconds), own)
    position.begin_at(call.arguments.get("initial_epoch", 0))
    call.arguments["callbacks"] = [*own, position]
    return call, position
