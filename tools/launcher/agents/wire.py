"""Messages between the agents of a job: authenticated by its token, bounded, and read as data.

    caller ── 16 bytes ──►  ◄── 16 bytes ── callee            each its own at random: a key for this connection only
    a message: two lengths │ text: JSON │ data │ HMAC-SHA256 of the direction, the message's number, and all of it

Nothing is looked at before its sum is right, and whoever does not know the token can make none: a message of another
connection, or a repeated one, has another sum. There is no encryption, as TensorFlow's own connections have none.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import struct
import time
from contextlib import suppress
from typing import Any

CHUNK = 1 << 20
"""Most bytes of data in a message."""
_TEXT = 1 << 18
_NONCE, _SUM = 16, 32
_PATIENCE = 5.0
"""Seconds in which who connects has to show that it knows the token."""
_LENGTHS = struct.Struct(">II")

Message = dict[str, Any]


class WireError(Exception):
    """The other side does not know the token, or does not keep to the rules."""


class Wire:
    """One connection to another agent.

    Args:
        reader: of the connection.
        writer: of the connection.

    Attributes:
        heard: when a message came last, by `time.monotonic`.
        is_open: the connection has not ended.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._key, self._sent, self._received, self._is_caller = b"", 0, 0, False
        self.heard, self.is_open = time.monotonic(), True

    async def greet(self, token: bytes, *, is_caller: bool) -> None:
        """Agree upon a key.

        Args:
            token: of the job.
            is_caller: this side has connected.
        """
        mine = secrets.token_bytes(_NONCE)
        self._writer.write(mine)
        theirs = await asyncio.wait_for(self._reader.readexactly(_NONCE), _PATIENCE)
        both = mine + theirs if is_caller else theirs + mine
        self._key, self._is_caller = hmac.digest(token, b"autograph agents" + both, "sha256"), is_caller

    def post(self, kind: str, data: bytes = b"", **said: Any) -> None:
        """Send a message, and wait for nothing.

        Args:
            data: what goes with it.
            **said: what it says.
        """
        if not self.is_open:
            return
        text = json.dumps({"type": kind, **said}).encode()
        whole = _LENGTHS.pack(len(text), len(data)) + text + data
        self._writer.write(whole + self._sum(whole, self._sent, self._is_caller))
        self._sent += 1

    async def drained(self) -> None:
        """Wait until what was sent is on its way."""
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> tuple[Message, bytes]:
        """Return the next message.

        Raises:
            WireError: it is none of this job's.
            EOFError: the connection has ended.
        """
        lengths = await self._reader.readexactly(_LENGTHS.size)
        text, data = _LENGTHS.unpack(lengths)
        if text > _TEXT or data > CHUNK:
            raise WireError("a message is too long")
        rest = await self._reader.readexactly(text + data + _SUM)
        whole = lengths + rest[: text + data]
        if not hmac.compare_digest(self._sum(whole, self._received, not self._is_caller), rest[text + data :]):
            raise WireError("the other side has another token")
        self._received += 1
        self.heard = time.monotonic()
        message = json.loads(rest[:text])
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise WireError("a message says nothing")
        return message, rest[text : text + data]

    async def first(self) -> Message:
        """Return the first message, which has to come soon."""
        message, _ = await asyncio.wait_for(self.receive(), _PATIENCE)
        return message

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        self._writer.close()

    async def gone(self) -> None:
        """Wait until all that was sent is on its way and the connection has ended."""
        with suppress(OSError):
            await self._writer.wait_closed()

    def _sum(self, whole: bytes, number: int, by_caller: bool) -> bytes:
        made = hmac.new(self._key, struct.pack(">?Q", by_caller, number), hashlib.sha256)
        made.update(whole)
        return made.digest()
