"""What a host does of one generation: which workers it runs, and where all of them listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from autograph_rewrite.runtime.job.job_memory import JobMemory
from autograph_rewrite.tools.launcher.agents.view import Report

Ports = Callable[[int], list[int]]
"""Returns so many ports at which nobody listens."""


@dataclass(frozen=True)
class Part:
    """A host's part of a generation."""

    generation: int
    ranks: range
    """The numbers of its workers."""
    workers: tuple[str, ...]
    """The addresses of all workers, by rank."""
    servers: tuple[str, ...] = ()
    """The addresses of the parameter servers, which the first host runs."""
    serves: bool = True
    """Whether it is the first host."""
    lease: float = 0.0
    """For how many seconds its workers go on without news of other hosts; 0: there are none."""


class Group(Protocol):
    """The agents of a job, as one of them sees it."""

    why: str
    """Why the last generation ended."""

    def meet(self, report: Report | None, impatient: Callable[[], bool]) -> Part | None:
        """Form the next generation with the others; None: there is none.

        Args:
            report: how this host's part of the last one ended; None: there was none.
            impatient: whether to give up.
        """

    def look(self, memory: JobMemory) -> str | None:
        """While a generation runs: hear of the others; return why it is to end, if it is."""

    def request(self) -> None:
        """Ask for as many workers as there may be."""

    def leave(self) -> None:
        """Take part no more."""
