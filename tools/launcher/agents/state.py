"""What an agent knows of its job, and what follows from that; nothing here waits.

    views     the last generation that began, and those that were prepared since: any of them may be what others have
    peers     who follows this agent, if it leads
    ended     agents whose processes are known to have ended; the others that are missing are only silent

The names of agents are made at random, so who was expelled comes back as somebody else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from autograph_rewrite.runtime.job.job_memory import OwnedMemory
from autograph_rewrite.tools.launcher.agents.peers import (
    Answer,
    Door,
    Message,
    Peer,
    Snapshots,
    Version,
    Wire,
    is_at,
    joined,
    own_address,
)
from autograph_rewrite.tools.launcher.agents.view import (
    Bounds,
    Part,
    Ports,
    Report,
    Seat,
    View,
    asked_for_more,
    may_go_on,
)

LOST = 3
"""After how many heartbeats without a sign of life a host is lost; its workers end by themselves by then."""
SETTLE = 2.0
"""For how many heartbeats to wait for those who are only silent: their workers have ended by then."""
_TRUST = 1.5
"""For how many heartbeats after the last news of an agent a refused connection proves that it has ended, and has formed
no generation without this host before, for which it would have had to wait for `SETTLE`."""
_CALL = 1.5
"""How many heartbeats an answer may take."""


@dataclass(frozen=True)
class Way:
    """How the hosts of a job meet."""

    endpoints: tuple[str, ...]
    """Where somebody who leads may be found; the first one begins."""
    token: bytes
    address: str | None = None
    """Where this host is reached; None: as it reaches the first endpoint."""
    wait: float = 10.0
    """Seconds for all workers, once enough are there."""
    patience: float = 300.0
    """Seconds for enough hosts."""

    @property
    def limit(self) -> str:
        """The patience, and the option that says it."""
        return f"{self.patience:g} s (--rdzv-timeout)"


class State:
    """What an agent knows.

    Args:
        way: how the hosts meet.
        bounds: how many workers there may be.
        own: its seat, without an address yet.
        owned: the memory of the job on this host.
        ports: finds free ones.
    """

    def __init__(self, way: Way, bounds: Bounds, own: Seat, owned: OwnedMemory, ports: Ports) -> None:
        self.way, self.bounds, self.own, self.owned, self._ports = way, bounds, own, owned, ports
        self.endpoints, self.heartbeat = way.endpoints, bounds.heartbeat
        self.restarts = self.servers = 0
        self.snapshots = Snapshots(owned.folder)
        self.views: tuple[View, ...] = ()
        self.leads = self.is_founder = self.lets_join = False
        self.leader: Wire | None = None
        self.leader_at = self.leader_agent = self._hint = ""
        self.peers: dict[str, Peer] = {}
        self.ended: set[str] = set()
        self.lost: dict[str, str] = {}
        self._news: dict[str, float] = {}
        self.report: Report | None = None
        self.told: str | None = None
        self.over: str | None = None
        self.why = ""
        self.prepare: tuple[View, dict[str, Version], int] | None = None
        self.begin: Message | None = None
        self.copying: dict[str, int] = {}
        self.copied: dict[str, Version] = {}
        self.trouble_since = time.monotonic()
        self.door: Door
        self.spawn: Callable[[Coroutine[Any, Any, None]], None]

    async def open(self, answer: Callable[[Wire, Message], Coroutine[Any, Any, None]]) -> None:
        """Listen: at the first endpoint that is here, else at any port.

        Args:
            answer: is given who calls.
        """
        host = self.way.address or own_address(self.endpoints[0])
        here = [endpoint for endpoint in self.endpoints if is_at(endpoint, host)]
        self.door = Door(self.way.token, _CALL * self.heartbeat, answer)
        port = await self.door.open(host, [int(endpoint.rpartition(":")[2]) for endpoint in here])
        self.own = replace(self.own, agent=secrets.token_hex(8), address=joined(host, [port])[0])
        first = self.endpoints[0]
        self.is_founder = first in here and int(first.rpartition(":")[2]) == port

    @property
    def current(self) -> View:
        """The last generation that began."""
        return self.views[0] if self.views else View(restarts=self.restarts)

    @property
    def is_member(self) -> bool:
        """Whether this agent takes part in a generation."""
        return bool(self.views)

    @property
    def present(self) -> set[str]:
        """The agents that reach each other, if this one leads."""
        return {self.own.agent, *self.peers}

    @property
    def leader_address(self) -> str:
        """Where who leads listens."""
        if self.leads:
            return self.own.address
        return self.leader_at if self.leader is not None else ""

    def is_patient(self) -> bool:
        """Whether it is too early to give up."""
        return time.monotonic() - self.trouble_since < self.way.patience

    def waits_for(self) -> str:
        """Return what the next generation waits for."""
        limit = self.way.limit
        if self.leads:
            here = sum(seat.places for seat in (self.own, *(peer.seat for peer in self.peers.values())))
            wanted = f"{self.bounds.least} to {self.bounds.most} workers"
            return f"{here} of {wanted} are here; the others may come to {self.own.address} within {limit}"
        if self.leader is not None:
            return f"waits for {self.leader_at}, which leads"
        return f"nobody who leads answers at {', '.join(self.endpoints)} yet; gives up after {limit}"

    def unanswered(self) -> str:
        """Return why this agent gives up: nobody who leads answers."""
        places = f"nobody who leads answers at {', '.join(self.endpoints)}"
        limit = self.way.limit
        if not self.is_member:
            return f"{places} within {limit}"
        lost = ", ".join(self.lost.values()) or "hosts are lost"
        return f"{lost}, and {places}: the others may have gone on without this host, which gives up after {limit}"

    # ------------------------------------------------------------------------------------------------ who is reached

    def hello(self) -> dict[str, Any]:
        """What to say to somebody who may lead."""
        views = [view.data() for view in self.views]
        return {"seat": vars(self.own), "views": views, "have": self.snapshots.versions}

    def before_me(self) -> list[str]:
        """Return the addresses at which somebody may lead already."""
        hint, self._hint = self._hint, ""
        known = [hint] if hint else []
        if self.is_member:
            agents = self.current.agents
            return known + [seat.address for seat in self.current.seats[: agents.index(self.own.agent)]]
        return known + [endpoint for endpoint in self.endpoints if endpoint != self.own.address and not self.is_founder]

    def absent(self) -> list[str]:
        """Return the addresses at which others may be, who do not follow this agent."""
        seats = [seat for view in self.views for seat in view.seats]
        here = {peer.seat.address for peer in self.peers.values()} | {self.own.address}
        return [a for a in dict.fromkeys([*(seat.address for seat in seats), *self.endpoints]) if a not in here]

    def note_answer(self, address: str, answer: Answer) -> None:
        """Note what an answer says of an agent that was there: where another one answers, or none, it has ended.

        That counts soon after the last news of it only: later it may have ended after it went on without this host.

        Args:
            address: that was called.
            answer: what became of that.
        """
        if answer.kind == "silent":
            return
        for seat in (seat for view in self.views for seat in view.seats):
            is_recent = time.monotonic() - self._news.get(seat.agent, 0.0) < _TRUST * self.heartbeat
            if seat.address == address and seat.agent != answer.agent and is_recent:
                self.ended.add(seat.agent)

    def answer_to(self, seat: Seat, views: tuple[View, ...]) -> str:
        """Return what to answer who wants to follow.

        Args:
            views: that it knows.
        """
        theirs = views[0].generation if views else 0
        if not self.leads or theirs > self.current.generation:
            return "see"
        if views and seat.agent not in self.current.agents and theirs < self.current.generation:
            return "anew"
        agents = self.current.agents
        if seat.agent in agents and agents.index(seat.agent) < agents.index(self.own.agent) and self.report is not None:
            return "see"  # it comes first
        return "welcome"

    def is_established(self) -> bool:
        """Whether nobody else can lead the hosts of the last generation."""
        return self.is_member and all(may_go_on(view, self.present, self.ended) for view in self.views)

    def newcomers(self) -> list[Seat]:
        """Return the seats of those who want to join."""
        return [peer.seat for peer in self.peers.values() if peer.seat.agent not in self.current.agents]

    # ------------------------------------------------------------------------------------------------ who is lost

    def lose(self, agent: str, how: str) -> None:
        """Have one who followed no more.

        Args:
            agent: its name.
            how: what it did.
        """
        peer = self.peers.pop(agent)
        peer.wire.close()
        self._news[agent] = peer.wire.heard
        self.lost[agent] = f"host {peer.seat.address} {how}"
        self.trouble_since = time.monotonic()

    def lose_leader(self, words: str) -> None:
        """Follow nobody any more.

        Args:
            words: why.
        """
        if self.leader is not None:
            self.leader.close()
            self._news = dict.fromkeys(self.current.agents, self.leader.heard)
        self.lost[self.leader_agent] = words
        self.leader, self.prepare, self.begin, self.lets_join = None, None, None, False
        self.told, self.trouble_since = words, time.monotonic()

    def drop_silent(self) -> None:
        """Lose those who have given no sign of life."""
        now, most = time.monotonic(), LOST * self.heartbeat
        for agent, peer in list(self.peers.items()):
            if now - peer.wire.heard > most:
                self.lose(agent, f"has given no sign of life for {now - peer.wire.heard:.1f} s")
        if self.leader is not None and now - self.leader.heard > most:
            silence = now - self.leader.heard
            self.lose_leader(f"host {self.leader_at} has given no sign of life for {silence:.1f} s")

    def resign(self) -> None:
        """Lead nobody any more."""
        self.leads = False
        for peer in self.peers.values():
            peer.wire.close()
        self.peers.clear()

    def hear_of(self, leader: str, generation: int) -> None:
        """Note who leads; who leads an older generation stops to.

        Args:
            leader: its address.
        """
        if generation > self.current.generation and leader != self.own.address:
            self._hint = leader
            if self.leads:
                self.resign()

    def become_new(self) -> None:
        """Be another agent: the others went on without this one."""
        self.own = replace(self.own, agent=secrets.token_hex(8))
        self.views, self.report, self.prepare, self.begin, self.is_founder = (), None, None, None, False
        self.snapshots.keep_only({})

    # ------------------------------------------------------------------------------------------------ generations

    def problem(self) -> str | None:
        """Return why the generation that runs is to end."""
        if self.told is not None:
            return self.told
        if self.over is not None:
            return self.over
        if not self.leads:
            return None
        for seat in self.current.seats:
            if seat.agent not in self.present:
                return self.lost.get(seat.agent, f"host {seat.address} is lost")
        for peer in self.peers.values():
            has_reported = peer.is_idle and peer.generation == self.current.generation
            if has_reported and peer.report is not None and not peer.report.ended_well:
                return peer.report.words or "another host has ended its part"
        return None

    def ask_for_more(self) -> None:
        """Let all workers join that were lost."""
        if self.views:
            self.views = (asked_for_more(self.views[0]), *self.views[1:])

    def tell_worker_0(self, kind: str) -> None:
        """Tell the host of worker 0 something.

        Args:
            kind: of message.
        """
        for seat in self.current.seats:
            if 0 in self.current.ranks(seat.agent):
                if seat.agent == self.own.agent:
                    self.lets_join = True
                elif seat.agent in self.peers and not self.lets_join:
                    self.peers[seat.agent].wire.post(kind)
                    self.lets_join = True

    def second(self) -> Wire | None:
        """Return the way to the host that copies snapshots; None: there is no other host."""
        if not self.leads:
            return self.leader
        for seat in self.current.seats:
            if seat.agent in self.peers:
                return self.peers[seat.agent].wire
        return None

    def free_ports(self, view: View) -> list[int]:
        """Return ports for this host's processes.

        Args:
            view: of the generation.
        """
        serves = view.agents[0] == self.own.agent
        return self._ports(len(view.ranks(self.own.agent)) + (self.servers if serves else 0))

    def commit(self, view: View, workers: tuple[str, ...], servers: tuple[str, ...]) -> Part:
        """Begin a generation.

        Args:
            view: its hosts.
            workers: the addresses of its workers.
            servers: and of its parameter servers.
        """
        self.views, self.ended, self.lost, self.copying, self._news = (view,), set(), {}, {}, {}
        self.report, self.told, self.prepare, self.begin, self.lets_join = None, None, None, None, False
        ranks, serves = view.ranks(self.own.agent), view.agents[0] == self.own.agent
        return Part(view.generation, ranks, workers, servers, serves, LOST * self.heartbeat)
