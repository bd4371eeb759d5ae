"""Agents hear only those who know the token, and take no more than they agreed to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from autograph_rewrite.tools.launcher.agent_peers import (
    CHUNK,
    CallAnswer,
    Door,
    HostSnapshots,
    Message,
    Wire,
    WireError,
)

TOKEN = b"of this job only"
HERE = "127.0.0.1"


async def pair(token: bytes = TOKEN) -> tuple[Wire, Wire, asyncio.Server]:
    """Return both ends of a connection; the caller has a token."""
    came: asyncio.Queue[Wire] = asyncio.Queue()

    async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        await wire.greet(TOKEN, is_caller=False)
        came.put_nowait(wire)

    server = await asyncio.start_server(come, HERE, 0)
    caller = Wire(*await asyncio.open_connection(HERE, server.sockets[0].getsockname()[1]))
    await caller.greet(token, is_caller=True)
    return caller, await came.get(), server


def test_a_message_comes_as_it_was_sent() -> None:
    async def run() -> None:
        caller, callee, server = await pair()
        caller.post("piece", b"data", name="loop")
        callee.post("kept", name="loop")
        assert await callee.receive() == ({"type": "piece", "name": "loop"}, b"data")
        assert (await caller.first())["type"] == "kept"
        server.close()

    asyncio.run(run())


def test_who_has_another_token_is_not_heard() -> None:
    async def run() -> None:
        caller, callee, server = await pair(b"of another job, x")
        caller.post("hello")
        with pytest.raises(WireError, match="another token"):
            await callee.receive()
        server.close()

    asyncio.run(run())


def test_a_message_that_is_sent_twice_or_changed_is_not_heard() -> None:
    async def run() -> None:
        for change in (False, True):
            caller, callee, server = await pair()
            sent: list[bytes] = []
            write = caller._writer.write
            caller._writer.write = sent.append  # type: ignore[method-assign,assignment]
            caller.post("beat", b"0")
            write(sent[0].replace(b"beat", b"leav") if change else sent[0] * 2)
            if not change:
                await callee.receive()
            with pytest.raises(WireError):
                await callee.receive()
            server.close()

    asyncio.run(run())


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        caller, callee, server = await pair()
        caller.post("piece", bytes(CHUNK + 1))
        with pytest.raises(WireError, match="too long"):
            await callee.receive()
        server.close()

    asyncio.run(run())


def test_a_call_tells_who_is_there_who_is_not_and_who_is_silent() -> None:
    async def run() -> None:
        async def answer(wire: Wire, message: Message) -> None:
            wire.post("see", agent="me", leader=str(message["type"]))
            await wire.drained()

        door = Door(TOKEN, 0.5, answer)
        port = await door.open(HERE, [])
        assert await door.call(f"{HERE}:{port}", "knock") == CallAnswer("see", None, "me", "knock")
        assert (await Door(b"x" * 16, 0.5, answer).call(f"{HERE}:{port}", "knock")).kind == "silent"
        mute = await asyncio.start_server(lambda *_: asyncio.sleep(9), HERE, 0)
        assert (await door.call(f"{HERE}:{mute.sockets[0].getsockname()[1]}", "knock")).kind == "silent"
        mute.close()
        await mute.wait_closed()
        assert (await door.call(f"{HERE}:1", "knock")).kind == "refused"

    asyncio.run(run())


class Sent:
    """Keeps what is sent in place of a connection."""

    is_open = True

    def __init__(self) -> None:
        self.pieces: list[tuple[Message, bytes]] = []

    def post(self, _: str, data: bytes, **said: Any) -> None:
        """Keep a message."""
        self.pieces.append((said, data))

    async def drained(self) -> None:
        """Wait for nothing."""


def test_a_snapshot_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    here, there = (HostSnapshots(tmp_path / name) for name in ("here", "there"))
    for one in (here, there):
        one.folder.mkdir()
    content = bytes(range(256)) * (CHUNK // 100)
    (here.folder / "fit-1.npz").write_bytes(content)
    (here.folder / "new-3-fit-1.npz").write_bytes(b"half of the next one")
    assert list(here.changed(3)) == ["fit-1"]
    assert not here.changed(3)
    sent = Sent()
    asyncio.run(here.send(sent, "fit-1"))  # type: ignore[arg-type]
    *first, last = sent.pieces
    assert len(first) >= 2
    assert not any(there.take(*piece) for piece in first)
    assert not there.versions
    assert there.take(*last)
    assert there.versions == here.versions == {"fit-1": (3, 1)}
    assert (there.folder / "fit-1.npz").read_bytes() == content
    assert not there.changed(3), "what was sent here is nothing new"
    assert not there.take(*last), "the end of another one"
    assert not there.take({**last[0], "name": "../out", "at": 0}, b"")
    there.keep_only({"fit-1": (3, 2)})
    assert not list(there.folder.glob("*.npz"))
