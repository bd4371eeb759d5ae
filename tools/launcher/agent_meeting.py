"""Run the agents of a job on several hosts: one leads, the others follow; if it is lost, the next in order leads.

    seek ──welcomed──► follow ──leader lost──► seek        calls those before it in the last view, then the endpoints
      └──nobody before it──► lead ──another leads──► seek  forms generations with all that follow it, see `form`

Each agent sends a heartbeat twice per interval to the agent that it follows, or to all that follow it. An agent that is
silent for three intervals is lost, as is one whose connection breaks. The launcher has only one thread, which handles
messages between its checks of the workers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from autograph_rewrite.runtime.job.job_memory import JobMemory, OwnedMemory
from autograph_rewrite.tools.launcher import agent_peers, agent_view

_TICK = 0.01
_SOON = 0.3
"""Seconds after which a connection that a host has not refused is given up."""
_QUIET, _REMINDED = 5.0, 30.0
"""Seconds until a meeting reports what it waits for, and between two reports."""


# The state of an agent, and decisions that follow from it; of these, only those that lead a job wait.
#
#     views     the last generation that began, and those prepared since, any of which other agents may have begun
#     peers     the agents that follow this one, if it leads
#     ended     agents whose processes are known to have ended; other missing agents are only silent
#
# The names of agents are random, so an agent that was expelled comes back under another name.

LOST = 3
"""Heartbeat intervals without a message after which a host is lost; its workers end by themselves by then."""
SETTLE = 2.0
"""Heartbeat intervals to wait for silent hosts, after which their workers have ended."""
_TRUST = 1.5
"""Heartbeat intervals after the last news of an agent in which a refused connection proves two things: the agent has
ended, and it has not formed a generation without this host, because it would have waited `SETTLE` intervals first."""
_CALL = 1.5
"""Heartbeat intervals that an answer may take."""


@dataclass(frozen=True)
class Way:
    """How the hosts of a job meet."""

    endpoints: tuple[str, ...]
    """Where a leader may be found; the agent at the first one leads at the beginning."""
    token: bytes
    address: str | None = None
    """Where other hosts reach this one; None: the address from which it reaches the first endpoint."""
    wait: float = 10.0
    """Seconds to wait for all workers, once enough are there."""
    patience: float = 300.0
    """Seconds to wait for enough hosts."""

    @property
    def limit(self) -> str:
        """The patience as text, with its option."""
        return f"{self.patience:g} s (--rdzv-timeout)"


class AgentState:
    """The state of an agent.

    Args:
        own: its seat, without an address yet.
        owned: the memory of the job on this host.
    """

    def __init__(
        self, way: Way, bounds: agent_view.Bounds, own: agent_view.Seat, owned: OwnedMemory, ports: agent_view.Ports
    ) -> None:
        self.way, self.bounds, self.own, self.owned, self._ports = way, bounds, own, owned, ports
        self.endpoints, self.heartbeat = way.endpoints, bounds.heartbeat
        self.restarts = self.auxiliary = 0
        self.snapshots = agent_peers.HostSnapshots(owned.folder)
        self.views: tuple[agent_view.GenerationHosts, ...] = ()
        self.leads = self.is_founder = self.lets_join = False
        self.leader: agent_peers.Wire | None = None
        self.leader_at = self.leader_agent = self._hint = ""
        self.peers: dict[str, agent_peers.Peer] = {}
        self.ended: set[str] = set()
        self.lost: dict[str, str] = {}
        self._news: dict[str, float] = {}
        self.report: agent_view.HostReport | None = None
        self.told: str | None = None
        self.over: str | None = None
        self.because = ""
        self.prepare: tuple[agent_view.GenerationHosts, dict[str, agent_peers.Version], int] | None = None
        self.begin: agent_peers.Message | None = None
        self.copying: dict[str, int] = {}
        self.copied: dict[str, agent_peers.Version] = {}
        self.trouble_since = time.monotonic()
        self.door: agent_peers.Door
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, what: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the others."""
        task = self._loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def open(self, answer: Callable[[agent_peers.Wire, agent_peers.Message], Coroutine[Any, Any, None]]) -> None:
        """Listen at the first endpoint on this host, else at any port; `answer` gets each connection."""
        host = self.way.address or agent_peers.own_address(self.endpoints[0])
        here = [endpoint for endpoint in self.endpoints if agent_peers.is_at(endpoint, host)]
        self.door = agent_peers.Door(self.way.token, _CALL * self.heartbeat, answer)
        port = await self.door.open(host, [int(endpoint.rpartition(":")[2]) for endpoint in here])
        self.own = replace(self.own, agent=secrets.token_hex(8), address=agent_peers.joined(host, [port])[0])
        first = self.endpoints[0]
        self.is_founder = first in here and int(first.rpartition(":")[2]) == port

    @property
    def current(self) -> agent_view.GenerationHosts:
        """The last generation that began."""
        return self.views[0] if self.views else agent_view.GenerationHosts(restarts=self.restarts)

    @property
    def is_member(self) -> bool:
        """Whether this agent belongs to a generation."""
        return bool(self.views)

    @property
    def present(self) -> set[str]:
        """This agent and those that follow it."""
        return {self.own.agent, *self.peers}

    @property
    def wires(self) -> list[agent_peers.Wire]:
        """The connections to the leader and to all followers."""
        followers = [peer.wire for peer in self.peers.values()]
        return [self.leader, *followers] if self.leader is not None else followers

    @property
    def leader_address(self) -> str:
        """The address of the leader; empty if there is none."""
        if self.leads:
            return self.own.address
        return self.leader_at if self.leader is not None else ""

    def is_patient(self) -> bool:
        """Return whether it is too early to give up."""
        return time.monotonic() - self.trouble_since < self.way.patience

    def waits_for(self) -> str:
        """Return a text on what the next generation waits for."""
        limit = self.way.limit
        if self.leads:
            here = sum(seat.places for seat in (self.own, *(peer.seat for peer in self.peers.values())))
            wanted = f"{self.bounds.least} to {self.bounds.most} workers"
            return f"{here} of {wanted} are here; the others may come to {self.own.address} within {limit}"
        if self.leader is not None:
            return f"waits for {self.leader_at}, which leads"
        return f"nobody who leads answers at {', '.join(self.endpoints)} yet; gives up after {limit}"

    def unanswered(self) -> str:
        """Return the reason why this agent gives up: no leader answers."""
        places = f"nobody who leads answers at {', '.join(self.endpoints)}"
        limit = self.way.limit
        if not self.is_member:
            return f"{places} within {limit}"
        lost = ", ".join(self.lost.values()) or "hosts are lost"
        return f"{lost}, and {places}: the others may have gone on without this host, which gives up after {limit}"

    # ------------------------------------------------------------------------------------------------ who is reached

    def hello(self) -> dict[str, Any]:
        """Return the content of a `hello` to a possible leader."""
        views = [view.data() for view in self.views]
        return {"seat": vars(self.own), "views": views, "have": self.snapshots.versions}

    def before_me(self) -> list[str]:
        """Return the addresses of agents that may lead in place of this one."""
        hint, self._hint = self._hint, ""
        known = [hint] if hint else []
        if self.is_member:
            agents = self.current.agents
            return known + [seat.address for seat in self.current.seats[: agents.index(self.own.agent)]]
        return known + [endpoint for endpoint in self.endpoints if endpoint != self.own.address and not self.is_founder]

    def absent(self) -> list[str]:
        """Return the addresses of agents that may exist and do not follow this one."""
        seats = [seat for view in self.views for seat in view.seats]
        here = {peer.seat.address for peer in self.peers.values()} | {self.own.address}
        return [a for a in dict.fromkeys([*(seat.address for seat in seats), *self.endpoints]) if a not in here]

    def note_answer(self, address: str, answer: agent_peers.CallAnswer) -> None:
        """Record that the agent at an address has ended, if another agent answers there, or none does.

        This proves something only soon after the last news of the agent (`_TRUST`): later, it may have ended after it
        went on without this host.
        """
        if answer.kind == "silent":
            return
        for seat in (seat for view in self.views for seat in view.seats):
            is_recent = time.monotonic() - self._news.get(seat.agent, 0.0) < _TRUST * self.heartbeat
            if seat.address == address and seat.agent != answer.agent and is_recent:
                self.ended.add(seat.agent)

    def answer_to(self, seat: agent_view.Seat, views: tuple[agent_view.GenerationHosts, ...]) -> str:
        """Return the answer (`welcome`, `see`, `anew`) to an agent that wants to follow and knows some views."""
        theirs = views[0].generation if views else 0
        if not self.leads or theirs > self.current.generation:
            return "see"
        if views and seat.agent not in self.current.agents and theirs < self.current.generation:
            return "anew"
        agents = self.current.agents
        if seat.agent in agents and agents.index(seat.agent) < agents.index(self.own.agent) and self.report is not None:
            return "see"  # the caller precedes this agent in the view, and so may lead
        return "welcome"

    def is_established(self) -> bool:
        """Return whether no other agent can lead the hosts of the last generation."""
        return self.is_member and all(agent_view.may_go_on(view, self.present, self.ended) for view in self.views)

    def newcomers(self) -> list[agent_view.Seat]:
        """Return the seats of followers that are not in the current generation."""
        return [peer.seat for peer in self.peers.values() if peer.seat.agent not in self.current.agents]

    # ------------------------------------------------------------------------------------------------ who is lost

    def lose(self, agent: str, how: str) -> None:
        """Remove a follower, and record how it was lost."""
        peer = self.peers.pop(agent)
        peer.wire.close()
        self._news[agent] = peer.wire.heard
        self.lost[agent] = f"host {peer.seat.address} {how}"
        self.trouble_since = time.monotonic()

    def lose_leader(self, words: str) -> None:
        """Stop following the leader, and record why."""
        if self.leader is not None:
            self.leader.close()
            self._news = dict.fromkeys(self.current.agents, self.leader.heard)
        self.lost[self.leader_agent] = words
        self.leader, self.prepare, self.begin, self.lets_join = None, None, None, False
        self.told, self.trouble_since = words, time.monotonic()

    def drop_silent(self) -> None:
        """Lose agents that have sent no heartbeat for too long."""
        now, most = time.monotonic(), LOST * self.heartbeat
        for agent, peer in list(self.peers.items()):
            if now - peer.wire.heard > most:
                self.lose(agent, f"has given no sign of life for {now - peer.wire.heard:.1f} s")
        if self.leader is not None and now - self.leader.heard > most:
            silence = now - self.leader.heard
            self.lose_leader(f"host {self.leader_at} has given no sign of life for {silence:.1f} s")

    def resign(self) -> None:
        """Stop leading, and drop all followers."""
        self.leads = False
        for peer in self.peers.values():
            peer.wire.close()
        self.peers.clear()

    def hear_of(self, leader: str, generation: int) -> None:
        """Record the address of a leader; stop leading if its generation is newer."""
        if generation > self.current.generation and leader != self.own.address:
            self._hint = leader
            if self.leads:
                self.resign()

    def become_new(self) -> None:
        """Take a new name and forget the job, because the others went on without this agent."""
        self.own = replace(self.own, agent=secrets.token_hex(8))
        self.views, self.report, self.prepare, self.begin, self.is_founder = (), None, None, None, False
        self.snapshots.keep_only({})

    # ------------------------------------------------------------------------------------------------ generations

    def problem(self) -> str | None:
        """Return why the running generation must end; None if it need not."""
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
        """Let all lost workers join again."""
        if self.views:
            self.views = (agent_view.asked_for_more(self.views[0]), *self.views[1:])

    def tell_worker_0(self, kind: str) -> None:
        """Send a message of a kind to the host of worker 0, once."""
        for seat in self.current.seats:
            if 0 in self.current.ranks(seat.agent):
                if seat.agent == self.own.agent:
                    self.lets_join = True
                elif seat.agent in self.peers and not self.lets_join:
                    self.peers[seat.agent].wire.post(kind)
                    self.lets_join = True

    def second(self) -> agent_peers.Wire | None:
        """Return the connection to the host that keeps copies of snapshots; None: there is no other host."""
        if not self.leads:
            return self.leader
        for seat in self.current.seats:
            if seat.agent in self.peers:
                return self.peers[seat.agent].wire
        return None

    def free_ports(self, view: agent_view.GenerationHosts) -> list[int]:
        """Return ports for this host's processes in a generation."""
        serves = view.agents[0] == self.own.agent
        return self._ports(len(view.ranks(self.own.agent)) + (self.auxiliary if serves else 0))

    def commit(self, view: agent_view.GenerationHosts, addresses: tuple[str, ...]) -> agent_view.Part:
        """Begin a generation, given the addresses of its workers and then of its auxiliary processes."""
        self.views, self.ended, self.lost, self.copying, self._news = (view,), set(), {}, {}, {}
        self.report, self.told, self.prepare, self.begin, self.lets_join = None, None, None, None, False
        ranks, serves = view.ranks(self.own.agent), view.agents[0] == self.own.agent
        return agent_view.Part(view.generation, ranks, addresses, view.workers, serves, LOST * self.heartbeat)

    # Lead a job: end a generation on all hosts, find who is left, prepare the next generation, begin it.
    #
    #     stop ──► all have told how their parts ended ──► enough are here to decide ──► newest snapshots fetched
    #                                                                                         │
    #     begin ◄── all have ports, and the snapshots ◄── prepare: view, snapshots, seed ◄────┘
    #
    # A host that is lost on the way is left out of the next try. A view counts once all its hosts are prepared. A host
    # that has prepared a view reports it, so that nobody forms another one without a majority of that view, too.

    async def form(self) -> agent_view.Part | None:
        """Form the next generation; None: this agent no longer leads, or the job is over."""
        stopped = set[str]()
        while self.leads and self.over is None:
            is_trouble = self._is_trouble()
            if not is_trouble and self._all_idle():
                self._end("")
            elif is_trouble and not self._all_idle():
                for agent, peer in self.peers.items():
                    if not peer.is_idle and agent not in stopped:
                        stopped.add(agent)
                        words = self.because or self._losses().words
                        peer.wire.post("stop", generation=self.current.generation, words=words)
            elif is_trouble:
                view = self._next()
                part = await self._prepared(view) if view is not None else None
                if part is not None:
                    return part
                if view is None and not self.is_patient():
                    self._end(self._too_few())
            await asyncio.sleep(_TICK)
        return None

    def _end(self, words: str) -> None:
        for peer in self.peers.values():
            peer.wire.post("over", words=words)
        self.over = words

    def _too_few(self) -> str:
        view = self._known()[0]
        here = sum(agent in self.present for agent in view.agents)
        if not view.generation:
            return f"too few workers came within {self.way.patience:g} s"
        if not all(agent_view.may_go_on(known, self.present, self.ended) for known in self._known()):
            reached = f"only {here} of {len(view.seats)} hosts reach each other, and the others may have gone on"
            limit = self.way.limit
            return f"{self._losses().words}: {reached} without this one, which gives up after {limit}"
        return f"{self._losses().words or 'hosts are lost'}: too few workers are left"

    def _members(self) -> list[agent_peers.Peer | None]:
        """Return the peers of the last generation, None for each missing one."""
        return [self.peers.get(agent) for agent in self.current.agents if agent != self.own.agent]

    def _is_trouble(self) -> bool:
        """Return whether the generation can no longer end well, or there was none."""
        if self.report is None or not self.report.ended_well:
            return True
        for peer in self._members():
            if peer is None or (peer.is_idle and not (peer.report is not None and peer.report.ended_well)):
                return True
        return False

    def _all_idle(self) -> bool:
        return all(peer.is_idle for peer in self.peers.values())

    def _known(self) -> list[agent_view.GenerationHosts]:
        """Return the last generation known to have begun, and the views that were prepared since."""
        theirs = [peer.views[0] for peer in self.peers.values() if peer.views]
        begun = max([self.current, *theirs], key=lambda view: view.generation)
        views = [*self.views, *(view for peer in self.peers.values() for view in peer.views)]
        return [begun, *(view for view in views if view.generation > begun.generation)]

    def _reports(self, generation: int) -> list[agent_view.HostReport]:
        found = [peer.report for peer in self.peers.values() if peer.generation == generation and peer.report]
        own = [self.report] if self.report is not None and self.current.generation == generation else []
        return [*own, *found]

    def _losses(self) -> agent_view.Losses:
        """Return the lost processes; a lost host explains the failures of others, unless one of them was killed."""
        view = self._known()[0]
        reports = self._reports(view.generation)
        found = agent_view.losses(reports)
        missing = [seat for seat in view.seats if seat.agent not in self.present]
        if not missing:
            return found
        words = ", ".join(self.lost.get(seat.agent, f"host {seat.address} is lost") for seat in missing)
        was_killed = found.words and any(report.was_killed for report in reports)
        return replace(found if was_killed else agent_view.Losses(), words=words)

    def _next(self) -> agent_view.GenerationHosts | None:
        """Return the next view; None if it cannot be decided yet."""
        base, *prepared = self._known()
        known = {seat.agent: seat for seat in base.seats}
        seats = [self.own, *(peer.seat for peer in self.peers.values())]
        seats.sort(key=lambda seat: (seat.agent != self.own.agent, _place(base, seat)))
        waited = time.monotonic() - self.trouble_since
        if not base.generation and sum(seat.places for seat in seats) < self.bounds.most and waited < self.way.wait:
            return None
        missing = [a for view in (base, *prepared) for a in view.agents if a not in self.present | self.ended]
        if missing and waited < SETTLE * self.heartbeat:
            return None
        if not all(agent_view.may_go_on(view, self.present, self.ended) for view in (base, *prepared)):
            return None
        has_stepped = any(report.has_stepped for report in self._reports(base.generation))
        view = agent_view.following(base, self._losses(), has_stepped, seats, self.bounds)
        if view is None:
            if base.generation and all(agent in self.present for agent in known):
                self._end(f"{self._losses().words}: too few workers are left")  # no missing host could come back
            return None
        self.because = self._losses().words
        newest = max(view.generation for view in (base, *prepared))
        return replace(view, generation=newest + 1)

    async def _prepared(self, view: agent_view.GenerationHosts) -> agent_view.Part | None:
        """Prepare and begin a generation; None if a host is lost meanwhile."""
        self.views = (*self.views, view)
        if not await self._fetched(view):
            return None
        have = dict(self.snapshots.versions)
        members = [self.peers[agent] for agent in view.agents if agent in self.peers]
        for peer in members:
            peer.wire.post("prepare", view=view.data(), have=have, seed=self.owned.seed)
            for name in [name for name, version in have.items() if peer.have.get(name) != version]:
                self.spawn(self.snapshots.send(peer.wire, name))
        while any(peer.prepared != view.generation for peer in members):
            if not self._are_here(view):
                return None
            await asyncio.sleep(_TICK)
        if not self._are_here(view):
            return None
        return self._begun(view, {**{p.seat.agent: p.ports for p in members}, self.own.agent: self.free_ports(view)})

    def _begun(self, view: agent_view.GenerationHosts, ports: dict[str, list[int]]) -> agent_view.Part:
        workers: list[str] = []
        auxiliary: list[str] = []
        for seat in view.seats:
            addresses = agent_peers.joined(seat.address.rpartition(":")[0].strip("[]"), ports[seat.agent])
            workers += addresses[: seat.workers]
            auxiliary += addresses[seat.workers :]
        everybody = [*workers, *auxiliary]
        said: dict[str, Any] = {"generation": view.generation, "addresses": everybody, "why": self.because}
        for agent in view.agents:
            if agent in self.peers:
                peer = self.peers[agent]
                peer.wire.post("begin", **said)
                peer.is_idle, peer.views, peer.report = False, (view,), None
        return self.commit(view, tuple(everybody))

    async def _fetched(self, view: agent_view.GenerationHosts) -> bool:
        """Fetch the newest snapshots of all hosts; return whether all hosts of a view are still here."""
        newest: dict[str, agent_peers.Version] = dict(self.snapshots.versions)
        for peer in self.peers.values():
            for name, version in peer.have.items():
                if version > newest.get(name, (0, 0)):
                    newest[name] = version
                    peer.wire.post("want", name=name)
        while any(self.snapshots.versions.get(name, (0, 0)) < version for name, version in newest.items()):
            if not self._are_here(view):
                return False
            await asyncio.sleep(_TICK)
        return self._are_here(view)

    def _are_here(self, view: agent_view.GenerationHosts) -> bool:
        return self.leads and all(agent in self.present for agent in view.agents)


