"""Show objects in a notebook: the first line of their text, then tables. All texts are escaped.

A class derives from `NotebookView`: the first line of its `__str__` sums it up, and is also its `repr`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MOST = 50
"""The most rows of a table; the others are only counted."""


class NotebookView:
    """An object with a `repr` of one line, and with tables in a notebook."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        head = f"<p><b>{html.escape(str(self).partition(chr(10))[0])}</b></p>"
        return f'<div class="autograph-rewrite">{head}{"".join(self._html_parts())}</div>'

    def _html_parts(self) -> Iterator[str]:
        """Yield the parts below the first line."""
        yield text(str(self).partition("\n")[2])


class Shown(str):
    """A `str` that a notebook shows as preformatted text, or as a picture if it is SVG."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return self if self.startswith("<svg") else text(self)


class ShownFile(type(Path())):  # type: ignore[misc]
    """The path of a page that a notebook shows in a frame, with a link to it."""

    def _repr_html_(self) -> str:
        address = html.escape(self.as_posix(), quote=True)
        link = f'<p><a href="{address}" target="_blank">{address}</a></p>'
        return f'{link}<iframe src="{address}" width="100%" height="640"></iframe>'


def text(plain: str) -> str:
    """Return preformatted text; "" for a blank one."""
    return f"<pre>{html.escape(plain)}</pre>" if plain.strip() else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; columns whose heading starts with `#` hold numbers, and the cell of None is empty."""
    found = list(rows)
    if not found:
        return ""
    right = [column.startswith("#") for column in columns]
    head = _row("th", [column.removeprefix("#") for column in columns], right)
    body = "".join(_row("td", row, right) for row in found[:MOST])
    more = f"<p>... and {len(found) - MOST:,} more</p>" if len(found) > MOST else ""
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def _row(tag: str, cells: Sequence[object], right: Sequence[bool]) -> str:
    shown = ("" if cell is None else html.escape(str(cell)) for cell in cells)
    sides = ("right" if one else "left" for one in right)
    made = [f'<{tag} style="text-align:{side}">{cell}</{tag}>' for side, cell in zip(sides, shown, strict=True)]
    return f"<tr>{''.join(made)}</tr>"
