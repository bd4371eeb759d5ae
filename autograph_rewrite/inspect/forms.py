"""Name the forms in which `dump` shows a graph, in a module that is cheap to import."""

from __future__ import annotations

from typing import Literal

Form = Literal["text", "table", "json", "dot", "svg", "graphml", "html"]
