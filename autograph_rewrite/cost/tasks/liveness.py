"""Memory by liveness: a buffer lives from the earliest start of its producer to the end of its last reader.

TensorFlow allocates what an op makes as soon as its inputs are there, and lets all such ops share the cores.
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.analysis.work.buffers import most_alive
from autograph_rewrite.cost.tasks.task import Buffer, Task


def peak(buffers: Iterable[Buffer], end: float) -> int:
    """Return the most bytes that are alive at one time.

    Args:
        buffers: of one device, after their tasks have been played.
        end: of the step.
    """
    kept, born, freed, nbytes = 0, [], [], []
    for buffer in buffers:
        if buffer.kept:
            kept += buffer.nbytes
        elif buffer.maker is not None and buffer.nbytes:
            born.append(buffer.maker.ready)
            freed.append(_freed(buffer))
            nbytes.append(buffer.nbytes)
    return kept + most_alive(born, freed, nbytes)


def _freed(buffer: Buffer) -> float:
    """Return when nobody needs a buffer any more; earlier where the last reader puts its result into it."""
    last: Task | None = max(buffer.readers, key=lambda task: task.end, default=None)
    if last is None:
        return buffer.maker.end if buffer.maker is not None else 0.0
    return last.ready if last.reuses else last.end
