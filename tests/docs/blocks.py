"""The fenced blocks of all pages: where each stands, its language, and what it says to the tests."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
OWN = sorted(DOCS.rglob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *OWN])
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its page, line, language with options, and text."""

    page: Path
    line: int
    kind: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str, pages: list[Path] | None = None) -> list[Block]:
    """Return the blocks of one language, page by page."""
    found = []
    for page in PAGES if pages is None else pages:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            kind = tuple(match[1].split())
            if kind[:1] == (language,):
                found.append(Block(page, text.count("\n", 0, match.start()) + 1, kind, textwrap.dedent(match[2])))
    return found


def prose(page: Path) -> str:
    """Return the text without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    return anchors_of(prose(page))


def anchors_of(text: str) -> set[str]:
    """Return the anchors of the headings of a text."""
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
