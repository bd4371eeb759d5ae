"""The file of a report: one page with its data, style and scripts in it, of which no request ever leaves.

    report.html    <meta Content-Security-Policy ... default-src 'none'>
    data           <script type="application/json" id="data-graph">      parsed when its view is opened
    style, code    page/*.css, page/*.js, and dagre, which lays opened scopes out

Names of nodes come from whoever made the graph: the page only ever sets them as text, and in JSON `<` is escaped.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "dagre.min.js",
    "data.js",
    "scopes.js",
    "layout.js",
    "graph_view.js",
    "details.js",
    "tables.js",
    "cost.js",
    "timeline.js",
    "main.js",
)


def page(title: str, data: Mapping[str, Any]) -> str:
    """Return the text of the file.

    Args:
        title: of the page.
        data: what its views read, by name; docs/report.md has the schema.
    """
    folder = files(__package__).joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    parts = {
        "<!--title-->": html.escape(title),
        "<!--style-->": f"<style>\n{read('report.css')}</style>",
        "<!--data-->": "\n".join(_data(name, value) for name, value in data.items()),
        "<!--scripts-->": "\n".join(f"<script>\n{read(name)}\n</script>" for name in SCRIPTS),
    }
    text = read("report.html")
    pieces = []
    for mark, part in parts.items():  # in their order: what a name says is never taken for a mark
        before, _, text = text.partition(mark)
        pieces += [before, part]
    return "".join([*pieces, text])


def _data(name: str, value: Any) -> str:
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data-{html.escape(name)}">{text}</script>'
