"""How an agent reaches others: it listens at one address, calls others, and says who it is.

    hello   I am this seat, know these views, have these snapshots    ──►  welcome: I lead, stay on this connection
                                                                           see: I do not lead; perhaps this one does
                                                                           anew: the others went on without you
    knock   a generation is led from here                             ──►  see: I am this agent

A connection that is refused, or answered by another agent, tells that the one that listened there has ended.
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

# Messages between the agents of a job: authenticated by its token, bounded, and read as data.
#
#     caller ── 16 bytes ──►  ◄── 16 bytes ── callee            each its own at random: a key for this connection only
#     a message: two lengths │ text: JSON │ data │ HMAC-SHA256 of the direction, the message's number, and all of it
#
# Nothing is looked at before its sum is right, and whoever does not know the token can make none: a message of another
# connection, or a repeated one, has another sum. There is no encryption, as TensorFlow's own connections have none.

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

    Attributes:
        heard: when a message came last, by `time.monotonic`.
        is_open: the connection has not ended.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._key, self._sent, self._received, self._is_caller = b"", 0, 0, False
        self.heard, self.is_open = time.monotonic(), True

    async def greet(self, token: bytes, *, is_caller: bool) -> None:
        """Agree upon a key, given the token of the job and whether this side has connected."""
        mine = secrets.token_bytes(_NONCE)
        self._writer.write(mine)
        theirs = await asyncio.wait_for(self._reader.readexactly(_NONCE), _PATIENCE)
        both = mine + theirs if is_caller else theirs + mine
        self._key, self._is_caller = hmac.digest(token, b"autograph agents" + both, "sha256"), is_caller

    def post(self, kind: str, data: bytes = b"", **said: Any) -> None:
        """Send a message that says something, and data with it; wait for nothing."""
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
"""How a connection ends, or a message is none."""
_MOST = 256
"""Connections at a time of which nobody knows yet who they are."""


@dataclass
class Peer:
    """Another agent, as the one that leads has it."""

    wire: Wire
    seat: Seat
    views: tuple[GenerationHosts, ...]
    have: dict[str, Version]
    report: HostReport | None = None
    generation: int = 0
    """The one that the report is about."""
    is_idle: bool = False
    """It waits for the next generation."""
    prepared: int = 0
    """The generation that it is ready for."""
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CallAnswer:
    """What became of a call."""

    kind: str
    """`welcome`, `see`, `anew`; `refused`: nobody listens there; `silent`."""
    wire: Wire | None = None
    agent: str = ""
    leader: str = ""


class Door:
    """Where an agent listens, and from where it calls.

    Args:
        patience: seconds to wait for an answer.
        answer: is given who calls: the connection and the first message.
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
            ports: to be tried in turn; then any free one.

        Raises:
            ClusterError: the host is none of this machine.
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
        """Take no more calls."""
        if self._server is not None:
            self._server.close()

    def forget_names(self) -> None:
        """Look the names of hosts up again: it may take long, so this is for those who have nothing else to do."""
        self._places.clear()

    def _place(self, host: str) -> str:
        """Return the address of a host; asyncio would look it up in a thread, and a launcher that forks has but one."""
        if host not in self._places:
            self._places[host] = ""  # a name that is not known is not looked up again meanwhile
            with suppress(OSError):
                self._places[host] = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return self._places[host]

    async def call(self, address: str, kind: str, **said: Any) -> CallAnswer:
        """Call another agent where it listens, with a `hello` or a `knock` that says something."""
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
        """Let who calls be answered: by a task of ours, as asyncio prints a traceback for one that is cancelled."""
        wire = Wire(reader, writer)
        task = asyncio.get_running_loop().create_task(self._met(wire))
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)
        task.add_done_callback(lambda _: wire.close())

    async def _met(self, wire: Wire) -> None:
        """Find out who calls, and let it be answered."""
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
    """Return the address of this host from which another (`host:port`) is reached.

    Raises:
        ClusterError: the host is not known.
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


# The snapshots that a host has: which version of each, sent to another host in pieces, and never half a one.
#
#     host of worker 0    fit-1.npz changes ──► version (generation 3, 17) ──► pieces of 1 MiB ──┐
#     second host         fit-1.npz (3, 17) ◄── renamed once it is whole ◄───────────────────────┘
#
# Versions are what hosts compare: who leads fetches the newest, and all begin a generation with the same.

Version = tuple[int, int]
"""The generation that took a snapshot, and its number in it: a later one is greater."""
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
        """Return the snapshots that a worker of this host has written since, and when."""
        found = {}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            name = path.name.removesuffix(_SUFFIX)
            if not _NAME.fullmatch(name):  # one that is being written, and may be renamed at any moment
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
        with open(self._path(name), "rb") as file:  # a newer one has another file
            size, at = os.fstat(file.fileno()).st_size, 0
            while at < size and wire.is_open:
                data = file.read(CHUNK)
                wire.post("piece", data, name=name, version=version, size=size, at=at)
                at += len(data)
                await wire.drained()
                await asyncio.sleep(0)

    def take(self, message: Message, data: bytes) -> bool:
        """Keep a piece of the snapshot that a message names; return whether it is whole now."""
        name, version, at = str(message["name"]), message["version"], int(message["at"])
        if not _NAME.fullmatch(name):
            return False
        new = self.folder / f"coming-{name}.part"
        with open(new, "wb" if at == 0 else "ab") as file:
            if file.tell() != at:
                return False  # the rest of another
            file.write(data)
        if at + len(data) < int(message["size"]):
            return False
        written = new.stat().st_mtime_ns
        os.replace(new, self._path(name))
        self._known[name], self.versions[name] = written, (int(version[0]), int(version[1]))
        return True

    def keep_only(self, versions: Mapping[str, Version]) -> None:
        """Forget the snapshots that are not of these versions."""
        for name in [name for name, version in self.versions.items() if versions.get(name) != version]:
            self._path(name).unlink(missing_ok=True)
            del self.versions[name]
            self._known.pop(name, None)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def versions_of(said: object) -> dict[str, Version]:
    """Read versions from what a message says."""
    assert isinstance(said, dict)
    return {str(name): (int(version[0]), int(version[1])) for name, version in said.items()}
