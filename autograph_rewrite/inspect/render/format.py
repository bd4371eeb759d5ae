"""Numbers and lists as people write them."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(count: int) -> str:
    """Return `1.5 MiB` and the like."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return several(count, "byte")


def several(count: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def few(names: Sequence[str], most: int | None = 4) -> str:
    """Return the first names, and how many more there are; None: all of them."""
    most = len(names) if most is None else most
    return ", ".join(names[:most]) + ("" if len(names) <= most else f" and {len(names) - most:,} more")
