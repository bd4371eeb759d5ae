"""Notes: remarks on a plan or a rewrite, each about a node or a setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A node that runs whole for want of a rule, or another thing to know."""

    node: str
    op: str
    text: str
