"""What differs between two outcomes of a case, in words, and the first line of a text in which it shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.oracle.rewrites import Case, Outcome, Texts

WIDTH = 400
"""Characters of a line that are shown."""


@dataclass(frozen=True)
class Place:
    """Where two rewrites first differ: the pass, or the text, and the lines there."""

    where: str
    old: str
    new: str

    def __str__(self) -> str:
        """Three lines at most."""
        shown = [f"      {mark} {text[:WIDTH]}" for mark, text in (("-", self.old), ("+", self.new)) if text]
        return "\n".join([f"    {self.where}:", *shown])


def kinds(old: Outcome, new: Outcome) -> list[str]:
    """What differs: each thing in a few words, nothing where all is equal."""
    if old.refusal != new.refusal:
        was = f"was refused ({old.refusal})" if old.refusal else "was not refused"
        return [f"{was}, now {f'is refused ({new.refusal})' if new.refusal else 'is not'}"]
    found = [
        _kind("graph", old.graph == new.graph, old.structure == new.structure),
        _kind("plan", old.plan == new.plan, old.wording == new.wording),
        _pass(old.forms, new.forms),
    ]
    return [one for one in found if one]


def only_names(old: Outcome, new: Outcome) -> bool:
    """Whether nothing differs but names of nodes that passes have added."""
    is_alike = (old.refusal, old.structure, old.wording) == (new.refusal, new.structure, new.wording)
    # Of a graph that is the same to the byte, only placements can differ in print.
    return is_alike and (old.graph, old.plan) != (new.graph, new.plan)


def _kind(what: str, is_equal: bool, is_equal_modulo_names: bool) -> str:
    if is_equal:
        return ""
    return (
        f"{what} differs exactly, equal modulo names" if is_equal_modulo_names else f"{what} differs also modulo names"
    )


def _pass(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> str:
    now = dict(new)
    differing = [name for name, digest in old if name in now and now[name] != digest]
    if differing:
        return f"printed form differs after {differing[0]}"
    # Passes that are divided, joined or renamed are no difference: what they leave is compared after the next one.
    return ""


def first_place(old: Texts, new: Texts) -> Place | None:
    """The first pass, in the old order, after which both have another form; else the plan, or the encoded graph."""
    now = dict(new.forms)
    for name, text in old.forms:
        if name in now and now[name] != text:
            return Place(f"after {name}", *first_node(text, now[name]))
    for name, before, after in (("plan", old.plan, new.plan), ("encoded graph", old.encoded, new.encoded)):
        if before != after:
            return Place(name, *first_line(before, after))
    return None


def first_node(old: str, new: str) -> tuple[str, str]:
    """The first line of a node that differs, before and after; where nodes only change places, the first one.

    An empty line stands for a node that was only put in, or only left out.
    """
    before, after = old.splitlines(), new.splitlines()
    kept = set(before) & set(after)
    gone = {_name(line): (at, line) for at, line in enumerate(before) if line not in kept}
    come = {_name(line): (at, line) for at, line in enumerate(after) if line not in kept}
    if not gone and not come:
        return first_line(old, new)
    none = (len(before) + len(after), "")
    was, now = next(iter(gone.items()), ("", none)), next(iter(come.items()), ("", none))
    is_renamed = was[1][0] == now[1][0] and was[0] not in come and now[0] not in gone
    if is_renamed:
        return was[1][1], now[1][1]
    if (now[1][0], now[0] in gone) < (was[1][0], was[0] in come):
        return gone.get(now[0], none)[1], now[1][1]
    return was[1][1], come.get(was[0], none)[1]


def _name(line: str) -> str:
    return line.partition(" =")[0].partition(":")[0]


def first_line(old: str, new: str) -> tuple[str, str]:
    """The first lines that differ; an empty one stands for a line that was only put in, or only left out."""
    before, after = old.splitlines(), new.splitlines()
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    was, now = (lines[at] if at < len(lines) else "" for lines in (before, after))
    is_put_in, is_left_out = was in after[at:] and now not in before, now in before[at:] and was not in after
    return "" if is_put_in else was, "" if is_left_out else now


def by_turns(cases: Iterable[Case]) -> list[Case]:
    """The cases with one of each item first, then another one of each: the first few show as much as they can."""
    seen: dict[str, int] = {}
    turns: list[tuple[int, Case]] = []
    for case in cases:
        seen[case.item] = seen.get(case.item, 0) + 1
        turns.append((seen[case.item], case))
    return [case for _, case in sorted(turns, key=lambda pair: (pair[0], str(pair[1])))]


def counts(outcomes: Iterable[Outcome]) -> str:
    """How much was compared."""
    found = list(outcomes)
    refused = sum(bool(one.refusal) for one in found)
    forms = sum(len(one.forms) for one in found)
    printed = sum(bool(one.forms) for one in found)
    graphs = len(found) - refused
    return f"{graphs:,} graphs, {graphs:,} plans, {forms:,} printed forms of {printed} rewrites, {refused} refusals"


def report(
    old: Mapping[Case, Outcome], new: Mapping[Case, Outcome], places: Mapping[Case, Place | None]
) -> Iterator[str]:
    """A line for each case that differs, and where it shows, as far as that is known."""
    for case in sorted(new, key=str):
        said = kinds(old[case], new[case])
        if not said:
            continue
        yield f"{case}: {'; '.join(said)}"
        if case in places:
            yield str(places[case] or "    no text of it differs")
