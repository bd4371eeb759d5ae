"""The forms in which a graph is shown, for whoever names one without showing any: nothing heavy is imported here."""

from __future__ import annotations

from typing import Literal

Form = Literal["text", "table", "json", "dot", "svg", "graphml", "html"]
