"""Connect the agents of a job: each listens at one address, calls others, and identifies itself.

    hello   I am this seat, know these views, have these snapshots    ──►  welcome: I lead, stay on this connection
                                                                           see: I do not lead; perhaps this one does
                                                                           anew: the others went on without you
    knock   a generation is led from here                             ──►  see: I am this agent

If a connection is refused, or another agent answers, the agent that listened there has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.tools.launcher.agent_view import GenerationHosts, HostReport, Seat

# Messages between the agents of a job: authenticated by its token, limited in size, and read as plain data.
#
#     caller ── 16 bytes ──►  ◄── 16 bytes ── callee            random bytes of each side: a key for this connection
#     a message: two lengths │ text: JSON │ data │ HMAC-SHA256 of the direction, the message's number, and all of it
#
# No message is parsed before its HMAC is verified, which nobody can make without the token. A message of another
# connection, or a repeated one, has another HMAC. There is no encryption, as TensorFlow's connections have none either.

CHUNK = 1 << 20
"""The most bytes of data in a message."""
_TEXT = 1 << 18
_NONCE, _SUM = 16, 32
_PATIENCE = 5.0
"""Seconds within which a caller has to prove that it knows the token."""
_LENGTHS = struct.Struct(">II")

Message = dict[str, Any]


class WireError(Exception):
    """The other side does not know the token, or breaks the protocol."""


class Wire:
    """One connection to another agent.

    Attributes:
        heard: when the last message was received, by `time.monotonic`.
        is_open: the connection has not been closed.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._key, self._sent, self._received, self._is_caller = b"", 0, 0, False
        self.heard, self.is_open = time.monotonic(), True

    async def greet(self, token: bytes, *, is_caller: bool) -> None:
        """Agree on a key, given the token of the job and whether this side has connected."""
        mine = secrets.token_bytes(_NONCE)
        self._writer.write(mine)
        theirs = await asyncio.wait_for(self._reader.readexactly(_NONCE), _PATIENCE)
        both = mine + theirs if is_caller else theirs + mine
        self._key, self._is_caller = hmac.digest(token, b"autograph agents" + both, "sha256"), is_caller

    def post(self, kind: str, data: bytes = b"", **said: Any) -> None:
        """Send a message, with data, without waiting."""
        if not self.is_open:
            return
        text = json.dumps({"type": kind, **said}).encode()
        whole = _LENGTHS.pack(len(text), len(data)) + text + data
        self._writer.write(whole + self._sum(whole, self._sent, self._is_caller))
        self._sent += 1

    async def drained(self) -> None:
        """Wait until the send buffer has drained."""
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> tuple[Message, bytes]:
        """Return the next message.

        Raises:
            WireError: the message is no authenticated message of this job.
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
        """Return the first message, which has to arrive within `_PATIENCE`."""
        message, _ = await asyncio.wait_for(self.receive(), _PATIENCE)
        return message

    def close(self) -> None:
        """End the connection."""
        self.is_open = False
        self._writer.close()

    async def gone(self) -> None:
        """Wait until all messages are sent and the connection is closed."""
        with suppress(OSError):
            await self._writer.wait_closed()

    def _sum(self, whole: bytes, number: int, by_caller: bool) -> bytes:
        made = hmac.new(self._key, struct.pack(">?Q", by_caller, number), hashlib.sha256)
        made.update(whole)
        return made.digest()


BROKEN = (
    OSError,
    EOFError,
    WireError,
    TimeoutError,
    asyncio.TimeoutError,
    ValueError,
    KeyError,
    TypeError,
    AssertionError,
)
"""The errors of a connection that ends, and of malformed messages."""
_MOST = 256
"""The most connections at a time that are not authenticated yet."""


@dataclass
class Peer:
    """A follower, as its leader knows it."""

    wire: Wire
    seat: Seat
    views: tuple[GenerationHosts, ...]
    have: dict[str, Version]
    report: HostReport | None = None
    generation: int = 0
    """The generation of the report."""
    is_idle: bool = False
    """It waits for the next generation."""
    prepared: int = 0
    """The generation for which it is ready."""
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CallAnswer:
    """The answer to a call."""

    kind: str
    """`welcome`, `see`, `anew`; `refused`: the connection was refused; `silent`: there was no answer."""
    wire: Wire | None = None
    agent: str = ""
    leader: str = ""


class Door:
    """Listens for an agent, and calls others.

    Args:
        patience: seconds to wait for an answer.
        answer: called with each authenticated connection and its first message.
    """

    def __init__(
        self, token: bytes, patience: float, answer: Callable[[Wire, Message], Coroutine[Any, Any, None]]
    ) -> None:
        self._token, self._patience, self._answer = token, patience, answer
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._places: dict[str, str] = {}

    async def open(self, host: str, ports: Sequence[int]) -> int:
        """Listen at an address of this host, and at no other; return the port.

        Args:
            ports: tried in order; then any free port.

        Raises:
            ClusterError: the address is not one of this machine.
        """
        for port in (*ports, 0):
            try:
                self._server = await asyncio.start_server(self._come, host, port)
            except OSError as error:
                if port == 0:
                    hint = "give an address of this machine with --address"
                    raise ClusterError(f"cannot listen at {host}: {error.strerror}", hint=hint) from None
                continue
            return int(self._server.sockets[0].getsockname()[1])
        raise AssertionError

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def forget_names(self) -> None:
        """Forget looked-up host names; looking them up may block, so call this only while no workers run."""
        self._places.clear()

    def _place(self, host: str) -> str:
        """Return the address of a host; not by asyncio, which starts a thread, because the launcher forks."""
        if host not in self._places:
            self._places[host] = ""  # an unknown name is not looked up again until `forget_names`
            with suppress(OSError):
                self._places[host] = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return self._places[host]

    async def call(self, address: str, kind: str, **said: Any) -> CallAnswer:
        """Call another agent with a `hello` or a `knock`, whose content is `said`."""
        host, _, port = address.rpartition(":")
        place = self._place(host.strip("[]"))
        if not place:
            return CallAnswer("silent")
        try:
            streams = await asyncio.wait_for(asyncio.open_connection(place, int(port)), self._patience)
        except ConnectionRefusedError:
            return CallAnswer("refused")
        except BROKEN:
            return CallAnswer("silent")
        wire = Wire(*streams)
        try:
            found = await asyncio.wait_for(self._asked(wire, kind, said), self._patience)
        except BROKEN:
            wire.close()
            return CallAnswer("silent")
        if found["type"] == "welcome":
            return CallAnswer("welcome", wire, str(found["agent"]))
        wire.close()
        return CallAnswer(str(found["type"]), None, str(found["agent"]), str(found.get("leader", "")))

    async def _asked(self, wire: Wire, kind: str, said: Mapping[str, Any]) -> Message:
        await wire.greet(self._token, is_caller=True)
        wire.post(kind, **said)
        return await wire.first()

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a caller in a separate task, because asyncio prints a traceback if its handler is cancelled."""
        wire = Wire(reader, writer)
        task = asyncio.get_running_loop().create_task(self._met(wire))
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)
        task.add_done_callback(lambda _: wire.close())

    async def _met(self, wire: Wire) -> None:
        """Authenticate a caller, and answer it."""
        if self._strangers >= _MOST:
            return
        self._strangers += 1
        try:
            await wire.greet(self._token, is_caller=False)
            message = await wire.first()
        except BROKEN:
            return
        finally:
            self._strangers -= 1
        with suppress(*BROKEN):
            await self._answer(wire, message)


