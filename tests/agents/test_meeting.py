"""Hosts that meet: each says what it waits for, and leaves without a trace."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from autograph_rewrite.runtime.job.job_memory import OwnedMemory
from autograph_rewrite.tools.launcher import agent_meeting
from autograph_rewrite.tools.launcher.agent_meeting import AgentMeeting, Way
from autograph_rewrite.tools.launcher.agent_view import Bounds, Seat

HERE = "127.0.0.1:29871"


def agent_at(endpoint: str, owned: OwnedMemory, say: Callable[[str], None] = lambda words: None) -> AgentMeeting:
    """Return the agent of a host that meets others at an endpoint."""
    way = Way((endpoint,), b"of this job only", "127.0.0.1", patience=60.0)
    return AgentMeeting(way, Bounds(2, 3, 1.0), Seat("", "", 1), owned, lambda count: [0] * count, say)


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (HERE, "1 of 2 to 3 workers are here; the others may come to 127.0.0.1:"),
        ("127.0.0.2:29871", "nobody who leads answers at 127.0.0.2:29871 yet; gives up after"),
    ],
)
def test_a_host_that_waits_for_others_says_so(endpoint: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_meeting, "_QUIET", 0.1)
    heard: list[str] = []
    with OwnedMemory() as owned:
        one, end = agent_at(endpoint, owned, heard.append), time.monotonic() + 20
        try:
            assert one.meet(None, lambda: bool(heard) or time.monotonic() > end) is None
        finally:
            one.leave()
    assert [words.startswith(said) for words in heard] == [True]


def test_a_host_that_leaves_while_others_call_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    has_left = threading.Event()

    def call_on(port: int) -> None:
        held = []
        while not has_left.is_set():
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 0.1))
            time.sleep(0.0002)
        for one in held:
            one.close()

    with OwnedMemory() as owned, caplog.at_level(logging.ERROR, "asyncio"):
        one = agent_at(HERE, owned)
        port = int(one.own.address.rpartition(":")[2])
        callers = [threading.Thread(target=call_on, args=(port,)) for _ in range(4)]
        for caller in callers:
            caller.start()
        one.meet(None, lambda: True)
        one.leave()
        has_left.set()
        for caller in callers:
            caller.join()
        del one
        gc.collect()
    assert not caplog.messages
