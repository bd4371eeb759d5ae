"""Connections of a process: those to one address are broken, and no others."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from autograph_rewrite.runtime.job.liveness import break_connections


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    """Return three that listen; the first two can be reached over IPv6, too."""
    dual = [socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) for _ in range(2)]
    found = [*dual, socket.create_server(("127.0.0.1", 0))]
    yield found
    for each in found:
        each.close()


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1", "::1"])
@pytest.mark.parametrize("name", ["127.0.0.1", "[::1]"])
def test_only_connections_to_the_address_are_broken(listeners: list[socket.socket], host: str, name: str) -> None:
    with (
        socket.create_connection((host, port(listeners[0]))) as one,
        socket.create_connection(("127.0.0.1", port(listeners[1]))) as other,
    ):
        one.settimeout(0.2)
        other.settimeout(0.2)
        reaches = (name == "[::1]") == (host == "::1")
        assert break_connections([f"{name}:{port(listeners[0])}"]) is reaches
        if reaches:
            assert one.recv(1) == b""
        with pytest.raises(TimeoutError):
            other.recv(1)


def test_where_nothing_is_connected_nothing_is_broken(listeners: list[socket.socket]) -> None:
    assert not break_connections([f"127.0.0.1:{port(listeners[2])}", "no.such.host.invalid:1", "127.0.0.1:1"])