def own_address(endpoint: str) -> str:
    """Return the address of this host from which it reaches another (`host:port`).

    Raises:
        ClusterError: the other host is unknown.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, proto, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterError(f"{endpoint}: {error.strerror}", hint="--rdzv-endpoint has to name a host") from None


def is_at(endpoint: str, host: str) -> bool:
    """Return whether an endpoint (`host:port`) is at an address of this host."""
    name, _, port = endpoint.rpartition(":")
    with suppress(OSError):
        return host in {str(found[4][0]) for found in socket.getaddrinfo(name.strip("[]"), int(port))} | {name}
    return False


def joined(host: str, ports: Iterable[int]) -> list[str]:
    """Return addresses at a host."""
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in ports]


# The snapshots of a host, each with a version; they are sent to other hosts in pieces, and a file is always complete.
#
#     host of worker 0    fit-1.npz changes ──► version (generation 3, 17) ──► pieces of 1 MiB ──┐
#     second host         fit-1.npz (3, 17) ◄── renamed once it is whole ◄───────────────────────┘
#
# The leader compares versions and fetches the newest, so that all hosts begin a generation with the same snapshots.

Version = tuple[int, int]
"""The generation that took a snapshot, and its number in that generation; later versions are greater."""
_NAME = re.compile(r"[a-z]+(-[0-9]{1,6})?")
_SUFFIX = ".npz"


class HostSnapshots:
    """The snapshots of a host in a folder, and the version of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions: dict[str, Version] = {}
        self._known: dict[str, int] = {}
        self._count = 0

    def changed(self, generation: int) -> dict[str, int]:
        """Return the snapshots that workers of this host have written since the last call, with their times."""
        found = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            name = path.name.removesuffix(_SUFFIX)
            if not _NAME.fullmatch(name):  # a file that is still being written
                continue
            written = path.stat().st_mtime_ns
            if self._known.get(name) == written:
                continue
            self._count += 1
            self._known[name], self.versions[name], found[name] = written, (generation, self._count), written
        return found

    async def send(self, wire: Wire, name: str) -> None:
        """Send a snapshot to another host."""
        version = self.versions[name]
        with open(self._path(name), "rb") as file:  # a newer version replaces the name, not this open file
            size, at = os.fstat(file.fileno()).st_size, 0
            while at < size and wire.is_open:
                data = file.read(CHUNK)
                wire.post("piece", data, name=name, version=version, size=size, at=at)
                at += len(data)
                await wire.drained()
                await asyncio.sleep(0)

    def take(self, message: Message, data: bytes) -> bool:
        """Keep a piece of a snapshot; return whether the snapshot is complete now."""
        name, version, at = str(message["name"]), message["version"], int(message["at"])
        if not _NAME.fullmatch(name):
            return False
        new = self.folder / f"coming-{name}.part"
        with open(new, "wb" if at == 0 else "ab") as file:
            if file.tell() != at:
                return False  # a piece of another version
            file.write(data)
        if at + len(data) < int(message["size"]):
            return False
        written = new.stat().st_mtime_ns
        os.replace(new, self._path(name))
        self._known[name], self.versions[name] = written, (int(version[0]), int(version[1]))
        return True

    def keep_only(self, versions: Mapping[str, Version]) -> None:
        """Delete the snapshots of other versions."""
        for name in [name for name, version in self.versions.items() if versions.get(name) != version]:
            self._path(name).unlink(missing_ok=True)
            del self.versions[name]
            self._known.pop(name, None)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def versions_of(said: object) -> dict[str, Version]:
    """Read versions from a message."""
    assert isinstance(said, dict)
    return {str(name): (int(version[0]), int(version[1])) for name, version in said.items()}
