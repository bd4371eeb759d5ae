"""Schedule pipelines: the order in which each device runs the forward and backward parts of its micro-batches.

    gpipe         F0 F1 F2 F3 ........... B0 B1 B2 B3     all activations are kept
    1f1b          F0 F1 B0 F2 B1 F3 B2 B3                 at most as many as there are stages from this one on
    interleaved   each device has several chunks, of stages that are S apart: a shorter bubble
    circular      the same, all forwards before all backwards

A stage of the model is a *chunk* on a device: of S devices, device d has the stages d, d + S, d + 2S, ...

gpipe: Huang et al., GPipe (2019). 1f1b: Narayanan et al., PipeDream (2019), with the flush of their Memory-Efficient
Pipeline-Parallel DNN Training (2021). interleaved: Narayanan et al., Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM (2021). circular: Lamy-Poirier, Breadth-First Pipeline Parallelism (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autograph_rewrite.errors import PlanError

FORWARD, BACKWARD = "F", "B"


class Task(NamedTuple):
    """The forward or backward part of one micro-batch in one stage."""

    kind: str
    micro: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}@{self.stage}"


Orders = tuple[tuple[Task, ...], ...]
"""The tasks of each device, in order."""


def orders(schedule: str, devices: int, micro: int, chunks: int = 1) -> Orders:
    """Return the tasks of each device, in order.

    Args:
        schedule: gpipe, 1f1b, interleaved or circular.
        chunks: how many stages each device has.

    Raises:
        PlanError: there is no such schedule, or it does not allow these numbers.
    """
    if schedule == "1f1b" and chunks > 1:
        raise PlanError(
            f"the schedule 1f1b has one stage per device, not {chunks}", hint="use interleaved, or circular_repeat: 1"
        )
    if schedule == "interleaved" and micro % devices:
        raise PlanError(
            f"the interleaved schedule works in rounds of {devices} micro-batches, and there are {micro}",
            hint="make pipeline.microbatches a multiple of pipeline.stages",
        )
    of_device = {"gpipe": _all_forwards, "circular": _all_forwards, "1f1b": _alternating, "interleaved": _interleaved}
    if schedule not in of_device:
        raise PlanError(f"there is no schedule '{schedule}'", hint=f"known ones: {', '.join(of_device)}")
    return tuple(tuple(of_device[schedule](device, devices, micro, chunks)) for device in range(devices))


def _all_forwards(device: int, devices: int, micro: int, chunks: int) -> Iterator[Task]:
    """All forwards, then all backwards; with several chunks, in rounds of as many micro-batches as devices."""
    for kind in (FORWARD, BACKWARD):
        for first in range(0, micro, devices if chunks > 1 else micro):
            for chunk in range(chunks) if kind == FORWARD else reversed(range(chunks)):
                for m in range(first, min(first + devices, micro) if chunks > 1 else micro):
                    yield Task(kind, m, chunk * devices + device)


def _alternating(device: int, devices: int, micro: int, chunks: int) -> Iterator[Task]:
    warm = min(micro, devices - 1 - device)
    yield from (Task(FORWARD, m, device) for m in range(warm))
    for m in range(warm, micro):
        yield Task(FORWARD, m, device)
        yield Task(BACKWARD, m - warm, device)
    yield from (Task(BACKWARD, m, device) for m in range(micro - warm, micro))


def _interleaved(device: int, devices: int, micro: int, chunks: int) -> Iterator[Task]:
    total, turn = micro * chunks, devices * chunks
    warm = min(total, (devices - device - 1) * 2 + (chunks - 1) * devices)

    def task(kind: str, k: int) -> Task:
        chunk = k % turn // devices
        chunk = chunk if kind == FORWARD else chunks - 1 - chunk
        return Task(kind, k // turn * devices + k % devices, chunk * devices + device)

    yield from (task(FORWARD, k) for k in range(warm))
    for k in range(warm, total):
        yield task(FORWARD, k)
        yield task(BACKWARD, k - warm)
    yield from (task(BACKWARD, k) for k in range(total - warm, total))


def in_flight(tasks: Sequence[Task]) -> int:
    """Return how many forwards at most wait for their backwards at one time."""
    most = now = 0
    for task in tasks:
        now += 1 if task.kind == FORWARD else -1
        most = max(most, now)
    return most


def iterations(micro: int, stages: int, repeat: int = 1) -> int:
    """Return how many times the loop of a shifting buffer turns.

    Args:
        repeat: chunks per device.
    """
    if repeat == 1:
        return micro + stages - 1
    return -(-micro // stages) * stages * repeat + stages - 1


def turns(micro: int, devices: int, repeat: int = 1) -> tuple[tuple[int | None, ...], ...]:
    """Return, by stage, its micro-batch in each iteration of the loop of a shifting buffer.

    Micro-batches enter in rounds of as many as there are devices, and move by one stage in each iteration, so that a
    device never runs two of its stages at once.

    Args:
        repeat: how many stages each device has.
    """
    count, found = iterations(micro, devices, repeat), []
    for stage in range(devices * repeat):
        row: list[int | None] = [None] * count
        for m in range(micro):
            row[m // devices * devices * repeat + m % devices + stage if repeat > 1 else m + stage] = m
        found.append(tuple(row))
    return tuple(found)


def ideal_in_flight(schedule: str, stage: int, stages: int, micro: int) -> int:
    """Return how many micro-batches a stage holds at most, where each device has one stage.

    Args:
        schedule: gpipe or 1f1b.
        stage: counted from 0.
    """
    return min(micro, stages - stage) if schedule == "1f1b" else micro
