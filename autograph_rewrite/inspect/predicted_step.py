"""A predicted step as text: where its time goes, by levers and layers, and how its memory grows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from autograph_rewrite.cost.tasks.layers import COLUMNS, cells
from autograph_rewrite.cost.tasks.result import DeviceUse, Simulation
from autograph_rewrite.inspect.table import drawn, fitted, table


def where_time_goes(found: Simulation, levers: Iterable[str]) -> str:
    """Return sentences and a table.

    Args:
        found: the step, with its nodes.
        levers: what it takes most of.
    """
    first = f"Where the time goes: {str(found).partition(chr(10))[0]} (predicted)."
    layers = found.layers()
    rows = drawn(table("dearest layers, with their gradients", COLUMNS, map(cells, layers))) if layers else ""
    return "\n".join((fitted("\n".join((first, *(f"  {text}" for text in levers)))), rows))


# Memory of each device over a step, with and without recomputation, as a picture and as plain data.
#
# to_svg({"before": ar.simulate(item, plan without remat), "after": ar.simulate(item, plan)})

WIDTH, HEIGHT, TEXT = 560, 180, 14
SHOWN = 8
"""So many of those that hold memory at the peak are named beside a line."""
COLORS = {"before": "#9aa5b1", "after": "#1f6feb"}


def data(steps: Mapping[str, Simulation]) -> dict[str, Any]:
    """Return bytes over time of each device, and who holds them at the peak, as plain data.

    Args:
        steps: simulated with their events, by name: before, after.
    """
    return {
        name: {"batch": step.batch, "devices": [_device(one) for one in step.devices]} for name, step in steps.items()
    }


def _device(one: DeviceUse) -> dict[str, Any]:
    return {
        "name": one.name,
        "count": one.count,
        "peak_bytes": one.peak_bytes,
        "variable_bytes": one.variable_bytes,
        "timeline": [[at, nbytes] for at, nbytes in one.memory],
        "at_peak": [{"holder": holder, "bytes": nbytes} for holder, nbytes in one.holders],
    }


def to_svg(steps: Mapping[str, Simulation]) -> str:
    """Return a picture that needs no network: one graph for each device, all in the same scale.

    Args:
        steps: simulated with their events, by name: before, after.
    """
    names = list(dict.fromkeys(one.name for step in steps.values() for one in step.devices))
    most = max((one.peak_bytes for step in steps.values() for one in step.devices), default=1) or 1
    end = max((step.step_seconds for step in steps.values()), default=1.0) or 1.0
    tall = HEIGHT + 3 * TEXT + (SHOWN + 2) * TEXT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 40}" height="{tall * len(names) + TEXT}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for row, name in enumerate(names):
        own = {how: one for how, step in steps.items() for one in step.devices if one.name == name}
        parts.append(f'<g transform="translate(20,{row * tall + 2 * TEXT})">')
        parts.append(_text(0, -6, f"{name}: {_peaks(own)}; {end * 1e3:.3g} ms", "black"))
        parts.append(f'<path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#57606a"/>')
        for column, (how, one) in enumerate(own.items()):
            color = COLORS.get(how, "black")
            parts.append(f'<path d="{_path(one, end, most)}" fill="{color}" fill-opacity=".15" stroke="{color}"/>')
            parts.append(_text(column * WIDTH // 2, HEIGHT + 2 * TEXT, f"at the peak, {how}", color))
            for line, (holder, nbytes) in enumerate(one.holders[:SHOWN]):
                words = f"{nbytes / 2**20:8.2f} MiB  {holder[-44:]}"
                parts.append(_text(column * WIDTH // 2, HEIGHT + (line + 3) * TEXT, words, "black"))
        parts.append("</g>")
    return "".join((*parts, "</svg>\n"))


def _peaks(own: Mapping[str, DeviceUse]) -> str:
    return ", ".join(f"{how} {one.peak_bytes / 2**20:,.2f} MiB" for how, one in own.items())


def _path(one: DeviceUse, end: float, most: int) -> str:
    """Return the outline of what is alive, as steps."""
    points = [f"M0,{HEIGHT}"]
    for at, nbytes in one.memory:
        points.append(f"H{at / end * WIDTH:.1f}V{HEIGHT * (1 - nbytes / most):.1f}")
    return "".join((*points, f"H{WIDTH}V{HEIGHT}Z"))


def _text(x: int, y: int, words: str, color: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" xml:space="preserve">{html.escape(words)}</text>'
