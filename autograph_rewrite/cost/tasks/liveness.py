"""Memory by liveness: a buffer lives from the earliest start of its producer to the end of its last reader.

TensorFlow allocates what an op makes as soon as its inputs are there, and lets all such ops share the cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from autograph_rewrite.analysis.work.buffers import most_alive
from autograph_rewrite.cost.tasks.task import Buffer, Task

POINTS = 400
"""To so many points a line of memory over time is drawn."""
HOLDERS = 20
"""So many of those that hold memory at the peak are named."""
Holders = tuple[tuple[str, int], ...]
"""Names and bytes, the most first."""
Line = tuple[tuple[float, int], ...]
"""Seconds since the start of the step, and the bytes that are alive from then on."""


def peak(buffers: Iterable[Buffer], end: float) -> int:
    """Return the most bytes that are alive at one time.

    Args:
        buffers: of one device, after their tasks have been played.
        end: of the step.
    """
    kept, lives = _lives(buffers)
    return kept + most_alive(*zip(*lives, strict=True)) if lives else kept


def over_time(buffers: Iterable[Buffer]) -> Line:
    """Return when how many bytes are alive; its highest point is `peak`.

    Args:
        buffers: of one device, after their tasks have been played.
    """
    kept, lives = _lives(buffers)
    return line([change for born, freed, nbytes in lives for change in ((born, nbytes), (freed, -nbytes))], kept)


def at_peak(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Return what is alive when most bytes are.

    Args:
        buffers: of one device, after their tasks have been played.
    """
    kept = [one for one in buffers if one.kept]
    lives = [(one.born, _freed(one), one) for one in buffers if not one.kept and one.maker and one.nbytes]
    changes = [change for born, freed, one in lives for change in ((born, one.nbytes), (freed, -one.nbytes))]
    top = highest(changes)
    return kept + [one for born, freed, one in lives if born <= top < freed]


def holders(alive: Iterable[Buffer]) -> Holders:
    """Return who holds the most of what is alive: the makers of buffers, and what is always there, together."""
    held = Counter[str]()
    for buffer in alive:
        if not buffer.kept and buffer.maker is not None:
            held[buffer.maker.name] += buffer.nbytes
        else:
            held["variables" if buffer.maker is None else "inputs, constants and outputs"] += buffer.nbytes
    return first_holders(held)


def highest(changes: Iterable[tuple[float, int]]) -> float:
    """Return when most bytes are alive.

    Args:
        changes: when how many bytes more, or less, are alive.
    """
    ordered = sorted(changes)
    alive = list(accumulate(nbytes for _, nbytes in ordered))
    return ordered[alive.index(max(alive))][0] if alive else 0.0


def first_holders(held: Counter[str]) -> Holders:
    """Return those that hold most; all others together."""
    first = held.most_common(HOLDERS)
    others = sum(held.values()) - sum(nbytes for _, nbytes in first)
    return (*first, (f"{len(held) - len(first)} others", others)) if others else tuple(first)


def line(changes: Iterable[tuple[float, int]], kept: int) -> Line:
    """Return bytes over time; of many changes, the most of each of `POINTS` equal parts.

    Args:
        changes: when how many bytes more, or less, are alive; of what happens at one time, the least comes first.
        kept: bytes that are always there.
    """
    ordered = sorted(changes)
    alive = accumulate((nbytes for _, nbytes in ordered), initial=kept)
    found = list(zip([0.0, *(at for at, _ in ordered)], alive, strict=True))
    if len(found) <= POINTS:
        return tuple(found)
    width, most = found[-1][0] / POINTS or 1.0, list[int]()
    last = kept
    for at, nbytes in found:
        part = min(POINTS - 1, int(at / width))
        while len(most) <= part:
            most.append(last)
        most[part] = max(most[part], nbytes)
        last = nbytes
    return (*((part * width, nbytes) for part, nbytes in enumerate(most)), (found[-1][0], last))


def _lives(buffers: Iterable[Buffer]) -> tuple[int, list[tuple[float, float, int]]]:
    """Return the bytes that are always there, and of each other buffer when it is made, when freed, and its bytes."""
    kept, lives = 0, []
    for buffer in buffers:
        if buffer.kept:
            kept += buffer.nbytes
        elif buffer.maker is not None and buffer.nbytes:
            lives.append((buffer.born, _freed(buffer), buffer.nbytes))
    return kept, lives


def _freed(buffer: Buffer) -> float:
    """Return when nobody needs a buffer any more; earlier where the last reader can put its result into it.

    It can if nobody else reads it when its own result gets its memory.
    """
    last: Task | None = max(buffer.readers, key=lambda task: task.end, default=None)
    if last is None:
        return buffer.maker.end if buffer.maker is not None else 0.0
    is_alone = all(task is last or task.end <= last.ready for task in buffer.readers)
    return last.ready if last.reuses and is_alone else last.end
