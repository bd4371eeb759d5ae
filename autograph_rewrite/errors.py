"""Define the exception hierarchy: every error that a user can meet.

    RewriteError
    ├── ConfigError    the config file or dict is wrong (file:line, closest valid key)
    ├── PlanError      the plan does not fit the graph or the devices
    ├── GraphError     the graph cannot be read, or cannot be rewritten soundly
    ├── PassError      a pass met something that it refuses
    ├── VerifyError    an invariant is broken, or the numbers differ
    ├── ClusterError   devices or processes are missing, or do not answer
    └── CheckpointError  a checkpoint is damaged, or could not be written

    Preempted          no error: a signal ends the process between two steps

Each message says what is wrong, where (file:line, or the node with its op) and what to do.
"""

from __future__ import annotations

import re
from typing import Protocol

LONGEST = 1000
"""The most letters of one word in a message: a name from a damaged file may have millions."""
_LONG = re.compile(rf"\S{{{LONGEST + 1},}}")


class _NamedNode(Protocol):
    """The name and op of a graph node."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...


class RewriteError(Exception):
    """Base of all errors of this package.

    Args:
        problem: what is wrong, in one sentence.
        node: the graph node that is wrong, if any.
        where: a place in a file (`file:line`) or a name, if any.
        hint: what the user can do.
    """

    def __init__(
        self,
        problem: str,
        *,
        node: _NamedNode | None = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.node_name = node.name if node is not None else None
        self.node_op = node.op if node is not None else None
        self.where = where
        self.hint = hint
        super().__init__(self._render())

    def change_hint(self, hint: str | None) -> None:
        """Replace the hint."""
        self.hint = hint
        self.args = (self._render(),)

    def change_where(self, where: str | None) -> None:
        """Replace the place."""
        self.where = where
        self.args = (self._render(),)

    def _render(self) -> str:
        lines = [self.problem]
        if self.where is not None:
            lines.append(f"  at   {self.where}")
        if self.node_name is not None:
            lines.append(f"  node '{self.node_name}' (op {self.node_op})")
        if self.hint is not None:
            lines.append(f"  hint {self.hint}")
        return _LONG.sub(lambda word: f"{word[0][:LONGEST]}...", "\n".join(lines))


def add_note(error: Exception, note: str) -> None:
    """Add a line below an error's traceback, from Python 3.11 on."""
    if hasattr(error, "add_note"):
        error.add_note(note)


class ConfigError(RewriteError):
    """The configuration is wrong: an unknown key, a wrong type or an impossible combination."""


class PlanError(RewriteError):
    """The plan does not fit the graph, or its devices do not exist."""


class GraphError(RewriteError):
    """The graph cannot be read, is malformed, or cannot be distributed soundly."""


class PassError(RewriteError):
    """A pass met something that it refuses to rewrite."""


class VerifyError(RewriteError):
    """An invariant of the rewritten graph is broken, or its numbers differ from one device."""


class ClusterError(RewriteError):
    """Devices or processes are missing, misconfigured, or do not answer in time.

    Attributes:
        lost: the numbers of the workers that did not answer.
        differs: all workers answered but do different things, so the program has to be changed.
    """

    lost: tuple[int, ...] = ()
    differs: bool = False

    @classmethod
    def of_difference(cls, problem: str, *, hint: str | None = None) -> ClusterError:
        """Return the error of workers that do different things."""
        made = cls(problem, hint=hint)
        made.differs = True
        return made


class CheckpointError(RewriteError):
    """A checkpoint is damaged, or could not be written."""


class Preempted(SystemExit):
    """A signal (SIGTERM, SIGHUP) ended the process after all workers had finished the same step and saved.

    It is raised in place of the next step. It is no `Exception`, so `finally` runs and the program ends with the exit
    code of the signal, 143 for SIGTERM, after which a launcher can start it again. Ctrl-C raises `KeyboardInterrupt`.
    """
