"""What many processes write becomes whole lines that say whose they are."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite.tools.launcher.output import LONGEST_LINE, LineWriter, opened, prefixes


def quoted(line: bytes) -> bytes:
    """Return a line as it is shown here."""
    return b"> " + line


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"\xff"]), max_size=12), st.integers(1, 4))
def test_lines_are_whole_however_they_arrive(parts: list[bytes], size: int) -> None:
    written, out, log = b"".join(parts), io.BytesIO(), io.BytesIO()
    writer = LineWriter(out, quoted, log)
    for begin in range(0, len(written), size):
        writer.feed(written[begin : begin + size])
    writer.close()
    lines = written.replace(b"\r\n", b"\n").split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    assert out.getvalue() == b"".join(b"> " + line + b"\n" for line in lines)
    assert log.getvalue() == written
    assert list(writer.last) == [line.decode(errors="replace") for line in lines]


def test_a_progress_bar_shows_its_last_state_and_a_line_without_end_comes_in_pieces() -> None:
    out = io.BytesIO()
    writer = LineWriter(out, quoted)
    writer.feed(b"10%\r50%\r100%\r\n")
    assert out.getvalue() == b"> 100%\n"
    writer.feed(b"x" * (LONGEST_LINE + 1))
    assert out.getvalue().endswith(b"x\n")


def test_prefixes_have_colours_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = prefixes(["worker 0", "worker 1"], io.StringIO())
    assert re.fullmatch(rb"\x1b\[\d+m\[worker 0\]\x1b\[0m ", coloured["worker 0"])
    assert coloured["worker 0"][:5] != coloured["worker 1"][:5]
    monkeypatch.setenv("NO_COLOR", "1")
    assert b"\x1b[3" not in prefixes(["worker 0"], io.StringIO())["worker 0"]
    monkeypatch.delenv("FORCE_COLOR")
    assert prefixes(["worker 0"], io.StringIO()) == {"worker 0": b"[worker 0] "}


def test_output_opens_logs_only_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(["worker 0"]) as output:
        assert set(output) == {"worker 0"}
    assert list(tmp_path.iterdir()) == []
