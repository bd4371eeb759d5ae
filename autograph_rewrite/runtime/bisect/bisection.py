"""Bisection: what a search for the first wrong pass and edge has found, as text and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.notebook import NotebookView
from autograph_rewrite.runtime.bisect.edges import Divergence, Edge

AGREES, DIFFERS = "agrees", "differs"
SHOWN = 5


@dataclass(frozen=True, repr=False)
class Bisection(NotebookView):
    """The result. `ok` says that nothing fails, `str()` shows the rest, `data()` is for programs.

    Attributes:
        ok: whether `verify` passes, so that there is nothing to find.
        verdict: what `verify` says, in a line.
        made_by: the first pass after which it fails; empty where that is not known.
        shown_by: how that is known, in a sentence.
        problem: what the certificate or a verifier of invariants refuses; empty where neither does.
        states: passes after which one device has run the graph, with `agrees` or `differs`.
        divergences: where values begin to differ, in the order of the step.
        notes: what was not looked at.
    """

    ok: bool
    verdict: str
    made_by: str = ""
    shown_by: str = ""
    problem: str = ""
    states: tuple[tuple[str, str], ...] = ()
    divergences: tuple[Divergence, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.verdict
        if not self.ok:
            yield f"first pass: {self.made_by or '(not known)'}{f' ({self.shown_by})' if self.shown_by else ''}"
        if self.states:
            yield "on one device: " + ", ".join(f"{verdict} after {name}" for name, verdict in self.states)
        if self.problem:
            yield f"refused: {self.problem}"
        for at, one in enumerate(self.divergences[:SHOWN]):
            yield from _described("first value" if not at else "and", one)
        if len(self.divergences) > SHOWN:
            yield f"... and {len(self.divergences) - SHOWN} more"
        yield from (f"note: {note}" for note in self.notes)

    def data(self) -> dict[str, Any]:
        """Return it as plain data; an infinite error is the string "inf"."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "pass": self.made_by,
            "shown_by": self.shown_by,
            "problem": self.problem,
            "states": [{"behind": name, "verdict": verdict} for name, verdict in self.states],
            "divergences": [one.data() for one in self.divergences],
            "notes": list(self.notes),
        }


def _described(head: str, one: Divergence) -> Iterator[str]:
    what = "its variable differs" if one.error is None else f"error {one.error:.1e}"
    at = f", {one.where}" if one.where else ""
    yield f"{head}: '{one.node}' ({one.op}), step {one.step}, {what}{at}"
    if not one.line:
        yield "  the rewritten graph has no node in its place that can be looked at"
        return
    yield f"  {_line(one.line, one.made_by)}"
    for edge in one.edges:
        yield from _of_edge(edge)
    if one.agree and not one.edges:
        yield "  everything that it reads agrees: it is the node itself, or the order of accesses to its variable"
    elif one.agree:
        yield f"  what agrees: {', '.join(one.agree)}"


def _of_edge(edge: Edge) -> Iterator[str]:
    yield f"  edge: operand {edge.operand} reads {', '.join(edge.reads)}, which is not {edge.expected}"
    yield f"    {_line(edge.producer, edge.made_by)}"
    yield from (f"    plan: {text}" for text in edge.plan)


def _line(printed: str, made_by: str) -> str:
    """Return a printed node with the pass that made it; of a copy, the one that made what it is a copy of."""
    return f"{printed}   made by {made_by}" if made_by and f"# {made_by}" not in printed else printed
