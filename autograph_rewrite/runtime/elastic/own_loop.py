"""The loop of a program's own in an elastic job: snapshots between its steps, and the way back to the last one.

    ar.shard_dataset     iterations of 6, 6 and 3 batches were drawn: they are drawn and dropped, and the third goes on
    ar.on_resize(f)      f(15) is called: the program begins at step 15 by itself

A step is one call of the first distributed function (of several that take turns, as those of two optimizers), or one
run of a session that updates. Snapshots are taken before a step, when all that belongs to the last one is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np

from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ClusterError, ConfigError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.elastic.callback_state import Array
from autograph_rewrite.runtime.elastic.job_memory import JobMemory, Snapshot

NAME = "loop"
Read = Callable[[], Mapping[str, Any]]
Failed = Callable[[], ClusterError | None]


class OwnLoop:
    """Where the loop of this process is.

    Args:
        memory: of the job.

    Attributes:
        every: how many steps there are from one snapshot to the next.
    """

    def __init__(self, memory: JobMemory) -> None:
        self.every = memory.every(Config().snapshot_steps)
        self._memory = memory
        self._found = memory.load(NAME)
        position = self._found.position if self._found is not None else {}
        self._done: int = position.get("done", 0)
        self._dropped: list[list[int]] = position.get("drawn", [])
        self._drawn: list[list[int]] = []
        self._drawn_by_then: list[list[int]] = []
        self._reads: dict[str, Read] = {}
        self._numbers = count(1)
        self._is_led = self._has_stepped = False
        self._last = self._done

    @classmethod
    def here(cls) -> OwnLoop | None:
        """Return the loop of this process; None where its job is not elastic."""
        return _here()

    def set_every(self, steps: int) -> None:
        """Take snapshots so often that no more than so many steps can be lost.

        Args:
            steps: the setting `snapshot_steps`.
        """
        self.every = self._memory.every(steps)

    def unique(self, name: str) -> str:
        """Return a name that no other function, or session, of this process has."""
        number = next(self._numbers)
        return f"'{name}' ({number})" if number > 1 else f"'{name}'"

    def on_resize(self, function: Callable[[int], None]) -> None:
        """Tell the program how many steps are done, if there are any.

        Args:
            function: the program's.
        """
        self._is_led = True
        if self._done:
            function(self._done)

    def batches(self, dataset: Any, *, ends: bool, failed: Failed | None = None) -> Batches:
        """Return a dataset whose batches are given from where the last snapshot was taken.

        Args:
            dataset: this worker's part.
            ends: it does; around one that does not the program counts its steps by itself.
            failed: tells why workers could not compare their batches, for TensorFlow gives no more than its text.
        """
        self._is_led = self._is_led or ends
        self._drawn.append([])
        return Batches(dataset, self, len(self._drawn) - 1, failed)

    def iterate(self, dataset: Any, number: int) -> Iterator[Any]:
        """Yield the batches of one iteration.

        Args:
            dataset: what to iterate over.
            number: which of the program's datasets it is.
        """
        mine = self._drawn[number]
        before = self._dropped[number] if number < len(self._dropped) else []
        mine.append(0)
        iteration = len(mine) - 1
        dropped = before[iteration] if iteration < len(before) else 0
        is_over = iteration < len(before) - 1  # the program left it there, or it ended
        if is_over and not dropped:
            return
        for batch in dataset:
            mine[iteration] += 1
            if mine[iteration] > dropped:
                yield batch
            elif mine[iteration] == dropped and is_over:
                return

    def before(self, who: str, read: Read) -> None:
        """Before a step: take a snapshot if it is time to.

        Args:
            who: what does the step.
            read: gives the values of its variables, as one device has them.

        Raises:
            ConfigError: nobody leads the program back to where a snapshot was taken.
        """
        if not self._is_led:
            raise ConfigError(
                f"the loop around {who} is the program's own, and an elastic job could not go on in it",
                hint="take all data from ar.shard_dataset, which have to end; or say ar.on_resize(f), which is told "
                "how many steps are done",
            )
        self._reads.setdefault(who, read)
        if self._is_first(who) and self._has_stepped and self._done - self._last >= self.every:
            self._take()

    def after(self, who: str) -> None:
        """Count a step.

        Args:
            who: what has done it.
        """
        if not self._is_first(who):
            return
        self._done += 1
        self._drawn_by_then = [list(counts) for counts in self._drawn]
        if not self._has_stepped:
            self._has_stepped = True
            self._memory.did_step()

    def values(self, who: str, names: Iterable[str]) -> dict[str, Array]:
        """Return the values that variables had in the last snapshot of an earlier generation, of those that it has.

        Args:
            who: what does the step.
        """
        if self._found is None:
            return {}
        numbers = self._found.position["variables"].get(who, {})
        return {name: self._found.arrays[numbers[name]] for name in names if name in numbers}

    def known(self, who: str) -> list[str]:
        """Return the names of the variables of which the last snapshot has values.

        Args:
            who: what does the step.
        """
        return list(self._found.position["variables"].get(who, {})) if self._found is not None else []

    def _is_first(self, who: str) -> bool:
        return who == next(iter(self._reads))

    def save(self) -> str | None:
        """Take a snapshot behind the last step, as the job ends; return what is kept, on all workers.

        All of them call it behind the same step. None before the first one.
        """
        if not self._has_stepped:
            return None
        if self._done > self._last:
            self._keep()
        return f"a snapshot of step {self._done}"

    def _take(self) -> None:
        """Take a snapshot; let others join if they want to."""
        self._keep()
        if self._memory.rank == 0 and self._memory.lets_join:
            self._memory.wait_to_join()

    def _keep(self) -> None:
        """Let worker 0 take a snapshot; all have the same values, and all read them."""
        self._last = self._done
        values = {who: read() for who, read in self._reads.items()}
        if self._memory.rank:
            return
        arrays: list[Array] = []
        numbers: dict[str, dict[str, int]] = {}
        for who, found in values.items():
            numbers[who] = {name: len(arrays) + at for at, name in enumerate(found)}
            arrays += [np.asarray(value) for value in found.values()]
        position = {"done": self._done, "drawn": self._drawn_by_then, "variables": numbers}
        self._memory.save(NAME, Snapshot(position, arrays), self._done)


class Batches:
    """The batches of a worker's part of a dataset, from where the last snapshot was taken.

    Args:
        dataset: the part.
        loop: knows how many were drawn.
        number: which of the program's datasets it is.
        failed: tells why workers could not compare their batches.
    """

    def __init__(self, dataset: Any, loop: OwnLoop, number: int, failed: Failed | None = None) -> None:
        self._dataset, self._loop, self._number = dataset, loop, number
        self._failed = failed

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loop.iterate(self._dataset, self._number)
        except tensorflow().errors.OpError as error:
            problem = self._failed() if self._failed is not None else None
            if problem is None:
                raise
            raise problem from error  # whom it names is not to be lost: the job goes on without them


def keep_steps(steps: int | None) -> None:
    """Let the loop of this process, if its job is elastic, take snapshots as often as a configuration says.

    Args:
        steps: its `snapshot_steps`; None: as often as before.
    """
    loop = OwnLoop.here()
    if loop is not None and steps is not None:
        loop.set_every(steps)


@functools.cache
def _here() -> OwnLoop | None:
    memory = JobMemory.here()
    return OwnLoop(memory) if memory is not None else None