def _place(view: agent_view.GenerationHosts, seat: agent_view.Seat) -> int:
    """Return the place of a host in a view; new hosts are last."""
    return view.agents.index(seat.agent) if seat.agent in view.agents else len(view.seats)


class AgentMeeting(AgentState):
    """One agent among others; `say` prints messages for a person who waits."""

    def __init__(
        self,
        way: Way,
        bounds: agent_view.Bounds,
        own: agent_view.Seat,
        owned: OwnedMemory,
        ports: agent_view.Ports,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        super().__init__(way, bounds, own, owned, ports)
        self._say, self._renewed, self.why = say, 0.0, ""
        try:
            self._loop.run_until_complete(self.open(self._answer))
        except BaseException:
            self._loop.close()
            raise
        self.spawn(self._beat())
        self.spawn(self._look_around())

    def meet(self, report: agent_view.HostReport | None, impatient: Callable[[], bool]) -> agent_view.Part | None:
        """Form the next generation with the other agents; return this host's part, None if the job is over.

        Args:
            report: how this host's part of the last generation ended; None: there was none.
            impatient: called repeatedly; returns whether to give up.
        """
        if report is not None:
            self._note_snapshots(None)
            self.report = report
        task = self._loop.create_task(self._meet())
        silent_until = time.monotonic() + _QUIET
        while not task.done():
            self._loop.run_until_complete(asyncio.wait({task}, timeout=0.05))
            if time.monotonic() > silent_until and not task.done():
                silent_until = time.monotonic() + _REMINDED
                self._say(self.waits_for())
            if impatient():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}))
                return None
        self.why = self.over if self.over is not None else self.because
        return task.result()

    async def _meet(self) -> agent_view.Part | None:
        self.trouble_since = time.monotonic()
        while self.over is None:
            if self.leads:
                part = await self.form()
            elif self.leader is not None:
                part = await self._follow(self.leader)
            else:
                part = None
                await self._seek()
            if part is not None:
                return part
        return None

    def look(self, memory: JobMemory) -> str | None:
        """Handle messages and copy snapshots while a generation runs; return why it must end, None if it need not."""
        self._loop.run_until_complete(asyncio.sleep(_TICK if self.copying else 0))
        self._note_snapshots(memory)
        problem = self.problem()
        if problem is not None:
            self._loop.run_until_complete(self._verify())
            return problem
        if time.monotonic() - self._renewed > self.heartbeat / 4:
            self._renewed = time.monotonic()
            memory.renew()
        if self.leads and agent_view.can_join(self.current, self.newcomers(), self.bounds):
            self.tell_worker_0("join")
        if self.lets_join and not memory.lets_join:
            memory.let_join()
        return None

    def request(self) -> None:
        """Ask for the largest number of workers."""
        if self.leads:
            self.ask_for_more()
        elif self.leader is not None:
            self.leader.post("request")

    def leave(self) -> None:
        """Tell the others that this agent leaves, and close all connections."""
        kind = "leave" if self.over is None else "beat"
        wires = self.wires
        for wire in wires:
            wire.post(kind)
            wire.close()
        with suppress(*agent_peers.BROKEN):
            self._loop.run_until_complete(asyncio.wait_for(self._gone(wires), 2.0))
        self.door.close()
        while pending := asyncio.all_tasks(self._loop):  # a task may start another while it is cancelled
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _gone(self, wires: list[agent_peers.Wire]) -> None:
        for wire in wires:
            await wire.gone()

    async def _beat(self) -> None:
        """Send heartbeats, and drop agents that send none."""
        while True:
            for wire in self.wires:
                wire.post("beat")
            await asyncio.sleep(self.heartbeat / 2)
            self.drop_silent()

    # ---------------------------------------------------------------------------------------------------- following

    async def _seek(self) -> None:
        """Find the leader, or become it."""
        self.lets_join = False
        self.door.forget_names()
        is_first = True
        for address in self.before_me():
            answer = await self._call(address)
            if answer.kind == "welcome" or self.leads or self.over is not None:
                return
            is_first = is_first and answer.kind in ("refused", "silent")
        if is_first and (self.is_member or self.is_founder):
            self.leads = True
            return
        if self.is_patient():
            await asyncio.sleep(self.heartbeat / 2)
        else:
            self.over = self.unanswered()

    async def _call(self, address: str) -> agent_peers.CallAnswer:
        """Call another agent, and follow it if it leads."""
        answer = first = await self.door.call(address, "hello", **self.hello())
        for _ in range(3):  # an agent that does not lead may name the leader
            self.note_answer(address, answer)
            if answer.kind == "anew":
                self.become_new()
            elif answer.kind == "see" and answer.leader not in ("", address, self.own.address):
                address = answer.leader
            else:
                break
            answer = await self.door.call(address, "hello", **self.hello())
        if answer.kind == "welcome":
            assert answer.wire is not None
            if self.leader is not None:
                answer.wire.close()
                return answer
            self.resign()
            self.leader, self.leader_at, self.leader_agent = answer.wire, address, answer.agent
            self.spawn(self._hear_leader(answer.wire))
            return answer
        return first

    async def _hear_leader(self, wire: agent_peers.Wire) -> None:
        """Handle the leader's messages until the connection ends."""
        with suppress(*agent_peers.BROKEN):
            while wire is self.leader:
                message, data = await wire.receive()
                self._from_leader(message, data, wire)
        if wire is self.leader:
            self.lose_leader(f"host {self.leader_at} has broken off")
            await self._knock(self.leader_at)
        wire.close()

    def _from_leader(self, message: agent_peers.Message, data: bytes, wire: agent_peers.Wire) -> None:
        kind = message["type"]
        if kind in ("piece", "kept", "want"):
            self._snapshot(message, data, wire)
        elif kind == "stop" and message["generation"] == self.current.generation:
            self.told = str(message["words"])
        elif kind == "prepare":
            self.prepare = (
                agent_view.GenerationHosts.of(message["view"]),
                agent_peers.versions_of(message["have"]),
                int(message["seed"]),
            )
            self.snapshots.keep_only(self.prepare[1])
        elif kind == "begin":
            self.begin = message
        elif kind == "join":
            self.lets_join = True
        elif kind == "over":
            self.over = str(message["words"])
        elif kind == "leave":
            self.ended.add(self.leader_agent)
            self.lose_leader(f"host {self.leader_at} has left")

    async def _follow(self, leader: agent_peers.Wire) -> agent_view.Part | None:
        """Wait for the next generation; None if the leader is lost, or the job is over."""
        report = None if self.report is None else asdict(self.report)
        have = self.snapshots.versions
        leader.post("ended", report=report, generation=self.current.generation, have=have)
        ports: list[int] = []
        while leader is self.leader and self.over is None:
            if self.prepare is not None and self.prepare[1] == self.snapshots.versions and not ports:
                view, _, seed = self.prepare
                self.views = (*self.views, view)
                self.owned.set_seed(seed)
                ports = self.free_ports(view)
                leader.post("prepared", generation=view.generation, ports=ports)
            if self.begin is not None and self.prepare is not None:
                view, said = self.prepare[0], self.begin
                if said["generation"] == view.generation:
                    self.because = str(said["why"])
                    return self.commit(view, tuple(said["addresses"]))
            if self.prepare is not None and ports and self.prepare[0] is not self.views[-1]:
                ports = []  # the leader prepares another generation, because an agent was lost meanwhile
            await asyncio.sleep(_TICK)
        return None

    # ------------------------------------------------------------------------------------------------------ leading

    async def _answer(self, wire: agent_peers.Wire, message: agent_peers.Message) -> None:
        """Answer a caller; handle its messages if it follows this agent."""
        if message["type"] == "knock":
            wire.post("see", agent=self.own.agent, leader=self.leader_address)
            self.hear_of(str(message["leader"]), int(message["generation"]))
            await wire.drained()
            return
        if message["type"] != "hello":
            return
        seat = agent_view.Seat(**message["seat"])
        views = tuple(agent_view.GenerationHosts.of(view) for view in message["views"])
        kind = self.answer_to(seat, views)
        wire.post(kind, agent=self.own.agent, leader=self.leader_address)
        await wire.drained()
        if kind != "welcome":
            return
        peer = agent_peers.Peer(wire, seat, views, agent_peers.versions_of(message["have"]))
        known = self.peers.pop(seat.agent, None)
        if known is not None:
            known.wire.close()
        self.peers[seat.agent] = peer
        try:
            while self.peers.get(seat.agent) is peer:
                said, data = await wire.receive()
                self._from_member(peer, said, data)
        finally:
            if self.peers.get(seat.agent) is peer:
                self.lose(seat.agent, "has broken off")
            if self.leads and seat.agent not in self.ended:
                await self._knock(seat.address)

    def _from_member(self, peer: agent_peers.Peer, message: agent_peers.Message, data: bytes) -> None:
        kind = message["type"]
        if kind in ("piece", "kept", "want"):
            if kind == "kept":
                peer.have[str(message["name"])] = tuple(message["version"])
            self._snapshot(message, data, peer.wire)
        elif kind == "ended":
            peer.report = agent_view.HostReport(**message["report"]) if message["report"] is not None else None
            peer.generation, peer.have = message["generation"], agent_peers.versions_of(message["have"])
            peer.is_idle = True
        elif kind == "prepared":
            peer.prepared, peer.ports = int(message["generation"]), [int(port) for port in message["ports"]]
        elif kind == "request":
            self.ask_for_more()
        elif kind == "leave":
            self.ended.add(peer.seat.agent)
            self.lose(peer.seat.agent, "has left")

    async def _look_around(self) -> None:
        """While this agent leads: find other leaders, and tell absent agents that it leads."""
        while True:
            await asyncio.sleep(2 * self.heartbeat)
            for address in self.absent() if self.leads else ():
                if self.is_established():
                    await self._knock(address)
                elif (await self._call(address)).kind == "welcome":
                    break

    async def _verify(self) -> None:
        """Ask at once whether missing agents have ended, because an answer proves that only soon after the loss."""
        missing = self.absent() if self.leads or self.leader is None else []
        await asyncio.gather(*(asyncio.wait_for(self._knock(a), _SOON) for a in missing), return_exceptions=True)

    async def _knock(self, address: str) -> None:
        said = {"leader": self.own.address, "generation": self.current.generation}
        self.note_answer(address, await self.door.call(address, "knock", **said))

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _snapshot(self, message: agent_peers.Message, data: bytes, wire: agent_peers.Wire) -> None:
        """Handle a piece of a snapshot, the receipt of one, or a request for one."""
        kind, name = message["type"], str(message["name"])
        if kind == "piece" and self.snapshots.take(message, data):
            wire.post("kept", name=name, version=message["version"])
        elif kind == "want" and name in self.snapshots.versions:
            self.spawn(self.snapshots.send(wire, name))
        elif kind == "kept":
            self.copied[name] = tuple(message["version"])

    def _note_snapshots(self, memory: JobMemory | None) -> None:
        """Copy the snapshots of worker 0, if it runs on this host, to a second host."""
        if 0 not in self.current.ranks(self.own.agent):
            return
        for name, written in self.snapshots.changed(self.current.generation).items():
            self.copying[name] = written
            wire = self.second()
            if wire is not None and memory is not None:
                self.spawn(self.snapshots.send(wire, name))
        for name, written in list(self.copying.items()):
            if self.second() is None or self.copied.get(name) == self.snapshots.versions[name]:
                del self.copying[name]
                if memory is not None:
                    memory.note_copied(name, written)
