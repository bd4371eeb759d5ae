"""`ar.CheckpointManager`: save while training goes on, and restore into any number of processes.

save(120)      values are held ─► the next step begins
beside it      each worker writes its part ─► worker 0 joins them ─► step-00000120
restore()      worker 0 says which ─► all read it ─► all write their variables, or none does
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.diagnostics.amounts import few
from autograph_rewrite.diagnostics.faults import warn_user
from autograph_rewrite.diagnostics.files import read_whole, write_whole
from autograph_rewrite.errors import CheckpointError, ClusterError, ConfigError, GraphError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.checkpoint_targets import Piece, Target, average_variables, deal, target_of
from autograph_rewrite.runtime.job.digests import session_name
from autograph_rewrite.runtime.job.exchanges import Rendezvous
from autograph_rewrite.runtime.job.liveness import listed, name_of
from autograph_rewrite.runtime.job.parameter_server import take_part
from autograph_rewrite.runtime.job.progress import note_saved
from autograph_rewrite.runtime.job.stop import Stop
from autograph_rewrite.runtime.job.tf_server import join

_NONE = -1


@dataclass(frozen=True)
class Restored:
    """The checkpoint whose values the variables have now."""

    step: int
    extra: Mapping[str, Any]
    """The program's data that were saved with it."""


