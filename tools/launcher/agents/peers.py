"""How an agent reaches others: it listens at one address, calls others, and says who it is.

    hello   I am this seat, know these views, have these snapshots    ──►  welcome: I lead, stay on this connection
                                                                           see: I do not lead; perhaps this one does
                                                                           anew: the others went on without you
    knock   a generation is led from here                             ──►  see: I am this agent

A connection that is refused, or answered by another agent, tells that the one that listened there has ended.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.tools.launcher.agents.snapshots import Version
from autograph_rewrite.tools.launcher.agents.view import Report, Seat, View
from autograph_rewrite.tools.launcher.agents.wire import Message, Wire, WireError

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
    views: tuple[View, ...]
    have: dict[str, Version]
    report: Report | None = None
    generation: int = 0
    """The one that the report is about."""
    is_idle: bool = False
    """It waits for the next generation."""
    prepared: int = 0
    """The generation that it is ready for."""
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """What became of a call."""

    kind: str
    """`welcome`, `see`, `anew`; `refused`: nobody listens there; `silent`."""
    wire: Wire | None = None
    agent: str = ""
    leader: str = ""


class Door:
    """Where an agent listens, and from where it calls.

    Args:
        token: of the job.
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

    async def call(self, address: str, kind: str, **said: Any) -> Answer:
        """Call another agent.

        Args:
            address: where it listens.
            kind: `hello` or `knock`.
            **said: what to say.
        """
        host, _, port = address.rpartition(":")
        place = self._place(host.strip("[]"))
        if not place:
            return Answer("silent")
        try:
            streams = await asyncio.wait_for(asyncio.open_connection(place, int(port)), self._patience)
        except ConnectionRefusedError:
            return Answer("refused")
        except BROKEN:
            return Answer("silent")
        wire = Wire(*streams)
        try:
            found = await asyncio.wait_for(self._asked(wire, kind, said), self._patience)
        except BROKEN:
            wire.close()
            return Answer("silent")
        if found["type"] == "welcome":
            return Answer("welcome", wire, str(found["agent"]))
        wire.close()
        return Answer(str(found["type"]), None, str(found["agent"]), str(found.get("leader", "")))

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
    """Return the address of this host from which another is reached.

    Args:
        endpoint: `host:port` of the other.

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
    """Return whether an endpoint is at an address of this host.

    Args:
        endpoint: `host:port`.
    """
    name, _, port = endpoint.rpartition(":")
    with suppress(OSError):
        return host in {str(found[4][0]) for found in socket.getaddrinfo(name.strip("[]"), int(port))} | {name}
    return False


def joined(host: str, ports: Iterable[int]) -> list[str]:
    """Return addresses at a host."""
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in ports]


def report_of(said: object) -> Report | None:
    """Read a report from a message.

    Args:
        said: plain data, or nothing.
    """
    return Report(**said) if isinstance(said, dict) else None


def views_of(said: object) -> tuple[View, ...]:
    """Read views from a message.

    Args:
        said: plain data.
    """
    assert isinstance(said, list), json.dumps(said)
    return tuple(View.of(view) for view in said)
