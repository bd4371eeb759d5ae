"""Lead a job: end a generation everywhere, see who is left, prepare the next one, begin it.

    stop ──► all have told how their parts ended ──► enough are here to decide ──► newest snapshots fetched
                                                                                        │
    begin ◄── all have ports, and the snapshots ◄── prepare: view, snapshots, seed ◄────┘

Whoever is lost on the way is left out of the next try. A view counts once all its hosts are prepared; who has prepared
one tells of it, so that nobody forms another without a majority of that one, too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from autograph_rewrite.tools.launcher.agents.part import Part
from autograph_rewrite.tools.launcher.agents.peers import Peer, joined
from autograph_rewrite.tools.launcher.agents.snapshots import Version
from autograph_rewrite.tools.launcher.agents.state import SETTLE, State
from autograph_rewrite.tools.launcher.agents.view import Losses, Report, Seat, View, following, losses, may_go_on

_TICK = 0.01


class Lead:
    """What an agent does while it leads.

    Args:
        state: what it knows.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    async def form(self) -> Part | None:
        """Form the next generation; None: this agent does not lead any more, or it is over."""
        state, stopped = self._state, set[str]()
        while state.leads and state.over is None:
            is_trouble = self._is_trouble()
            if not is_trouble and self._all_idle():
                self._end("")
            elif is_trouble and not self._all_idle():
                for agent, peer in state.peers.items():
                    if not peer.is_idle and agent not in stopped:
                        stopped.add(agent)
                        words = state.why or self._losses().words
                        peer.wire.post("stop", generation=state.current.generation, words=words)
            elif is_trouble:
                view = self._next()
                part = await self._prepared(view) if view is not None else None
                if part is not None:
                    return part
                if view is None and not state.is_patient():
                    self._end(self._too_few())
            await asyncio.sleep(_TICK)
        return None

    def _end(self, words: str) -> None:
        state = self._state
        for peer in state.peers.values():
            peer.wire.post("over", words=words)
        state.over = words

    def _too_few(self) -> str:
        state = self._state
        view = self._known()[0]
        here = sum(agent in state.present for agent in view.agents)
        if not view.generation:
            return f"too few workers came within {state.way.patience:g} s"
        if not all(may_go_on(known, state.present, state.ended) for known in self._known()):
            reached = f"only {here} of {len(view.seats)} hosts reach each other, and the others may have gone on"
            limit = state.way.limit
            return f"{self._losses().words}: {reached} without this one, which gives up after {limit}"
        return f"{self._losses().words or 'hosts are lost'}: too few workers are left"

    def _members(self) -> list[Peer | None]:
        """Return the peers of the last generation; None for each that is missing."""
        state = self._state
        return [state.peers.get(agent) for agent in state.current.agents if agent != state.own.agent]

    def _is_trouble(self) -> bool:
        """Whether the generation cannot end well any more, or there was none."""
        state = self._state
        if state.report is None or not state.report.ended_well:
            return True
        for peer in self._members():
            if peer is None or (peer.is_idle and not (peer.report is not None and peer.report.ended_well)):
                return True
        return False

    def _all_idle(self) -> bool:
        return all(peer.is_idle for peer in self._state.peers.values())

    def _known(self) -> list[View]:
        """Return the last generation that began, as far as those who are here know, and what was prepared since."""
        state = self._state
        begun = max([state.current, *(peer.views[0] for peer in state.peers.values() if peer.views)], key=_number)
        views = [*state.views, *(view for peer in state.peers.values() for view in peer.views)]
        return [begun, *(view for view in views if view.generation > begun.generation)]

    def _reports(self, generation: int) -> list[Report]:
        state = self._state
        found = [peer.report for peer in state.peers.values() if peer.generation == generation and peer.report]
        own = [state.report] if state.report is not None and state.current.generation == generation else []
        return [*own, *found]

    def _losses(self) -> Losses:
        """Return who is lost, besides hosts; where one of these is lost, its workers are what others failed for."""
        state, view = self._state, self._known()[0]
        missing = [seat for seat in view.seats if seat.agent not in state.present]
        found = losses(self._reports(view.generation))
        if missing:
            words = [state.lost.get(seat.agent, f"host {seat.address} is lost") for seat in missing]
            return replace(found if found.words and self._was_killed(view) else Losses(), words=", ".join(words))
        return found

    def _was_killed(self, view: View) -> bool:
        return any(report.was_killed for report in self._reports(view.generation))

    def _next(self) -> View | None:
        """Return the next view, once it can be told; None: not yet."""
        state = self._state
        base, *prepared = self._known()
        known = {seat.agent: seat for seat in base.seats}
        seats = [state.own, *(peer.seat for peer in state.peers.values())]
        seats.sort(key=lambda seat: (seat.agent != state.own.agent, _place(base, seat)))
        waited = time.monotonic() - state.trouble_since
        if not base.generation and sum(seat.places for seat in seats) < state.bounds.most and waited < state.way.wait:
            return None
        missing = [a for view in (base, *prepared) for a in view.agents if a not in state.present | state.ended]
        if missing and waited < SETTLE * state.heartbeat:
            return None
        if not all(may_go_on(view, state.present, state.ended) for view in (base, *prepared)):
            return None
        has_stepped = any(report.has_stepped for report in self._reports(base.generation))
        view = following(base, self._losses(), has_stepped, seats, state.bounds)
        if view is None:
            if base.generation and all(agent in state.present for agent in known):
                self._end(f"{self._losses().words}: too few workers are left")  # nobody is to be waited for
            return None
        state.why = self._losses().words
        newest = max(view.generation for view in (base, *prepared))
        return replace(view, generation=newest + 1)

    async def _prepared(self, view: View) -> Part | None:
        """Prepare and begin a generation; None if somebody is lost meanwhile."""
        state = self._state
        state.views = (*state.views, view)
        if not await self._fetched(view):
            return None
        have = dict(state.snapshots.versions)
        members = [state.peers[agent] for agent in view.agents if agent in state.peers]
        for peer in members:
            peer.wire.post("prepare", view=view.data(), have=have, seed=state.owned.seed)
            for name in [name for name, version in have.items() if peer.have.get(name) != version]:
                state.spawn(state.snapshots.send(peer.wire, name))
        while any(peer.prepared != view.generation for peer in members):
            if not self._are_here(view):
                return None
            await asyncio.sleep(_TICK)
        if not self._are_here(view):
            return None
        return self._begun(view, {**{p.seat.agent: p.ports for p in members}, state.own.agent: state.free_ports(view)})

    def _begun(self, view: View, ports: dict[str, list[int]]) -> Part:
        state = self._state
        workers: list[str] = []
        servers: list[str] = []
        for seat in view.seats:
            addresses = joined(seat.address.rpartition(":")[0].strip("[]"), ports[seat.agent])
            workers += addresses[: seat.workers]
            servers += addresses[seat.workers :]
        said: dict[str, Any] = {"generation": view.generation, "workers": workers, "servers": servers, "why": state.why}
        for agent in view.agents:
            if agent in state.peers:
                peer = state.peers[agent]
                peer.wire.post("begin", **said)
                peer.is_idle, peer.views, peer.report = False, (view,), None
        return state.commit(view, tuple(workers), tuple(servers))

    async def _fetched(self, view: View) -> bool:
        """Fetch the newest snapshots that somebody has; tell whether all are still here."""
        state = self._state
        newest: dict[str, Version] = dict(state.snapshots.versions)
        for peer in state.peers.values():
            for name, version in peer.have.items():
                if version > newest.get(name, (0, 0)):
                    newest[name] = version
                    peer.wire.post("want", name=name)
        while any(state.snapshots.versions.get(name, (0, 0)) < version for name, version in newest.items()):
            if not self._are_here(view):
                return False
            await asyncio.sleep(_TICK)
        return self._are_here(view)

    def _are_here(self, view: View) -> bool:
        return self._state.leads and all(agent in self._state.present for agent in view.agents)


def _number(view: View) -> int:
    return view.generation


def _place(view: View, seat: Seat) -> int:
    """Return the place of a host in a view; new ones come last."""
    return view.agents.index(seat.agent) if seat.agent in view.agents else len(view.seats)
