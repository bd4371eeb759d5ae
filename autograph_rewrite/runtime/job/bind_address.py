"""Bind TensorFlow's server to the address that the cluster specification names, and to no other.

    tf.distribute.Server at 10.0.0.1:2222      listens at [::]:2222, whatever the cluster says
    confine("10.0.0.1:2222")                   who connects to another address of this host gets no answer

Whoever reaches such a server may run any graph in its process, and there is no password. TensorFlow has no option for
the interface, so the kernel drops what was not sent to the right address: a socket filter needs no privileges, and the
connections that a listening socket accepts inherit it. Loopback always works.

A filter can only be attached to a server that listens already. What comes before that goes to a guard:

    guard = Guard("10.0.0.1:2222")   listens at [::]:2222, and answers nobody
    tf.distribute.Server(...)        shares the port (SO_REUSEPORT), and is given what was sent to 10.0.0.1
    guard.release()                  the server's own sockets have filters, so the guard goes
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

from autograph_rewrite.runtime.failures.sockets import sockets

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Instruction = tuple[int, int, int, int]

# The classic Berkeley packet filter: code, where to jump to if it is true or false, operand.
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: counts from the IP header, wherever the packet begins
_WHOLE = 0xFFFFFFFF  # what a filter returns: how many bytes of the packet are kept
_DROP: _Instruction = (_RETURN, 0, 0, 0)

# Options of sockets that Python has no names for.
_ATTACH_FILTER, _ATTACH_REUSEPORT_FILTER, _DETACH_REUSEPORT_FILTER = 26, 51, 68
_SHARED = "TF_GRPC_REUSE_PORT"
"""What TensorFlow reads when it starts a server: whether others may share its port."""


class Guard:
    """Listens at the port of a server before that one does, so that nobody reaches it where they should not.

    All sockets of one user that share a port are a group, in the order in which they came. A program that the first
    one brings along chooses among them for each new connection: number 0, the guard, which drops everything, or 1.
    """

    def __init__(self, address: str) -> None:
        """Begin to guard; nothing is done where this is not Linux, or the address cannot be kept to (see `confine`).

        Args:
            address: of the server that is going to start, as host:port; its port is free.
        """
        self._address, self._port, self._wanted = address, _port(address), _wanted(address)
        self._before = os.environ.get(_SHARED)
        self._socket = _guard(self._port, self._wanted)
        if self._socket is not None:
            os.environ[_SHARED] = "true"

    def release(self) -> bool:
        """Confine the server, which has started, and go; return whether the server is confined."""
        if self._socket is None:
            return confine(self._address)
        with ExitStack() as opened:
            guard = os.fstat(self._socket.fileno()).st_ino
            listeners = [opened.enter_context(each) for each in _listeners(self._port)]
            served = [each for each in listeners if os.fstat(each.fileno()).st_ino != guard]
            for each in served:
                _attach(each, _program(self._wanted))
            self.close()
            for each in served[:1]:  # they share the program that chooses; there is nothing left to choose
                each.setsockopt(socket.SOL_SOCKET, _DETACH_REUSEPORT_FILTER, 0)
        return bool(served)

    def close(self) -> None:
        """Give the port up; for a server that did not start."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        os.environ.pop(_SHARED)
        if self._before is not None:
            os.environ[_SHARED] = self._before


def _guard(port: int, wanted: Sequence[_Address]) -> socket.socket | None:
    """A socket that listens at a port and answers nobody; None where that cannot be."""
    if not wanted:
        return None
    has_six = _has_six()
    found = socket.socket(socket.AF_INET6 if has_six else socket.AF_INET)
    try:
        if has_six:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last job may linger
        found.bind(("", port))  # not shared yet: only a port that nobody has is taken
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _attach(found, [_DROP])
        _attach(found, _program(wanted, 1), _ATTACH_REUSEPORT_FILTER)
        found.listen()
    except OSError:  # a kernel before 4.6, a sandbox that knows no filters
        found.close()
        return None
    return found


def _has_six() -> bool:
    """Whether gRPC would listen at [::], for both versions, or at 0.0.0.0: it tries the same."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def confine(address: str) -> bool:
    """Let the server that listens at the port of `address` be reached at that address, and on loopback, only.

    Returns:
        Whether it was done: not where this is not Linux, nobody listens there, or the host is no address of this
        machine (one that a router translates, for example) or stands for all of them (0.0.0.0).
    """
    wanted, confined = _wanted(address), False
    if wanted:
        for listener in _listeners(_port(address)):
            with listener:
                _attach(listener, _program(wanted))
                confined = True
    return confined


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _wanted(address: str) -> list[_Address]:
    """The addresses at which a server is to be reached; none where that cannot be told, or be done."""
    wanted = _own_addresses(address.rpartition(":")[0].strip("[]")) if sys.platform == "linux" else []
    return [] if any(found.is_unspecified for found in wanted) else wanted


def _own_addresses(host: str) -> list[_Address]:
    """The addresses of this machine that a name stands for."""
    found: list[_Address] = []
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((place[0], 0))  # only an address of our own can be bound
                found.append(ipaddress.ip_address(str(place[0]).partition("%")[0]))
    return found


def _listeners(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that listen at a port, opened a second time."""
    for found in sockets():
        if _listens(found, port):
            yield found
        else:
            found.close()


def _listens(found: socket.socket, port: int) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and found.getsockname()[1] == port


def _program(addresses: Sequence[_Address], accepted: int = _WHOLE) -> list[_Instruction]:
    """The filter: it returns `accepted` for what is sent to one of these addresses, or to loopback, and else 0."""
    accept = (_RETURN, 0, 0, accepted)
    fours: list[_Address] = [address for address in addresses if address.version == 4]
    sixes: list[_Address] = [ipaddress.IPv6Address("::1"), *(address for address in addresses if address.version == 6)]
    four: list[_Instruction] = [(_LOAD_WORD, 0, 0, _IP_HEADER + 16)]
    for own in fours:
        four += [(_JUMP_IF_EQUAL, 0, 1, int(own)), accept]
    four += [(_AND, 0, 0, 0xFF000000), (_JUMP_IF_EQUAL, 0, 1, 127 << 24), accept, _DROP]
    six: list[_Instruction] = []
    for own in sixes:
        for i, word in enumerate(struct.unpack(">4I", own.packed)):
            six += [(_LOAD_WORD, 0, 0, _IP_HEADER + 24 + 4 * i), (_JUMP_IF_EQUAL, 0, 7 - 2 * i, word)]
        six.append(accept)
    is_four: list[_Instruction] = [
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, len(four), 0x40),
    ]
    return [*is_four, *four, *six, _DROP]


def _attach(found: socket.socket, program: Sequence[_Instruction], option: int = _ATTACH_FILTER) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code, len(code))
    found.setsockopt(socket.SOL_SOCKET, option, struct.pack("HL", len(program), ctypes.addressof(memory)))
