"""The part of a report that is measured: the typical step of all ranks, in columns as the predicted one has them."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.inspect.profile.chrome_trace import lane_of
from autograph_rewrite.inspect.profile.profile import Profile

MOST = 400
"""Rows of a table: the dearest nodes, the dearest exchanges."""


def report_part(profile: Profile) -> dict[str, Any]:
    """Return figures, and events with times in microseconds since the step began on the first rank to begin it."""
    names: dict[str, int] = {}
    lanes: dict[str, int] = {}
    kinds: dict[str, int] = {}
    rows: list[tuple[int, int, int, float, float]] = []
    begin = min(trace.steps[profile.typical].start for trace in profile.ranks)
    for trace in profile.ranks:
        step = trace.steps[profile.typical]
        for one in trace.ran:
            if one.end <= step.start or one.start >= step.end:
                continue
            source = trace.sources[one.source]
            name = source.exchange or f"{source.origin or source.node} ({source.op}{_made(source.made_by)})"
            kind = "exchange" if source.exchange else "compute" if source.origin else "other"
            start = (max(one.start, step.start) - begin) / 1e3
            length = (min(one.end, step.end) - max(one.start, step.start)) / 1e3
            lane = f"rank {trace.rank} {lane_of(source)}"
            rows.append(
                (
                    names.setdefault(name, len(names)),
                    lanes.setdefault(lane, len(lanes)),
                    kinds.setdefault(kind, len(kinds)),
                    round(start, 3),
                    round(length, 3),
                )
            )
    rows.sort(key=lambda row: row[3])
    figures = profile.figures()
    columns = zip(("name", "lane", "kind", "start", "seconds"), zip(*rows, strict=True), strict=False)
    return {
        **figures,
        "nodes": figures["nodes"][:MOST],
        "exchanges": figures["exchanges"][:MOST],
        "events": {
            **{key: list(values) for key, values in columns},
            "names": list(names),
            "lanes": list(lanes),
            "kinds": list(kinds),
        },
    }


def _made(by: str) -> str:
    return f", {by}" if by and by != "expand" else ""
