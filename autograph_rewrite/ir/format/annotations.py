"""Annotations of values: what the printed form and archives keep beside a graph, and its syntax.

    %dw: float32[3,4] @ partial(sum) -> replicated each

Behind `@` stands what the value is where it is produced: here, each replica makes a contribution. Behind the arrow
stands what its readers are given: the sum. The last word says how often its node stands in an expanded graph.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.mesh import WORDS, Span, word
from autograph_rewrite.ir.types.placement import ANY, LOCAL, REPLICATED, UNKNOWN, Placement, split

PLAIN = {placement.kind: placement for placement in (REPLICATED, LOCAL, ANY, UNKNOWN)}
KINDS = ("replicated", "split(0)", "partial(sum)", "local", "any", "unknown")
COMBINED_BY = ("sum", "max", "min", "prod", "all", "any", "own")
SPANS = {name: span for span, name in WORDS.items()}

_PLACEMENT = re.compile(r"\s*(?P<kind>[^\s(),=>-]+)(?:\s*\((?P<inner>[^()]*)\))?")
_ARROW = re.compile(r"\s*->")
_WORD = re.compile(r"\s*(?P<word>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Annotation:
    """What is stated of one value.

    Attributes:
        placement: where it is produced.
        readers: what its readers are given, where it is converted once for all of them.
        span: how often its node stands in the expanded graph, of which this is an instance; None in a folded graph,
            whose nodes say so themselves.
        where: the line that states it.
    """

    placement: Placement
    readers: Placement | None = None
    span: Span | None = None
    where: str = field(default="", compare=False)

    def __str__(self) -> str:
        converted = f" -> {self.readers!r}" if self.readers is not None else ""
        return f"{self.placement!r}{converted}{f' {word(self.span)}' if self.span is not None else ''}"

    @property
    def is_plain(self) -> bool:
        """Whether it says no more than that every replica has the value."""
        return self.placement == REPLICATED and self.readers is None


@cache
def annotation(placement: Placement, seen: Placement, span: Span | None = None) -> Annotation:
    """Return what is stated of a value that propagation has reached; equal ones are one object.

    Args:
        placement: where it is produced.
        seen: what its readers see.
    """
    return Annotation(placement, None if seen == placement else seen, span)


Annotations = Mapping[str, Annotation]
"""By the names of values."""


class MisreadError(GraphError):
    """A word of an annotation that says nothing.

    Args:
        problem: what is wrong with it.
        at: where it stands in what was read.
        hint: what may stand there.
    """

    def __init__(self, problem: str, at: int, hint: str) -> None:
        super().__init__(problem, hint=hint)
        self.at = at


def read_annotation(text: str, at: int = 0) -> tuple[Annotation, int]:
    """Return the annotation that begins at a position, and the position behind it.

    Args:
        text: a line, or what stands behind an `@`.

    Raises:
        MisreadError: an unknown word, or none.
    """
    placement, at = _placement(text, at)
    readers, span = None, None
    if arrow := _ARROW.match(text, at):
        readers, at = _placement(text, arrow.end())
    if found := _WORD.match(text, at):
        span = SPANS.get(found["word"])
        if span is None:
            problem = f"'{found['word']}' says no number of instances"
            raise MisreadError(problem, found.start("word"), _suggestion(found["word"], tuple(SPANS)))
        at = found.end()
    return Annotation(placement, readers, span), at


@cache
def placement_of(text: str) -> Placement:
    """Return the placement that a text is.

    Args:
        text: as the printed form has it, `split(0)`.

    Raises:
        MisreadError: it is none.
    """
    return _placement(text, 0)[0]


def _placement(text: str, at: int) -> tuple[Placement, int]:
    found = _PLACEMENT.match(text, at)
    if found is None:
        here = len(text) - len(text[at:].lstrip())
        raise MisreadError("a placement is missing here", here, f"write one of: {', '.join(KINDS)}")
    kind, inner = found["kind"], found["inner"]
    if kind in PLAIN and inner is None:
        return PLAIN[kind], found.end()
    if kind == "split" and inner is not None:
        if not re.fullmatch(r"\s*\d+\s*", inner):
            raise MisreadError(f"'{inner}' is no dimension", found.start("inner"), "count dimensions from 0: split(0)")
        return split(int(inner)), found.end()
    if kind == "partial" and inner is not None:
        if inner.strip() not in COMBINED_BY:
            hint = _suggestion(inner.strip(), COMBINED_BY)
            raise MisreadError(f"'{inner}' combines no contributions", found.start("inner"), hint)
        return Placement("partial", op=inner.strip()), found.end()
    raise MisreadError(f"'{found.group().strip()}' is no placement", found.start("kind"), _suggestion(kind, KINDS))


def _suggestion(word: str, known: Sequence[str]) -> str:
    by_name = {name.partition("(")[0]: name for name in known}
    close = difflib.get_close_matches(word.lower(), by_name, n=1)
    return f"did you mean '{by_name[close[0]]}'?" if close else f"write one of: {', '.join(known)}"
