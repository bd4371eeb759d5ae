"""Reads and writes annotations: placements and spans of values, which the printed form and archives add to a graph.

    %dw: float32[3,4] @ partial(sum) -> replicated each
    %h: float32[?,8] @ {replica: split(0), model: split(1)} {model, replica}

After `@` is the placement where the value is produced: here, each replica holds a contribution. After the arrow is the
placement that its readers get: the sum. The last word is the span of its node.
A bare placement is along the batch's axis; braces name the axis of each. An axis that is not named is replicated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.mesh import AXES, REPLICA, WORDS, Span, is_axis, word
from autograph_rewrite.ir.types.placement import ANY, LOCAL, REPLICATED, UNKNOWN, Placement, split

PLAIN = {placement.kind: placement for placement in (REPLICATED, LOCAL, ANY, UNKNOWN)}
KINDS = ("replicated", "split(0)", "partial(sum)", "local", "any", "unknown")
COMBINED_BY = ("sum", "max", "min", "prod", "all", "any", "own")
SPANS = {name: span for span, name in WORDS.items()}

_PLACEMENT = re.compile(r"\s*(?P<kind>[^\s(),=>{}:-]+)(?:\s*\((?P<inner>[^()]*)\))?")
_ARROW = re.compile(r"\s*->")
_WORD = re.compile(r"\s*(?P<word>[A-Za-z_]\w*)")
_MARK = re.compile(r"\s*(?P<mark>[{}:,])")
SPAN_OF_AXES = re.compile(r"\s*\{(?P<axes>\s*[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*){0,63}\s*)\}")
"""A span whose axes are named; attributes, which also have braces, have an equals sign."""

Others = tuple[tuple[str, Placement], ...]
"""Placements along axes other than the batch's; replicated axes are left out."""


@dataclass(frozen=True)
class Annotation:
    """The stated placements of one value.

    Attributes:
        placement: where the value is produced, along the batch's axis.
        readers: the placement that its readers get along that axis, where one conversion supplies them all.
        span: of its node, for an instance in an expanded graph; None in a folded graph, whose nodes have a span.
        where: the line that states it.
        others: where it is produced, along other axes.
        readers_others: the placements that its readers get along these, where it is converted.
    """

    placement: Placement
    readers: Placement | None = None
    span: Span | None = None
    where: str = field(default="", compare=False)
    others: Others = ()
    readers_others: Others = ()

    def __str__(self) -> str:
        converted = ""
        if self.readers is not None:
            converted = f" -> {placements_text(self.readers, self.readers_others)}"
        often = f" {word(self.span)}" if self.span is not None else ""
        return f"{placements_text(self.placement, self.others)}{converted}{often}"

    @property
    def is_plain(self) -> bool:
        """Whether it says only that every replica has the value."""
        return self.placement == REPLICATED and not self.others and self.readers is None


def placements_text(placement: Placement, others: Others = ()) -> str:
    """Return how the printed form states placements: bare where the batch's axis is the only one."""
    if not others:
        return repr(placement)
    named = others if placement == REPLICATED else ((REPLICA, placement), *others)
    return f"{{{', '.join(f'{axis}: {one!r}' for axis, one in named)}}}"


@cache
def annotation(
    placement: Placement, seen: Placement, span: Span | None = None, others: Others = (), seen_others: Others = ()
) -> Annotation:
    """Return the annotation of a value that propagation has reached; equal annotations are one object."""
    if (seen, seen_others) == (placement, others):
        return Annotation(placement, None, span, others=others)
    return Annotation(placement, seen, span, others=others, readers_others=seen_others)


Annotations = Mapping[str, Annotation]
"""By the names of values."""


class MisreadError(GraphError):
    """A word of an annotation that cannot be read.

    Args:
        at: its position in the text.
    """

    def __init__(self, problem: str, at: int, hint: str) -> None:
        super().__init__(problem, hint=hint)
        self.at = at


def read_annotation(text: str, at: int = 0) -> tuple[Annotation, int]:
    """Return the annotation that begins at a position, and the position after it.

    Args:
        text: a line, or the part of it after an `@`.

    Raises:
        MisreadError: a word is unknown or missing.
    """
    placement, others, at = _placements(text, at)
    readers, span, readers_others = None, None, Others()
    if arrow := _ARROW.match(text, at):
        readers, readers_others, at = _placements(text, arrow.end())
    if named := SPAN_OF_AXES.match(text, at):
        span, at = span_of(named), named.end()
    elif found := _WORD.match(text, at):
        span = SPANS.get(found["word"])
        if span is None:
            problem = f"'{found['word']}' says no number of instances"
            raise MisreadError(problem, found.start("word"), _suggestion(found["word"], tuple(SPANS)))
        at = found.end()
    return Annotation(placement, readers, span, others=others, readers_others=readers_others), at


def span_of(found: re.Match[str]) -> Span:
    """Return the span that a match of `SPAN_OF_AXES` names.

    Raises:
        MisreadError: an axis is unknown.
    """
    axes, start = set(), found.start("axes")
    for written in found["axes"].split(","):
        axes.add(_axis(written.strip(), start + len(written) - len(written.lstrip())))
        start += len(written) + 1
    return frozenset(axes)


def placements_of(text: str) -> dict[str, Placement]:
    """Read placements, by axis; replicated axes are left out.

    Args:
        text: `split(0)`, or `{replica: split(0), model: split(1)}`.

    Raises:
        MisreadError: the text states no placements.
    """
    placement, others, at = _placements(text, 0)
    if text[at:].strip():
        raise MisreadError(f"'{text[at:].strip()}' is not understood after placements", at, "write one for each axis")
    return ({} if placement == REPLICATED else {REPLICA: placement}) | dict(others)


@cache
def placement_of(text: str) -> Placement:
    """Read one placement.

    Args:
        text: as the printed form spells it, `split(0)`.

    Raises:
        MisreadError: the text is no placement.
    """
    return _placement(text, 0)[0]


def _placements(text: str, at: int) -> tuple[Placement, Others, int]:
    """Return the placement along the batch's axis, those along others, and the position after them."""
    if not (mark := _MARK.match(text, at)) or mark["mark"] != "{":
        placement, at = _placement(text, at)
        return placement, (), at
    found: dict[str, Placement] = {}
    while not found or mark["mark"] == ",":
        name = _WORD.match(text, mark.end())
        if name is None:
            raise MisreadError("an axis is missing here", mark.end(), f"write one of: {', '.join(AXES)}")
        axis = _axis(name["word"], name.start("word"))
        if axis in found:
            raise MisreadError(f"the axis '{axis}' is named twice", name.start("word"), "give it one placement")
        mark = _next_mark(text, name.end(), ":")
        found[axis], at = _placement(text, mark.end())
        mark = _next_mark(text, at, ",}")
    others = tuple((axis, one) for axis, one in found.items() if axis != REPLICA and one != REPLICATED)
    return found.get(REPLICA, REPLICATED), others, mark.end()


def _next_mark(text: str, at: int, wanted: str) -> re.Match[str]:
    mark = _MARK.match(text, at)
    if mark is None or mark["mark"] not in wanted:
        here = len(text) - len(text[at:].lstrip())
        raise MisreadError(
            f"'{' or '.join(wanted)}' is missing here", here, "write {replica: split(0), model: split(1)}"
        )
    return mark


def _axis(name: str, at: int) -> str:
    if not is_axis(name):
        raise MisreadError(f"'{name}' is no axis of a mesh", at, _suggestion(name, AXES))
    return name


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
