"""One self-contained web page per graph: a searchable list, and each node with links to its neighbours."""

from __future__ import annotations

import html
import json
from collections.abc import Collection
from pathlib import Path

from autograph_rewrite.inspect.render.export import item_data
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.training_graph import TrainingGraph


def to_html(item: TrainingGraph, nodes: Collection[Node] | None = None) -> str:
    """Return a page that needs no network: data, style and script are in it."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    data = json.dumps(item_data(item, nodes), ensure_ascii=False, separators=(",", ":"))
    safe = data.replace("<", "\\u003c")  # so that no value can close the script element
    title = ", ".join(item.targets) or f"{len(item.graph)} nodes"
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", safe)
