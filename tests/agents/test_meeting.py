"""While hosts meet, each says what it waits for."""

from __future__ import annotations

import time

import pytest

from autograph_rewrite.runtime.elastic.job_memory import OwnedMemory
from autograph_rewrite.tools.launcher.agents import meeting
from autograph_rewrite.tools.launcher.agents.meeting import Meeting
from autograph_rewrite.tools.launcher.agents.state import State, Way
from autograph_rewrite.tools.launcher.agents.view import Bounds, Seat

HERE = "127.0.0.1:29871"


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (HERE, "1 of 2 to 3 workers are here; the others may come to 127.0.0.1:"),
        ("127.0.0.2:29871", "nobody who leads answers at 127.0.0.2:29871 yet; gives up after"),
    ],
)
def test_a_host_that_waits_for_others_says_so(endpoint: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_QUIET", 0.1)
    heard: list[str] = []
    way = Way((endpoint,), b"of this job only", "127.0.0.1", patience=60.0)
    with OwnedMemory() as owned:
        state = State(way, Bounds(2, 3, 1.0), Seat("", "", 1), owned, lambda count: [0] * count)
        one, end = Meeting(state, heard.append), time.monotonic() + 20
        try:
            assert one.meet(None, lambda: bool(heard) or time.monotonic() > end) is None
        finally:
            one.leave()
    assert [words.startswith(said) for words in heard] == [True]