class CheckpointManager:
    """Saves and restores the variables of a program. In a job all workers make the same calls.

    Args:
        target: a session, a Keras model, or an object that TensorFlow tracks: a tf.Module,
            `tf.train.Checkpoint(net=net)`.
        folder: of the checkpoints; in a job on a file system that all workers share.
        max_to_keep: how many of the newest checkpoints are kept.
        asynchronous: whether `save` returns once the values are copied, or only once they are on the disk.
        config: names the processes, if the environment does not, and sets `timeout_seconds`.

    Raises:
        ConfigError: `max_to_keep` is below 1.
        GraphError: no variables can be found in the target.
    """

    def __init__(
        self,
        target: Any,
        folder: str | Path,
        *,
        max_to_keep: int = 3,
        asynchronous: bool = True,
        config: ConfigLike | None = None,
    ) -> None:
        if max_to_keep < 1:
            raise ConfigError(f"max_to_keep is {max_to_keep}", hint="keep one checkpoint at least")
        given, self._member = take_part(config)
        self._seconds = given.timeout_seconds
        self._given, self._keep, self._asynchronous = target, max_to_keep, asynchronous
        self.folder = CheckpointFolder(Path(folder))
        workers, self._task = (self._member.workers, self._member.task) if self._member is not None else ((), 0)
        self._names = [name_of("worker", task, a) for task, a in enumerate(workers)] or ["this process"]
        self._is_first = self._task == 0
        self._token, self._saves = self._agreed(), 0
        self._thread = ThreadPoolExecutor(1, "checkpoint", be_patient)
        self._running: Future[None] | None = None
        self._pace = Pace()
        Stop.here().add(self._save_before_the_end)
        target_of(target, len(self._names))

    def _agreed(self) -> str:
        """Remove incomplete checkpoints of earlier runs, and return a unique name of this run of the job."""
        if self._member is not None:
            join(self._member)
        if self._is_first:
            self.folder.sweep()
        return session_name(self._member, self._seconds) if self._member is not None else "alone"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    @property
    def steps(self) -> list[int]:
        """The steps with complete checkpoints, the newest first."""
        return self.folder.steps()

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Save the present values of the variables.

        Waits for the previous save, if it is still being written.

        Args:
            step: of the training; a checkpoint of the same step is replaced.
            extra: data that JSON can hold, which `restore` returns; those of worker 0 count.

        Raises:
            CheckpointError: this save, or the one before, could not be written.
            ClusterError: a worker did not write its part.
        """
        self._save(step, extra, beside=self._asynchronous)

    def _save(self, step: int, extra: Mapping[str, Any] | None, *, beside: bool) -> None:
        self.wait()
        self._pace.saved(step, Stop.here().steps, extra)
        average_variables(self._given)
        target = self._target()
        pieces = deal(target.common, len(self._names))[self._task]
        pieces += [Piece(name, extent.shape) for name, extent in target.own.items()]
        values = target.snapshot(dict.fromkeys(piece.name for piece in pieces))
        self._saves += 1
        partial = self.folder.partial(step, f"{self._token}-{self._saves}")
        label = Label(step, dict(extra or {}), self._pace.steps_per_call)
        one = JointSave(self.folder, partial, label, self._task, self._names, self._seconds)
        if beside:
            self._running = self._thread.submit(self._write, one, pieces, values)
        else:
            self._write(one, pieces, values)

    def _write(self, save: JointSave, pieces: list[Piece], values: Mapping[str, Any]) -> None:
        try:
            save.run(pieces, values)
            if self._is_first:
                note_saved("checkpoint", save.label.step)
                self.folder.prune(self._keep)
        except Exception as error:  # warn at once: the program may never call `wait` again
            warn_user(f"step {save.label.step} was not saved: {error}")
            if isinstance(error, OSError):
                raise CheckpointError(f"a checkpoint could not be written: {error}") from error
            raise

    def wait(self) -> None:
        """Wait until everything that was saved is on the disk.

        Raises:
            CheckpointError: it could not be written.
            ClusterError: a worker did not write its part.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def restore(self, step: int | None = None) -> Restored | None:
        """Restore the variables from the newest complete and undamaged checkpoint, or from that of a step.

        All variables that the target tracks are restored, or none.

        Args:
            step: of the checkpoint; None: the newest.

        Returns:
            The step and extra data of the checkpoint; None where there is none.

        Raises:
            CheckpointError: there is no checkpoint of this step, or none is undamaged.
            ClusterError: a worker is missing.
        """
        self.wait()
        target = self._target()
        tried = None
        for candidate in self._candidates(step):
            if tried is not None:
                warn_user(f"{tried}; that of step {candidate} is tried instead")
            manifest, values, problem = self._read(candidate, target)
            bad = self._who_fails(problem)
            if manifest is not None and not bad:
                target.write(values)
                self._all([0])  # no worker begins a step before all have written their variables
                self._pace.restored(manifest, Stop.here().steps)
                return Restored(manifest.step, manifest.extra)
            tried = CheckpointError(problem or f"{listed(bad)} cannot read {self.folder.whole(candidate)}")
        if tried is not None or step is not None:
            raise tried or CheckpointError(f"there is no checkpoint of step {step} in {self.folder.path}")
        return None

    def _save_before_the_end(self) -> str | None:
        """Save, as the process was asked to end, if the step is known; return the path of the last checkpoint."""
        self.wait()
        step = self._pace.step(Stop.here().steps)
        if step is not None and step != self._pace.last:
            self._save(step, None, beside=False)
        return str(self.folder.whole(self._pace.last)) if self._pace.last is not None else None

    def _target(self) -> Target:
        """Return the variables that exist now."""
        target = target_of(self._given, len(self._names))
        if not target.common:
            raise GraphError(
                f"the {type(self._given).__name__} has no variables yet",
                hint="a Keras model has them once it is built: give it an Input, or call it on a batch",
            )
        return target

    def _candidates(self, step: int | None) -> Iterator[int]:
        """Yield the steps of the checkpoints to try, by the files that worker 0 sees."""
        mine = [found for found in self.folder.steps() if step in (None, found)] if self._is_first else []
        while True:
            told = int(self._all([mine[0] if mine else _NONE])[0][0])
            if told == _NONE:
                return
            mine = mine[1:]
            yield told

    def _read(self, step: int, target: Target) -> tuple[Manifest | None, dict[str, np.ndarray[Any, Any]], str | None]:
        """Return manifest and values of a checkpoint, or else the problem with it."""
        try:
            manifest = self.folder.manifest(step)
            folder = self.folder.whole(step)
            values = dict(read(folder / PREFIX, [*target.common, *target.own]))
            _require_fitting(folder, target, values, names_in(folder / PREFIX))
            return manifest, values, None
        except CheckpointError as error:
            return None, {}, str(error)

    def _who_fails(self, problem: str | None) -> list[str]:
        rows = self._all([int(problem is not None)])
        return [name for name, (failed,) in zip(self._names, rows, strict=True) if failed]

    def _all(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of all workers."""
        if self._member is None:
            return [numbers]
        rows = Rendezvous(self._member, self._seconds).rows(np.array(numbers, np.int64), "restore a checkpoint")
        return [[int(number) for number in row] for row in rows]


def _require_fitting(
    folder: Path, target: Target, values: Mapping[str, np.ndarray[Any, Any]], written: Iterable[str]
) -> None:
    """Refuse a checkpoint whose values do not match the variables that the target tracks.

    Raises:
        CheckpointError: a variable has no value, or one of another shape; or a value has no variable.
    """
    missing = sorted(target.common.keys() - values.keys())
    if missing:
        raise CheckpointError(
            f"the checkpoint {folder} does not have {few(list(map(repr, missing)), 3)}, which the program does",
            hint="restore what was saved: of a part, that of tf.train.Checkpoint(net=net)",
        )
    for name in target.common:
        wanted, found = target.common[name].shape, values[name].shape
        if wanted and wanted != found:
            raise CheckpointError(f"in the checkpoint {folder} '{name}' is of shape {list(found)}, not {list(wanted)}")
    unread = sorted(name for name in written if name not in values and target.holds(name))
    if unread:
        raise CheckpointError(
            f"the program does not have {few(list(map(repr, unread)), 3)}, which the checkpoint {folder} does",
            hint="make all variables before they are restored: optimizer.build(model.trainable_variables), "
            "or one call of what makes them at its first",
        )


# All workers write one checkpoint while the steps go on: files say which workers are done, so that no step waits.
#
# worker 1   part-1.index, part-1.data-...   then `part-1.done`
# worker 0   its own part, then looks for those of all, joins them, and puts the checkpoint in its place
# worker 1   until the folder is gone from where it was being written, or `failed` stands in it


_LOOK = 0.02
"""Seconds between two looks at the files of the others."""
_FAILED = "failed"


@dataclass(frozen=True)
class JointSave:
    """One save of a job.

    Args:
        partial: the folder while it is being written, the same on all workers and unique to this save.
        label: of the checkpoint; that of worker 0 counts.
    """

    folder: CheckpointFolder
    partial: Path
    label: Label
    task: int
    workers: Sequence[str]
    seconds: float

    def run(self, pieces: Sequence[Piece], values: Mapping[str, Any]) -> None:
        """Write this worker's part, and wait until the checkpoint is complete.

        Args:
            values: full values of the variables of the pieces, by name.

        Raises:
            CheckpointError: a worker could not write.
            ClusterError: a worker does not write in time.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            if pieces:
                write_part(self.partial / f"part-{self.task}", pieces, values)
            write_whole(self.partial / f"part-{self.task}.done", b"part" if pieces else b"")
            if self.task == 0:
                self._join()
        except (OSError, CheckpointError, ClusterError) as error:
            with suppress(OSError):  # if this cannot be written either, the others wait for their timeout
                write_whole(self.partial / _FAILED, f"{self.workers[self.task]}: {error}".encode())
            raise
        if self.task != 0:
            self._until(lambda: not self.partial.exists(), lambda: [self.workers[0]])

    def _join(self) -> None:
        done = [self.partial / f"part-{task}.done" for task in range(len(self.workers))]
        self._until(
            lambda: all(file.exists() for file in done),
            lambda: [name for name, file in zip(self.workers, done, strict=True) if not file.exists()],
        )
        parts = [file.with_suffix("") for file in done if file.read_text(encoding="utf-8")]
        merge_parts(parts, self.partial / PREFIX)
        for file in done:
            file.unlink()
        self.folder.commit(self.partial, self.label)

    def _until(self, is_done: Callable[[], bool], missing: Callable[[], list[str]]) -> None:
        """Wait for the others."""
        deadline = time.monotonic() + self.seconds
        while not is_done():
            failed = self.partial / _FAILED
            if failed.exists():
                raise CheckpointError(f"step {self.label.step} was not saved: {failed.read_text(encoding='utf-8')}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{listed(missing())} has not written its part of the checkpoint of step {self.label.step} "
                    f"within {self.seconds:g} s",
                    hint=f"is {self.folder.path} on a file system that all workers share, and do all of them save "
                    "after the same steps?",
                )
            time.sleep(_LOOK)


# The pace of a program's checkpoints: how many of its steps one call makes, derived from the steps that it names.
#
# save(100) behind 100 calls, save(200) behind 200     1: behind 250 calls its step is 250
# save(1) behind 500 calls                             none: it counts epochs, and only the program can save in between
# restore() of step 200, saved at a pace of 1          1: behind 30 calls more its step is 230


class Pace:
    """The pace of the checkpoints of one manager.

    Attributes:
        last: the step of the last checkpoint; None: there is none.
        steps_per_call: the pace; 0: unknown.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._from = 0, 0
        self.steps_per_call = 0
        self._has_extra = False

    def restored(self, checkpoint: Manifest, calls: int) -> None:
        """Note that a checkpoint was read; its pace counts until that of this program is known."""
        self.last, self._from, self._has_extra = checkpoint.step, (checkpoint.step, calls), bool(checkpoint.extra)
        self.steps_per_call = self.steps_per_call or checkpoint.steps_per_call

    def saved(self, step: int, calls: int, extra: Mapping[str, Any] | None) -> None:
        """Note that a checkpoint is being written."""
        step_before, calls_before = self._from
        steps, made = step - step_before, calls - calls_before
        if made:
            self.steps_per_call = steps // made if steps > 0 and steps % made == 0 else 0
        self.last, self._from, self._has_extra = step, (step, calls), bool(extra)

    def step(self, calls: int) -> int | None:
        """Return the step that the program would name; None if only the program knows it, or has saved extra data."""
        step, before = self._from
        if calls == before:
            return self.last
        return step + self.steps_per_call * (calls - before) if self.steps_per_call and not self._has_extra else None


# Variables in TensorFlow's checkpoint format: each worker writes a part, and the parts become one bundle.
#
#     SaveV2 part-0, SaveV2 part-1 ─► MergeV2Checkpoints ─► variables.index, variables.data-00000-of-00002, ...
#
# `tf.train.Saver` reads the bundle by the names of the variables, and `tf.train.load_checkpoint` reads it anywhere.


def write_part(prefix: Path, pieces: Sequence[Piece], values: Mapping[str, Any]) -> None:
    """Write pieces of variables, at least one."""
    tf = tensorflow()
    with tf.device("CPU:0"), kept_small(prefix):
        cut = [values[p.name] if p.rows is None else values[p.name][p.rows[0] : p.rows[1]] for p in pieces]
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=[piece.name for piece in pieces],
            shape_and_slices=[piece.slice_spec for piece in pieces],
            tensors=[tf.convert_to_tensor(value) for value in cut],
        )


def merge_parts(parts: Sequence[Path], prefix: Path) -> None:
    """Merge parts into one bundle; their files move."""
    tf = tensorflow()
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[str(part) for part in parts], destination_prefix=str(prefix), delete_old_dirs=False
        )


def names_in(prefix: Path) -> list[str]:
    """Return the names of all values that a bundle has."""
    return [name for name, _ in tensorflow().train.list_variables(str(prefix))]


def read(prefix: Path, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield full values by name, those that the bundle has.

    Raises:
        Damaged: the checksum of a value does not match.
    """
    tf = tensorflow()
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        kinds = reader.get_variable_to_dtype_map()
        for name in names:
            if kinds.get(name) == tf.variant:  # the position of an iterator, for which numpy has no type
                given = {"prefix": str(prefix), "tensor_names": [name], "shape_and_slices": [""]}
                yield name, tf.raw_ops.RestoreV2(**given, dtypes=[tf.variant])[0]
            elif name in kinds:
                yield name, reader.get_tensor(name)
    except (tf.errors.OpError, RuntimeError) as error:
        raise Damaged(f"the checkpoint {prefix.parent} is damaged: {str(error).splitlines()[0]}") from None


# The folder of a job's checkpoints: a checkpoint appears once it is complete; incomplete ones are never read.
#
#     checkpoints/
#       step-00000120/                  whole: put here under its name in one go, as the last act of writing it
#         checkpoint.json               the step, what the program adds, bytes, SHA-256 of the index
#         variables.index               for each variable: type, shape, where it is, CRC-32C of its bytes
#         variables.data-0000?-of-0000? what each worker has written
#       .step-00000130.3f2a-7/          being written: `part-0`, `part-1`, ...
#
# The digest of the index and the checksums in it cover every byte; TensorFlow compares these checksums as it reads.

MANIFEST = "checkpoint.json"
PREFIX = "variables"
_NAME = re.compile(r"step-(\d{8,})")


class Damaged(CheckpointError):
    """A checkpoint has files that are missing or have changed."""


@dataclass(frozen=True)
class Label:
    """The program's data of a checkpoint."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The program's extra data, which JSON can hold."""
    steps_per_call: int = 0
    """How many of the program's steps one call makes; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Label):
    """The contents of a checkpoint's `checkpoint.json`."""

    bytes: int
    index: str
    """SHA-256 of `variables.index`."""
    sizes: Mapping[str, int]
    """Bytes of each file."""
    format: int = 1


_KINDS = {name: type(value) for name, value in vars(Manifest(0, bytes=0, index="", sizes={})).items()}


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of a job's checkpoints."""

    path: Path

    def partial(self, step: int, token: str) -> Path:
        """Return the folder of a checkpoint while it is being written; the token is unique."""
        return self.path / f".{_name(step)}.{token}"

    def whole(self, step: int) -> Path:
        """Return the folder of a complete checkpoint."""
        return self.path / _name(step)

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if (entry / MANIFEST).is_file())
        return sorted((int(match[1]) for match in found if match is not None), reverse=True)

    def commit(self, partial: Path, label: Label) -> None:
        """Write the manifest of a checkpoint, and rename its folder; replace a checkpoint of the same step."""
        files = sorted(file for file in partial.iterdir() if file.name.startswith(f"{PREFIX}."))
        sizes = {file.name: file.stat().st_size for file in files}
        manifest = Manifest(
            bytes=sum(sizes.values()), index=_digest(partial / f"{PREFIX}.index"), sizes=sizes, **vars(label)
        )
        written = partial / MANIFEST
        written.write_text(json.dumps(vars(manifest), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for file in (*files, written, partial):
            _sync(file)
        target, old = self.whole(label.step), self.partial(label.step, "replaced")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(partial, target)
        _sync(self.path)
        shutil.rmtree(old, ignore_errors=True)

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint, after a check of its files.

        Raises:
            Damaged: a file is missing or has another size, or the index has changed.
        """
        folder = self.whole(step)
        try:
            manifest = Manifest(**json.loads(read_whole(folder / MANIFEST, "text")))
            sizes = {name: (folder / name).stat().st_size for name in manifest.sizes}
            kinds = {name: type(value) for name, value in vars(manifest).items()}
            if kinds != _KINDS:
                raise TypeError(f"{MANIFEST} has other fields")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise Damaged(f"the checkpoint {folder} is damaged: {error}") from None
        changed = [name for name, size in manifest.sizes.items() if sizes[name] != size]
        if not changed and _digest(folder / f"{PREFIX}.index") != manifest.index:
            changed = [f"{PREFIX}.index"]
        if changed:
            raise Damaged(f"the checkpoint {folder} is damaged: {changed[0]} is not what was written")
        return manifest

    def prune(self, keep: int) -> None:
        """Remove all but the newest checkpoints."""
        for step in self.steps()[keep:]:
            gone = self.partial(step, "removed")
            os.replace(self.whole(step), gone)  # a rename is atomic, the removal of files is not
            shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the incomplete checkpoints of killed processes."""
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if re.fullmatch(r"\.step-\d{8,}\..+", entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _digest(file: Path) -> str:
    return hashlib.sha256(read_whole(file)).hexdigest()


def _sync(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on the disk."""
    with _opened(path) as handle:
        os.fsync(handle)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


# Large files leave the page cache as they are written, so that concurrent steps keep their cores and memory.
#
#     SaveV2 ──► pages ──► disk          each 64 MiB: what is written goes to the disk, its pages are given back
#                └── given back, and taken again for what comes next
#
# Otherwise a checkpoint fills fresh memory with pages that are not read soon. The system finds, clears and writes back
# this memory during the steps: on a virtual machine that is most of the cost of writing.

_CAN = hasattr(os, "posix_fadvise") and hasattr(os, "fdatasync")
_LOOK_AT_FILES = 0.01
_ENOUGH = 2**26
"""Bytes of a file after which its pages are written back."""


@contextmanager
def kept_small(prefix: Path) -> Iterator[None]:
    """Keep files with this prefix out of the page cache while the block writes them."""
    if not _CAN:
        yield
        return
    over = threading.Event()
    drain = threading.Thread(target=_drain, args=(prefix, over), name="checkpoint_drain", daemon=True)
    drain.start()
    try:
        yield
    finally:
        over.set()
        drain.join()


def _drain(prefix: Path, over: threading.Event) -> None:
    be_patient()
    drained: dict[Path, int] = {}
    while not over.wait(_LOOK_AT_FILES):
        for file in prefix.parent.glob(f"{prefix.name}.data-*"):
            with suppress(OSError):  # the file was renamed meanwhile
                size = file.stat().st_size
                if size - drained.get(file, 0) >= _ENOUGH:
                    _write_back(file)
                    drained[file] = size


def _write_back(file: Path) -> None:
    with _opened(file) as handle:
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def be_patient() -> None:
    """Lower the priority of this thread, so that it runs mainly on idle cores."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
