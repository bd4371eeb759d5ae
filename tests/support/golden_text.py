"""Compare a text with a file of tests/golden; `UPDATE_GOLDEN=1` writes the file instead."""

from __future__ import annotations

import os

from tests.support.paths import GOLDEN

FOLDER = GOLDEN


def check_golden(name: str, text: str) -> None:
    """Fail unless `text` is what the golden file holds."""
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no golden file {name}: run with UPDATE_GOLDEN=1, and read what it writes"
    assert text == path.read_text(encoding="utf-8"), f"differs from golden/{name}; UPDATE_GOLDEN=1 accepts it"
