"""Plain-text tables, drawn by rich: as wide as the terminal; elsewhere no row is ever folded."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNLIMITED = 1 << 20


def drawn(*tables: Table, width: int | None = None) -> str:
    """Return tables as text without colours; trailing blanks are cut, so that results can be compared.

    Args:
        tables: one below the other.
        width: in letters; left out: that of the terminal that standard output is.
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


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; columns whose name starts with `#` hold numbers.

    Args:
        title: above the columns.
        columns: their headings.
        rows: a cell for each column; None is left empty.
    """
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        justify = "right" if column.startswith("#") else "left"
        made.add_column(Text(column.removeprefix("#")), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return made
