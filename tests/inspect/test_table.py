"""Tables of text: one line for each row, except on a terminal that is narrower."""

from __future__ import annotations

import io
import sys

import pytest

from autograph_rewrite.inspect.render.table import drawn, table

LONG = table("names", ("name", "#count"), [("layer/" * 60, 3)])


def test_a_row_stays_on_its_line_where_nobody_looks_at_it_on_a_terminal() -> None:
    assert f"{'layer/' * 60}       3\n" in drawn(LONG)


def test_a_table_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "70")
    lines = drawn(LONG).splitlines()
    assert max(map(len, lines)) == 70
    assert "".join(line.strip().removesuffix("3").strip() for line in lines[3:]) == "layer/" * 60
