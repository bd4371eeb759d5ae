"""Write the measurements of each strategy into its page, and draw where it keeps variables.

python -m benchmarks strategies                        measures, and writes docs/strategy/measured.json
python -m autograph_rewrite.tools.dev.strategy_pages   writes its tables into the pages, and a picture for each preset
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autograph_rewrite.tools.dev.reference import table

FOLDER = Path(__file__).parents[2] / "docs" / "strategy"
_PLACE = re.compile(r"(<!-- measured: ([\w ]+) -->\n).*?(<!-- end of measured -->)", re.DOTALL)
_HEAD = ("preset", "step / one device", "nodes", "holds, KiB", "two hosts, ms", "busiest link, KiB")
_BAR, _LEFT, _TOP = 160, 150, 34


def measured() -> Mapping[str, Any]:
    """Return the measurements."""
    found: Mapping[str, Any] = json.loads((FOLDER / "measured.json").read_text(encoding="utf-8"))
    return found


def with_tables(page: str, found: Mapping[str, Any]) -> str:
    """Return a page with the tables of its marks."""
    presets = found["presets"]

    def filled(match: re.Match[str]) -> str:
        names = list(presets) if match[2] == "all" else match[2].split()
        rows = [_row(name, presets[name]) for name in names]
        said = f"Measured on {found['machine']}; one device: {found['one_device_ms']} ms a step.\n"
        return f"{match[1]}{table(_HEAD, *rows)}\n{said}{match[3]}"

    return _PLACE.sub(filled, page)


def _row(name: str, one: Mapping[str, Any]) -> tuple[object, ...]:
    held = [one["held"].get(f"/device:CPU:{i}", 0) for i in (0, 1)]
    holds = ", ".join(f"{size / 1024:,.0f}" for size in held)
    return (
        f"[`{name}`](../reference/presets.md#{name})",
        f"{one['step']:.2f}",
        one["nodes"],
        holds,
        f"{one['predicted_ms']:.2f}",
        f"{max(size for _, _, size in one['links']) / 1024:,.0f}",
    )


def picture(name: str, one: Mapping[str, Any]) -> str:
    """Return a picture of the share of each variable that each of the two devices holds, as SVG."""
    variables = one["variables"]
    width, height = _LEFT + 2 * (_BAR + 30) + 10, _TOP + 30 * len(variables) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="13">',
        f"  <title>Where variables live: {name}</title>",
        f'  <rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
    ]
    for i in (0, 1):
        lines.append(f'  <text x="{_x(i)}" y="22" font-weight="600" fill="#222">CPU:{i}</text>')
    for row, (variable, shares) in enumerate(variables.items()):
        y = _TOP + 30 * row
        lines.append(f'  <text x="12" y="{y + 16}" fill="#222">{variable}</text>')
        for i, share in enumerate(shares):
            start = shares[0] if i == 1 and sum(shares) <= 1 else 0.0
            lines += _bar(_x(i), y, start, share)
    return "\n".join([*lines, "</svg>", ""])


def _x(device: int) -> int:
    return _LEFT + device * (_BAR + 30)


def _bar(x: int, y: int, start: float, share: float) -> list[str]:
    """Return an outline of the whole variable, and the part that a device holds."""
    outline = f'  <rect x="{x}" y="{y}" width="{_BAR}" height="22" fill="#f4f4f4" stroke="#bbb"/>'
    if not share:
        return [outline]
    left, wide = x + round(start * _BAR), round(share * _BAR)
    return [outline, f'  <rect x="{left}" y="{y}" width="{wide}" height="22" fill="#9cc4ec" stroke="#3b78b5"/>']


def main() -> None:
    """Write the tables and the pictures."""
    found = measured()
    for page in FOLDER.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, one in found["presets"].items():
        if name in drawn():
            (FOLDER / f"{name}.svg").write_text(picture(name, one), encoding="utf-8")


def drawn() -> frozenset[str]:
    """Return the presets whose picture is on a page."""
    pages = "".join(page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md"))
    return frozenset(re.findall(r"\]\((\w+)\.svg\)", pages))


if __name__ == "__main__":
    main()
