"""Who takes part in a generation of an elastic job, and who may form the next one: pure functions of what is known.

    view 3    host A  workers 0 1 │ host B  workers 2 3 │ host C  workers 4 5       B is cut off, or gone
    view 4    host A  workers 0 1 │ host C  workers 2 3                             formed by A and C: two of three

The first host of a view leads it. The next view is formed by more than half of the hosts of the last one, or by half of
them if the first is among them, so that of two sides that do not reach each other at most one goes on. Hosts whose
agents are known to have ended do not count (a connection is refused, or a new process answers): silence proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

WORKER = "worker "


@dataclass(frozen=True)
class Bounds:
    """How many workers an elastic job may have, and how often they give a sign of life, in seconds."""

    least: int
    most: int
    heartbeat: float = 1.0


@dataclass(frozen=True)
class Seat:
    """A host in a view."""

    agent: str
    """The agent's own name: that of one process, so who comes back under it is the same process."""
    address: str
    """Where it listens: `host:port`."""
    places: int
    """How many workers it was started for."""
    workers: int = 0
    """How many it runs."""
    ready: int = 0
    """How many, restarted, join at the end of an epoch."""
    lost: int = 0
    """How many were lost and may not be restarted, until somebody asks for them."""

    @property
    def spare(self) -> int:
        """How many more it could run at once."""
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
        """How many workers there are."""
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
        """The view as plain data."""
        return {**vars(self), "seats": [vars(seat) for seat in self.seats]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GenerationHosts:
        """Return the view that plain data describes."""
        return cls(data["generation"], tuple(Seat(**seat) for seat in data["seats"]), data["restarts"])


@dataclass(frozen=True)
class HostReport:
    """How a host's part of a generation ended."""

    words: str = ""
    """What happened; nothing if its workers ended well, or because they were told to."""
    failed: str = ""
    """The process that failed, or is lost."""
    was_killed: bool = False
    """A signal killed it, or it gave no sign of life: it has not failed for the sake of somebody else."""
    joins: bool = False
    """Worker 0 stopped where others can join."""
    ended_well: bool = False
    has_stepped: bool = False
    blames: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By the number of a worker: those for whom it waited in vain."""


@dataclass(frozen=True)
class Losses:
    """Who is lost with a generation, besides hosts, and why."""

    words: str = ""
    ranks: tuple[int, ...] = ()
    auxiliary: int = 0
    """How many of those that serve them."""


def losses(reports: Iterable[HostReport]) -> Losses:
    """Return who is lost, given all reports as they came: who failed, unless it waited in vain for others."""
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
    """Return the fewest workers without whom nobody has waited in vain for anybody.

    Who is cut off misses all others, and says so, too: it is the one that has a part in most of what is said. Of two of
    whom only one has said something it is the other; of two that blame each other, the first goes on.

    Args:
        blames: by the number of a worker, those for whom it waited in vain.
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
    """Return whether the agents that are present may form the next view; some are known to have ended."""
    counted = [agent for agent in view.agents if agent not in ended or agent in present]
    votes = sum(agent in present for agent in counted)
    return 2 * votes > len(counted) or (2 * votes == len(counted) and (not counted or counted[0] in present))


def following(
    view: GenerationHosts, lost: Losses, has_stepped: bool, present: Sequence[Seat], bounds: Bounds
) -> GenerationHosts | None:
    """Return the view after the last one; None if too few would be left.

    Args:
        has_stepped: whether the last one has done a step.
        present: the seats of all hosts that are there, as they came; the first leads.
    """
    restarts = view.restarts
    if lost.auxiliary and not has_stepped:  # a server that never serves would be replaced for ever
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
    """Return a view whose lost workers are to join again."""
    return replace(view, seats=tuple(replace(seat, ready=seat.ready + seat.lost, lost=0) for seat in view.seats))


def can_join(view: GenerationHosts, others: Iterable[Seat], bounds: Bounds) -> int:
    """Return how many workers of the view that runs, and of hosts that are not in it yet, wait for an epoch's end."""
    waiting = sum(seat.ready for seat in view.seats) + sum(seat.places for seat in others)
    return max(0, min(waiting, bounds.most - view.workers))


def _filled(seats: Sequence[Seat], kind: str, most: int) -> list[Seat]:
    """Let workers of a kind, spare or ready, take part until there are so many."""
    filled, room = [], most - sum(seat.workers for seat in seats)
    for seat in seats:
        joining = max(0, min(room, getattr(seat, kind)))
        room -= joining
        ready = seat.ready - joining if kind == "ready" else seat.ready
        filled.append(replace(seat, workers=seat.workers + joining, ready=ready))
    return filled


# What a host does of one generation: which workers it runs, and where all of them listen.

Ports = Callable[[int], list[int]]
"""Returns so many ports at which nobody listens."""


@dataclass(frozen=True)
class Part:
    """A host's part of a generation."""

    generation: int
    ranks: range
    """The numbers of its workers."""
    addresses: tuple[str, ...]
    """Those of all workers, by rank, and then of what serves them, which the first host runs."""
    workers: int
    """How many there are."""
    serves: bool = True
    """Whether it is the first host."""
    lease: float = 0.0
    """For how many seconds its workers go on without news of other hosts; 0: there are none."""
