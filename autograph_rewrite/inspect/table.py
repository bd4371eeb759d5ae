"""Draw plain-text tables with rich: as wide as the terminal; elsewhere rows are never folded."""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

from autograph_rewrite.diagnostics.amounts import size
from autograph_rewrite.plan.parts.notes import row_of

UNLIMITED = 1 << 20
_PARTS = re.compile(r"[A-Z]?[^A-Z/_:.,\s]*[/_:.,\s]*")


class Cell(Text):
    """A text that wraps after separators: `layer_1/` `dense`, never `layer_1/de`."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        """Return the wrapped lines."""
        lines = [""]
        for part in _PARTS.findall(self.plain):
            if lines[-1] and len((lines[-1] + part).rstrip()) > width:
                lines.append("")
            lines[-1] += part
            while len(lines[-1].rstrip()) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
        found = Lines(Text(line.rstrip()) for line in lines)
        found.justify(console, width, justify=self.justify or options.get("justify") or "left")
        return found


def fitted(text: str) -> str:
    """Return sentences wrapped at blanks to the width of the terminal; elsewhere unchanged."""
    width = _width()
    return "\n".join(
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(line) > width and "─" not in line
        else line
        for line in text.split("\n")
    )


def drawn(*tables: Table, width: int | None = None) -> str:
    """Return tables as text without colours and trailing blanks, so that results can be compared.

    Args:
        tables: one below the other.
        width: in letters; default: that of the terminal; unlimited if standard output is none.
    """
    stream = io.StringIO()
    console = Console(
        file=stream, width=width or _width(), color_system=None, force_terminal=False, legacy_windows=False
    )
    for table in tables:
        console.print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else UNLIMITED


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, spare: Sequence[str] = ()) -> Table:
    """Return a table; columns whose name starts with `#` hold numbers, and empty columns are left out.

    Args:
        rows: a cell for each column; the cell of None is empty.
        spare: columns to leave out, in this order, until the table fits the terminal.
    """
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    used = [at for at in range(len(columns)) if not cells or any(row[at] for row in cells)]
    widths = {at: max([len(columns[at]), *(len(row[at]) for row in cells)]) + 3 for at in used}
    for at in (columns.index(column) for column in spare):
        if at in used and sum(widths[one] for one in used) > _width():
            used.remove(at)
    for column in (columns[at] for at in used):
        justify = "right" if column.startswith("#") else "left"
        made.add_column(Text(column.removeprefix("#")), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in cells:
        made.add_row(*(Cell(row[at]) for at in used))
    return made


# The table of the plans that a search has compared: step, memory, communication, and a verdict.


NAME = 60  # characters of a plan's description


def without_ranking(notes: Iterable[str]) -> tuple[str, ...]:
    """Return the notes of a plan without the rows of its ranking."""
    return tuple(note for note in notes if row_of(note) is None)


def ranking_text(notes: Sequence[str]) -> str:
    """Return the ranking in the notes of a plan as a table; empty if there is none."""
    rows = [row for row in map(row_of, notes) if row is not None]
    if not rows:
        return ""
    columns = ("#rank", "plan", "#step", "#memory per device", "#moved", "verdict")
    shown = [
        (
            row.rank,
            row.plan if len(row.plan) <= NAME else f"{row.plan[: NAME - 3]}...",
            f"{row.milliseconds:.4g} ms",
            size(round(row.mebibytes * 2**20)),
            size(round(row.moved * 2**20)),
            row.verdict,
        )
        for row in rows
    ]
    return drawn(table("plans that were compared, predicted", columns, shown))
