"""A job on one host: its launcher decides by itself who goes on."""

from __future__ import annotations

from collections.abc import Callable

from autograph_rewrite.cluster.launchers import LOOPBACK
from autograph_rewrite.runtime.elastic.job_memory import JobMemory
from autograph_rewrite.tools.launcher.agents.part import Part, Ports
from autograph_rewrite.tools.launcher.agents.view import (
    Bounds,
    Report,
    Seat,
    View,
    asked_for_more,
    can_join,
    following,
    losses,
)


class Alone:
    """The only agent of a job.

    Args:
        bounds: how many workers there may be.
        restarts: how many of them may be restarted.
        servers: how many parameter servers there are.
        ports: finds free ones.
    """

    def __init__(self, bounds: Bounds, restarts: int, servers: int, ports: Ports) -> None:
        self._bounds, self._servers, self._ports = bounds, servers, ports
        self._seat = Seat("", LOOPBACK, bounds.most)
        self._view = View(restarts=restarts)
        self.why = ""

    def meet(self, report: Report | None, impatient: Callable[[], bool]) -> Part | None:
        """Decide how many go on."""
        self.why = ""
        if report is not None and not report.words:
            return None
        lost = losses([report] if report is not None else [])
        self.why = lost.words
        has_stepped = report is not None and report.has_stepped
        view = following(self._view, lost, has_stepped, [self._seat], self._bounds)
        if view is None:
            return None
        self._view = view
        addresses = [f"{LOOPBACK}:{port}" for port in self._ports(view.workers + self._servers)]
        return Part(
            view.generation, range(view.workers), tuple(addresses[: view.workers]), tuple(addresses[view.workers :])
        )

    def look(self, memory: JobMemory) -> str | None:
        """Let workers join if there are any."""
        if not memory.lets_join and can_join(self._view, (), self._bounds):
            memory.let_join()
        return None

    def request(self) -> None:
        """Let all join that were lost."""
        self._view = asked_for_more(self._view)

    def leave(self) -> None:
        """Do nothing: nobody else is there."""
