"""Tables of text: one line for each row, except on a terminal that is narrower."""

from __future__ import annotations

import io
import sys

import pytest

from autograph_rewrite.inspect.table import drawn, table

LONG = table("names", ("name", "#count"), [("layer/" * 60, 3)])


def test_a_row_stays_on_its_line_where_nobody_looks_at_it_on_a_terminal() -> None:
    assert f"{'layer/' * 60}       3\n" in drawn(LONG)


def test_a_table_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "70")
    lines = drawn(LONG).splitlines()
    assert max(map(len, lines)) == 70
    assert "".join(line.strip().removesuffix("3").strip() for line in lines[3:]) == "layer/" * 60


def test_an_empty_column_is_left_out() -> None:
    assert "compressor" not in drawn(table("exchanges", ("value", "compressor"), [("w", ""), ("b", None)]))


def test_a_narrow_terminal_shows_fewer_columns_and_breaks_names_after_a_separator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "40")
    shown = drawn(
        table("exchanges", ("value", "keys", "#bytes"), [("sequential/dense/" * 3, "1" * 20, 4)], spare=["keys"])
    )
    assert "keys" not in shown
    assert all(line.split()[0].endswith("/") for line in shown.splitlines()[3:])
