"""The sockets of this process, TensorFlow's included: found by address, and closed.

TensorFlow waits without end for a process that is stopped, or behind a network that loses everything, and not even
closing the session helps. Once its connection is broken, it sees what it would see of a process that has died.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress

Place = tuple[str, int]


def sockets() -> Iterator[socket.socket]:
    """Yield the sockets of this process, each opened a second time; close them. None where this is not Linux."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(name)))


def break_connections(addresses: Iterable[str]) -> bool:
    """Break all connections that this process has made to some addresses (host:port); return whether there were any."""
    broken = False
    wanted = {place for address in addresses for place in _places(address)}
    for found in sockets():
        with found, suppress(OSError):
            if found.family in (socket.AF_INET, socket.AF_INET6) and _place(found.getpeername()) in wanted:
                found.shutdown(socket.SHUT_RDWR)
                broken = True
    return broken


def _places(address: str) -> Iterator[Place]:
    """Yield what an address stands for."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        for *_, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            yield _place(place)


def _place(place: tuple[object, ...]) -> Place:
    """Return an address in one spelling: IPv4 is often written as IPv6."""
    found = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found), int(str(place[1]))
