"""Keep the state of an elastic job that outlives its workers: files that its launcher holds in its host's memory.

    launcher   makes the folder (tmpfs), counts generations, removes it at the end
    worker 0   writes snapshots           fit-1.npz, loop.npz
    workers    write signs of life        beat-3-0: worker 0 of generation 3
    anybody    asks to let others join    join

A snapshot is written to a new file and then renamed, so a worker that is killed meanwhile leaves the old snapshot. A
worker of an earlier generation finds another number in the file `generation`, and writes nothing any more.

A job on several hosts has a lease: each launcher touches `lease` as long as it hears from the others. A worker that
finds the lease too old ends, for the others may have gone on. The launcher copies each snapshot to a second host, and
writes its name into `copied`; the next snapshot waits for that. Two snapshots are taken in `snapshot_steps` steps, so
the loss of a host whose last snapshot was not copied yet costs at most `snapshot_steps` steps.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from autograph_rewrite.diagnostics.files import write_whole
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.runtime.job.progress import note_saved
from autograph_rewrite.runtime.job.say import say

Array = np.ndarray[Any, Any]

FOLDER, GENERATION, RANK = "AUTOGRAPH_ELASTIC", "AUTOGRAPH_GENERATION", "AUTOGRAPH_RANK"
"""The environment variables with the folder of the job's memory, and the worker's generation and rank."""
LEASE = "AUTOGRAPH_LEASE"
"""The variable with the seconds that a worker goes on without news of other hosts; 0: there are none."""
EXPELLED = 75
"""The exit code of a worker after the others have gone on without it."""
_SHARED_MEMORY = Path("/dev/shm")
_POLL = 0.005
_TELL = 5.0
"""Seconds of a wait for a copy after which a message says so."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a job between two steps.

    Attributes:
        position: the step at which it was taken, and other plain data.
        arrays: the values of variables, as on one device.
    """

    position: Mapping[str, Any]
    arrays: Sequence[Array]

    def write(self, file: BinaryIO) -> None:
        """Write the snapshot to a file."""
        arrays = {str(number): array for number, array in enumerate(self.arrays)}
        said = {"position": self.position, "types": [array.dtype.name for array in self.arrays]}
        text = np.frombuffer(json.dumps(said).encode(), np.uint8)
        np.savez(file, said=text, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, file: BinaryIO) -> Snapshot:
        """Return the snapshot in a file."""
        with np.load(file, allow_pickle=False) as found:
            said = json.loads(found["said"].tobytes().decode())
            return cls(said["position"], [_typed(found[str(n)], name) for n, name in enumerate(said["types"])])


def require_alike(*, trains_alone: bool) -> None:
    """Refuse local SGD in an elastic job: the variables of a lost replica are on no other.

    Raises:
        ConfigError: they do, in an elastic job.
    """
    if trains_alone and JobMemory.here() is not None:
        raise ConfigError(
            "local_sgd lets each worker train by itself, and what a lost one has trained is on no other",
            hint="leave local_sgd out of an elastic job, or start the job without --elastic",
        )


class JobMemory:
    """The memory of a job, as one generation of its workers sees it.

    Args:
        lease: for how many seconds the workers go on without news of other hosts; 0: there are no other hosts.
    """

    def __init__(self, folder: Path, generation: int, rank: int = 0, lease: float = 0.0) -> None:
        self._folder, self.generation, self.rank, self._lease = folder, generation, rank, lease
        self._uncopied, self._waits_at_once = "", False

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> JobMemory | None:
        """Return the memory of this process's job; None where the job is not elastic."""
        if not environ.get(FOLDER):
            return None
        return cls(Path(environ[FOLDER]), int(environ[GENERATION]), int(environ[RANK]), float(environ.get(LEASE, 0)))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a worker, which `here` reads."""
        found = {FOLDER: str(self._folder), GENERATION: str(self.generation), RANK: str(self.rank)}
        return {**found, LEASE: str(self._lease)}

    @property
    def seed(self) -> int:
        """The random seed of a program that sets none: the same in all generations."""
        return int((self._folder / "seed").read_text())

    @property
    def is_current(self) -> bool:
        """Whether this generation is the newest, and its lease excludes a newer one on other hosts."""
        with suppress(OSError, ValueError):
            if self._lease and _age(self._folder / "lease") > self._lease:
                return False
            return int((self._folder / "generation").read_text()) == self.generation
        return False

    def every(self, steps: int) -> int:
        """Return how many steps there are from one snapshot to the next, so that at most `steps` are lost."""
        if not self._lease:
            return steps
        self._waits_at_once = steps < 2  # no second snapshot fits in
        return max(1, steps // 2)

    def save(self, name: str, snapshot: Snapshot, step: int = 0) -> None:
        """Replace the last snapshot of this name, once that has been copied to another host.

        Args:
            name: of a file, as `fit-1`.
            step: the number of steps done, for the status that the launcher reads.
        """
        new = self._folder / f"new-{self.generation}-{name}.npz"
        with open(new, "wb") as file:
            snapshot.write(file)
        self._await_copy()
        if not self.is_current:
            os._exit(EXPELLED)  # without a message or cleanup: the job has gone on without this process
        stamp = f"{name} {new.stat().st_mtime_ns}"
        os.replace(new, self._folder / f"{name}.npz")
        self._uncopied = stamp if self._lease else ""
        note_saved("snapshot", step)
        if self._waits_at_once:
            self._await_copy()

    def _await_copy(self) -> None:
        """Wait until the last snapshot is on another host, too; print a message if that takes long."""
        copied, began, is_told = self._folder / "copied", time.monotonic(), False
        while self._uncopied and self.is_current:
            with suppress(OSError):
                if copied.read_text() == self._uncopied:
                    return
            waited = time.monotonic() - began
            if waited > _TELL and not is_told:
                is_told = True
                say(
                    f"worker {self.rank} has waited {waited:.0f} s for its last snapshot to be copied to a second "
                    "host, and takes the next one then: the steps of all workers wait for it"
                )
            time.sleep(_POLL)

    def load(self, name: str) -> Snapshot | None:
        """Return the last snapshot of a name; None if there is none."""
        path = self._folder / f"{name}.npz"
        if not path.exists():
            return None
        with open(path, "rb") as file:
            return Snapshot.read(file)

    def beat(self, seconds: float) -> None:
        """Give a sign of life every `seconds` from a thread, and end this process once it is expelled."""
        path = self._mark("beat", self.rank)
        path.touch()

        def beat() -> None:
            pause = seconds / 4 if self._lease else seconds
            while self.is_current:
                with suppress(OSError):
                    os.utime(path)
                time.sleep(pause)
            os._exit(EXPELLED)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def silence(self, rank: int) -> float:
        """Return for how many seconds a worker has given no sign of life; 0 before its first."""
        with suppress(OSError):
            return _age(self._mark("beat", rank))
        return 0.0

    def renew(self) -> None:
        """Let the workers of this host go on: another host has answered."""
        (self._folder / "lease").touch()

    def note_copied(self, name: str, changed: int) -> None:
        """Note that a snapshot is on another host, too.

        Args:
            changed: the time of its file in nanoseconds.
        """
        write_whole(self._folder / "copied", f"{name} {changed}".encode())

    def _mark(self, name: str, *rank: int) -> Path:
        """Return the file of a message from this generation, or from one of its workers."""
        return self._folder / "-".join(map(str, (name, self.generation, *rank)))

    def did_step(self) -> None:
        """Note that this generation has done a step."""
        self._mark("stepped").touch()

    @property
    def stepped(self) -> float | None:
        """When this generation had done its first step, by `time.time`."""
        with suppress(OSError):
            return self._mark("stepped").stat().st_mtime
        return None

    def refuse(self) -> None:
        """Note that the program is refused, or differs between workers: a new generation would fail, too."""
        self._mark("refused").touch()

    @property
    def is_refused(self) -> bool:
        """Whether a worker of this generation has called `refuse`."""
        return self._mark("refused").exists()

    def blame(self, ranks: Sequence[int]) -> None:
        """Note the workers for which this one has waited in vain."""
        self._mark("blame", self.rank).write_text(json.dumps(list(ranks)))

    def blamed(self, by: int) -> list[int]:
        """Return the workers for which worker `by` has waited in vain."""
        with suppress(OSError, ValueError):
            return [int(rank) for rank in json.loads(self._mark("blame", by).read_text())]
        return []

    def let_join(self) -> None:
        """Ask worker 0 to stop where others can join."""
        self._mark("join").touch()

    @property
    def lets_join(self) -> bool:
        """Whether worker 0 is asked to stop where others can join."""
        return self._mark("join").exists()

    def wait_to_join(self) -> None:
        """Wait, right after a snapshot, until the next generation begins and ends this process."""
        self._mark("waits").touch()
        while True:
            time.sleep(1.0)

    @property
    def waits(self) -> bool:
        """Whether worker 0 has stopped where others can join."""
        return self._mark("waits").exists()


def _age(path: Path) -> float:
    """Return how many seconds ago a file was touched."""
    return max(0.0, time.time() - path.stat().st_mtime)


def _typed(array: Array, name: str) -> Array:
    """Return an array with its type restored: numpy's format forgets types of other packages, such as bfloat16."""
    if array.dtype.kind != "V":
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, name))


class OwnedMemory:
    """The memory of a job, in its launcher; use it as a context manager."""

    def __init__(self) -> None:
        place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="autograph-job-", dir=place))  # nobody else may read it
        (self.folder / "seed").write_text(str(secrets.randbits(31)))

    def __enter__(self) -> OwnedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self, generation: int, lease: float = 0.0) -> JobMemory:
        """Begin a generation, and expel all earlier ones."""
        write_whole(self.folder / "generation", str(generation).encode())
        memory = JobMemory(self.folder, generation, lease=lease)
        memory.renew()
        return memory

    @property
    def seed(self) -> int:
        """The random seed of a program that sets none."""
        return int((self.folder / "seed").read_text())

    def set_seed(self, seed: int) -> None:
        """Take the seed of the host that began the job."""
        write_whole(self.folder / "seed", str(seed).encode())
