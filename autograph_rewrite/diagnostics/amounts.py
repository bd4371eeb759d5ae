"""Format bytes, times, counts and lists for people: three significant digits, and always a unit.

The page of a report follows the same rules (`inspect/page/data.js`).
"""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def digits(value: float) -> str:
    """Return `1,234`, `47.6` or `0.0432`: three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def size(count: float) -> str:
    """Return `1.5 MiB` and the like."""
    for unit, name in _BYTES:
        if count >= unit:
            return f"{digits(count / unit)} {name}"
    return several(round(count), "byte")


def duration(seconds: float) -> str:
    """Return `47.6 s`, `43.5 ms` and the like."""
    if not seconds:
        return "0 s"
    unit, name = next((one for one in _TIMES if abs(seconds) >= one[0]), _TIMES[-1])
    return f"{digits(seconds / unit)} {name}"


def percent(share: float) -> str:
    """Return `7.6 %` and the like; a share just below 1 is `> 99.9 %`."""
    shown = f"{100 * share:.3g}"
    return "> 99.9 %" if shown == "100" and share < 1 else f"{shown} %" if share >= 0.001 else "< 0.1 %"


def several(count: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def few(names: Sequence[str], most: int | None = 4) -> str:
    """Return the first `most` names, and how many more there are; None: all names."""
    most = len(names) if most is None else most
    return ", ".join(names[:most]) + ("" if len(names) <= most else f" and {len(names) - most:,} more")
