"""What many outcomes say: counts by outcome and kind, refusals by reason, and how two runs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fuzz.words import BAD, OUTCOMES

Outcome = dict[str, Any]


def summary(found: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{len(found)} programs: " + ", ".join(f"{n} {name}" for name, n in _counted(found).items())
    for key in ("kind", "mode"):
        yield ""
        yield f"{key:16}" + "".join(f"{name:>9}" for name in OUTCOMES)
        for value in sorted({one.get(key, "") for one in found}):
            counts = _counted([one for one in found if one.get(key, "") == value])
            yield f"{value or '?':16}" + "".join(f"{counts[name]:9}" for name in OUTCOMES)
    for name in (*BAD, "refused", "skipped"):
        yield from _by_reason(name, [one for one in found if one["outcome"] == name])


def _counted(found: Sequence[Outcome]) -> dict[str, int]:
    counts = Counter(one["outcome"] for one in found)
    return {name: counts[name] for name in OUTCOMES}


def _by_reason(name: str, found: Sequence[Outcome]) -> Iterator[str]:
    if not found:
        return
    yield ""
    yield f"{name}:"
    for reason, count in Counter(one["reason"] for one in found).most_common():
        seeds = [one["seed"] for one in found if one["reason"] == reason]
        yield f"{count:6}  {reason}   (seeds {', '.join(map(str, seeds[:5]))}{', ...' if len(seeds) > 5 else ''})"


def comparison(before: Sequence[Outcome], after: Sequence[Outcome]) -> Iterator[str]:
    """Yield what is bad in the later run, and what was a right result in the earlier one and is none now."""
    was = {one["seed"]: one for one in before}
    both = [one for one in after if one["seed"] in was]
    earlier = _counted([was[one["seed"]] for one in both])
    yield f"{len(both)} programs in both runs"
    yield f"{'outcome':10}{'before':>9}{'after':>9}"
    for name, count in _counted(both).items():
        yield f"{name:10}{earlier[name]:9}{count:9}"
    for one in after:
        if one["outcome"] in BAD:
            yield f"{one['outcome']}: seed {one['seed']}: {one['reason']}"
    for one in both:
        if was[one["seed"]]["outcome"] == "equal" and one["outcome"] in ("refused", *BAD):
            yield f"was right: seed {one['seed']} is {one['outcome']}: {one['reason']}"
