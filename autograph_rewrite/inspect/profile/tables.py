"""A profile as tables: predicted beside measured by device, the dearest original nodes, the exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autograph_rewrite.diagnostics.amounts import duration, several
from autograph_rewrite.inspect.profile.device_time import NANO
from autograph_rewrite.inspect.profile.rank_trace import RankTrace, Source
from autograph_rewrite.inspect.render.table import drawn, table

if TYPE_CHECKING:
    from autograph_rewrite.inspect.profile.profile import Profile

SHOWN = 15
_UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (0.0, "FLOP/s"))


def device_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return compute, communication and idle seconds of each device, with what was predicted."""
    foretold = [_foretold(profile, index) for index in range(len(profile.devices))]
    return [{**vars(one), "predicted": said} for one, said in zip(profile.devices, foretold, strict=True)]


def _foretold(profile: Profile, index: int) -> dict[str, float] | None:
    """Return what was predicted for a device: by its place within its rank, as ranks do the same."""
    step = profile.predicted
    if step is None:
        return None
    own = [one for one in profile.devices if one.rank == profile.devices[index].rank]
    place = own.index(profile.devices[index])
    lanes = [one for one in step["devices"] if one["busy_seconds"]] or step["devices"]
    if not lanes:
        return None
    busy = lanes[min(place, len(lanes) - 1)]["busy_seconds"]
    idle = max(0.0, step["step_seconds"] - busy - step["exposed_seconds"])
    return {"compute": busy, "communication": step["exposed_seconds"], "idle": idle}


def node_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return what original nodes took, the dearest first: of the typical step, over all devices of all ranks."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for source, seconds in _spent(profile):
        if not source.exchange and source.origin:
            one = found.setdefault((source.origin, source.op, source.made_by), [0.0, 0])
            one[0] += seconds
            one[1] += 1
    ordered = sorted(found.items(), key=lambda item: -item[1][0])
    return [
        {"node": node, "op": op, "pass": made_by, "seconds": seconds, "runs": int(count)}
        for (node, op, made_by), (seconds, count) in ordered
    ]


def exchange_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return what exchanges took, the dearest first: seconds of one member in the typical step, and its members."""
    found: dict[tuple[str, str], list[float]] = {}
    members: dict[tuple[str, str], set[tuple[int, str]]] = {}
    for trace in profile.ranks:
        for source, seconds in _spent_by(trace, profile.typical):
            if source.exchange:
                found.setdefault((source.exchange, source.origin), []).append(seconds)
                members.setdefault((source.exchange, source.origin), set()).add((trace.rank, source.device))
    return sorted(
        (
            {
                "exchange": name,
                "node": origin,
                "seconds": sum(seconds) / len(seconds),
                "longest": max(seconds),
                "members": len(members[name, origin]),
            }
            for (name, origin), seconds in found.items()
        ),
        key=lambda row: -row["seconds"],
    )


def _spent(profile: Profile) -> Iterator[tuple[Source, float]]:
    for trace in profile.ranks:
        yield from _spent_by(trace, profile.typical)


def _spent_by(trace: RankTrace, number: int) -> Iterator[tuple[Source, float]]:
    step = trace.steps[number]
    for one in trace.ran:
        if step.start <= one.start <= step.end:
            yield trace.sources[one.source], (one.end - one.start) * NANO


def text(profile: Profile) -> str:
    """Return figures and tables."""
    part, predicted = profile.attributed, profile.predicted
    steps = several(len(profile.ranks[0].steps), "step")
    foretold = f" (predicted: {duration(predicted['step_seconds'])})" if predicted else ""
    said = [f"{steps} on {several(len(profile.ranks), 'rank')}: {duration(profile.step_seconds)} each{foretold}"]
    if profile.examples:
        said.append(f"{profile.examples_per_second:,.0f} examples/s")
    if profile.flops_per_second:
        unit, name = next(one for one in _UNITS if profile.flops_per_second >= one[0])
        said.append(f"{profile.flops_per_second / (unit or 1):.2f} {name}")
    lines = [
        ", ".join(said),
        f"{part.share:.1%} of the time is that of original nodes ({part.nodes:.1%}) or of named communication alone "
        f"({part.communication:.1%}); {part.other:.1%} runs outside of the graph, in {part.outside:.1%} nothing runs",
        "",
    ]
    devices = []
    for row in device_rows(profile):
        also = row["predicted"] or {}
        cells = [_time(row[key]) if which == 0 else _time(also.get(key)) for key in _TIMES for which in (0, 1)]
        devices.append((row["rank"], row["device"], *cells))
    nodes = [
        (row["node"], row["op"], row["pass"], row["runs"], _time(row["seconds"])) for row in node_rows(profile)[:SHOWN]
    ]
    exchanges = [
        (row["exchange"], row["members"], _time(row["seconds"]), _time(row["longest"]))
        for row in exchange_rows(profile)[:SHOWN]
    ]
    columns = ("rank", "device", *(f"#{key}{also}" for key in _TIMES for also in ("", ", predicted")))
    shown = [
        table("the typical step", columns, devices),
        table("original nodes", ("node", "kernel", "made by", "#runs", "#time"), nodes),
        table("communication", ("exchange", "#members", "#time", "#longest"), exchanges),
    ]
    clocks = [
        f"clock of rank {one.rank}: {duration(one.value * NANO)}, known to {duration(one.error * NANO)}"
        for one in profile.offsets
        if not one.is_same and one.error is not None
    ]
    return "\n".join([*lines, drawn(*shown).rstrip(), *clocks, *(f"note: {note}" for note in profile.notes)]) + "\n"


_TIMES = ("compute", "communication", "idle")


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
