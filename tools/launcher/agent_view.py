"""Decide who takes part in a generation of an elastic job, and who may form the next one; all functions are pure.

    view 3    host A  workers 0 1 │ host B  workers 2 3 │ host C  workers 4 5       B is cut off, or gone
    view 4    host A  workers 0 1 │ host C  workers 2 3                             formed by A and C: two of three

The first host of a view leads it. More than half of the hosts of the last view may form the next one, or half of them
if they include the first; so of two sides that cannot reach each other, at most one goes on. Hosts whose agents are
known to have ended (a connection is refused, or a new process answers) do not count; silence proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

WORKER = "worker "


@dataclass(frozen=True)
class Bounds:
    """The least and largest number of workers of an elastic job, and the interval of heartbeats in seconds."""

    least: int
    most: int
    heartbeat: float = 1.0


@dataclass(frozen=True)
class Seat:
    """A host in a view."""

    agent: str
    """The name of the agent; it identifies one process."""
    address: str
    """Where it listens: `host:port`."""
    places: int
    """How many workers it was started for."""
    workers: int = 0
    """How many workers it runs."""
    ready: int = 0
    """How many restarted workers join at the end of an epoch."""
    lost: int = 0
    """How many workers were lost and are not restarted until they are requested."""

    @property
    def spare(self) -> int:
        """How many more workers it can run at once."""
        return self.places - self.workers - self.ready - self.lost


@dataclass(frozen=True)
class GenerationHosts:
    """The hosts of a generation; the first one leads."""

    generation: int = 0
    seats: tuple[Seat, ...] = ()
    restarts: int = 0
    """How many workers may still be restarted."""

    @property
    def workers(self) -> int:
        """The number of workers on all hosts."""
        return sum(seat.workers for seat in self.seats)

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents."""
        return tuple(seat.agent for seat in self.seats)

    def ranks(self, agent: str) -> range:
        """Return the numbers of an agent's workers."""
        first = 0
        for seat in self.seats:
            if seat.agent == agent:
                return range(first, first + seat.workers)
            first += seat.workers
        return range(0)

    def data(self) -> dict[str, Any]:
        """Return the view as plain data."""
        return {**vars(self), "seats": [vars(seat) for seat in self.seats]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GenerationHosts:
        """Return the view that plain data describes."""
        return cls(data["generation"], tuple(Seat(**seat) for seat in data["seats"]), data["restarts"])


@dataclass(frozen=True)
class HostReport:
    """How a host's part of a generation ended."""

    words: str = ""
    """The problem; empty if its workers ended well, or because they were told to."""
    failed: str = ""
    """The process that failed or is lost."""
    was_killed: bool = False
    """A signal killed it, or it sent no heartbeat; so its failure was not caused by another process."""
    joins: bool = False
    """Worker 0 stopped at a point where others can join."""
    ended_well: bool = False
    has_stepped: bool = False
    blames: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The workers for which each worker waited in vain, by its number."""


@dataclass(frozen=True)
class Losses:
    """The processes that are lost with a generation, besides those of lost hosts, and why."""

    words: str = ""
    ranks: tuple[int, ...] = ()
    auxiliary: int = 0
    """How many auxiliary processes are lost."""


def losses(reports: Iterable[HostReport]) -> Losses:
    """Return the lost processes: one that failed, unless it waited in vain for others; then those.

    Args:
        reports: of all hosts, in the order of their arrival.
    """
    found = sorted((r for r in reports if r.words), key=lambda r: (r.joins, not r.was_killed))
    if not found:
        return Losses()
    first = found[0]
    if first.joins:
        return Losses(first.words)
    if not first.was_killed:
        cut = cut_off({int(rank): ranks for report in found for rank, ranks in report.blames.items()})
        if cut:
            names = [f"{WORKER}{rank}" for rank in cut]
            words = first.words if first.failed in names else f"{', '.join(names)} did not answer"
            return Losses(words, cut)
    if first.failed.startswith(WORKER):
        return Losses(first.words, (int(first.failed.removeprefix(WORKER)),))
    return Losses(first.words, auxiliary=1)


def cut_off(blames: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return a small set of workers that explains all blames (a greedy vertex cover).

    A worker that is cut off blames all others and is blamed by them, so it takes part in most blames. If only one of
    two workers blames the other, the other is lost; if both blame each other, the first goes on.

    Args:
        blames: the workers for which each worker waited in vain, by its number.
    """
    said = {(by, other) for by, others in blames.items() for other in others if other != by}
    found: list[int] = []
    while said:
        parts = {rank: [pair for pair in said if rank in pair] for pair in said for rank in pair}
        worst = max(parts, key=lambda rank: (len(parts[rank]), sum(o == rank for _, o in parts[rank]), rank))
        found.append(worst)
        said -= set(parts[worst])
    return tuple(sorted(found))


def may_go_on(view: GenerationHosts, present: Collection[str], ended: Collection[str] = ()) -> bool:
    """Return whether the present agents may form the next view, given those known to have ended."""
    counted = [agent for agent in view.agents if agent not in ended or agent in present]
    votes = sum(agent in present for agent in counted)
    return 2 * votes > len(counted) or (2 * votes == len(counted) and (not counted or counted[0] in present))


def following(
    view: GenerationHosts, lost: Losses, has_stepped: bool, present: Sequence[Seat], bounds: Bounds
) -> GenerationHosts | None:
    """Return the view after the last one; None if it would have too few workers.

    Args:
        has_stepped: whether the last generation has done a step.
        present: the seats of all present hosts; the first leads.
    """
    restarts = view.restarts
    if lost.auxiliary and not has_stepped:  # otherwise a server that always fails would be replaced for ever
        if not restarts:
            return None
        restarts -= 1
    before = {seat.agent: seat for seat in view.seats}
    is_smaller = bool(lost.ranks) or any(agent not in {seat.agent for seat in present} for agent in before)
    seats = []
    for seat in present:
        known = before.get(seat.agent, seat)
        gone = sum(rank in view.ranks(seat.agent) for rank in lost.ranks)
        back = min(gone, restarts)
        restarts -= back
        left = replace(known, workers=known.workers - gone, ready=known.ready + back, lost=known.lost + gone - back)
        seats.append(left)
    seats = _filled(seats, "spare", bounds.most)
    seats = _filled(seats, "ready", bounds.least if is_smaller or lost.auxiliary else bounds.most)
    made = GenerationHosts(view.generation + 1, tuple(seats), restarts)
    return made if made.workers >= bounds.least else None


def asked_for_more(view: GenerationHosts) -> GenerationHosts:
    """Return a view whose lost workers may join again."""
    return replace(view, seats=tuple(replace(seat, ready=seat.ready + seat.lost, lost=0) for seat in view.seats))


def can_join(view: GenerationHosts, others: Iterable[Seat], bounds: Bounds) -> int:
    """Return how many workers, of the running view and of hosts outside of it, can join at the end of an epoch."""
    waiting = sum(seat.ready for seat in view.seats) + sum(seat.places for seat in others)
    return max(0, min(waiting, bounds.most - view.workers))


def _filled(seats: Sequence[Seat], kind: str, most: int) -> list[Seat]:
    """Add workers of a kind ("spare" or "ready") until there are `most`."""
    filled, room = [], most - sum(seat.workers for seat in seats)
    for seat in seats:
        joining = max(0, min(room, getattr(seat, kind)))
        room -= joining
        ready = seat.ready - joining if kind == "ready" else seat.ready
        filled.append(replace(seat, workers=seat.workers + joining, ready=ready))
    return filled


# A host's part of a generation: the workers that it runs, and the addresses of all workers.

Ports = Callable[[int], list[int]]
"""Returns a number of free ports."""


@dataclass(frozen=True)
class Part:
    """A host's part of a generation."""

    generation: int
    ranks: range
    """The numbers of its workers."""
    addresses: tuple[str, ...]
    """The addresses of all workers, by rank, then of the auxiliary processes, which the first host runs."""
    workers: int
    """The number of workers on all hosts."""
    serves: bool = True
    """Whether it is the first host, which runs the auxiliary processes."""
    lease: float = 0.0
    """Seconds for which its workers go on without news of other hosts; 0: there are no other hosts."""
