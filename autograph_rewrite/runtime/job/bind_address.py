"""Bind TensorFlow's server to the address that the cluster specification names, and to no other.

    tf.distribute.Server at 10.0.0.1:2222      listens at [::]:2222, whatever the cluster says
    confine("10.0.0.1:2222")                   who connects to another address of this host gets no answer

Whoever reaches such a server may run any graph in its process, and there is no password. TensorFlow has no option for
the interface, so the kernel drops what was not sent to the right address: a socket filter needs no privileges, and the
connections that a listening socket accepts inherit it. Loopback always works.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from autograph_rewrite.runtime.failures.sockets import sockets

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Instruction = tuple[int, int, int, int]

# The classic Berkeley packet filter: code, where to jump to if it is true or false, operand.
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_IP_HEADER = 0xFFF00000  # SKF_NET_OFF: counts from the IP header, wherever the packet begins
_ACCEPT: _Instruction = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP: _Instruction = (_RETURN, 0, 0, 0)


def confine(address: str) -> bool:
    """Let the server that listens at the port of `address` be reached at that address, and on loopback, only.

    Returns:
        Whether it was done: not where this is not Linux, nobody listens there, or the host is no address of this
        machine (one that a router translates, for example) or stands for all of them (0.0.0.0).
    """
    act = confinement(address)
    return act is not None and act()


def confinement(address: str) -> Callable[[], bool] | None:
    """Return what confines the server at an address once it listens, and tells whether it did; None: nothing can."""
    wanted, port = _wanted(address), int(address.rpartition(":")[2])

    def act() -> bool:
        confined = False
        for listener in _listeners(port):
            with listener:
                _attach(listener, _program(wanted))
                confined = True
        return confined

    return act if wanted else None


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


def _program(addresses: Sequence[_Address]) -> list[_Instruction]:
    """The filter: accept what is sent to one of these addresses, or to loopback."""
    fours: list[_Address] = [address for address in addresses if address.version == 4]
    sixes: list[_Address] = [ipaddress.IPv6Address("::1"), *(address for address in addresses if address.version == 6)]
    four: list[_Instruction] = [(_LOAD_WORD, 0, 0, _IP_HEADER + 16)]
    for own in fours:
        four += [(_JUMP_IF_EQUAL, 0, 1, int(own)), _ACCEPT]
    four += [(_AND, 0, 0, 0xFF000000), (_JUMP_IF_EQUAL, 0, 1, 127 << 24), _ACCEPT, _DROP]
    six: list[_Instruction] = []
    for own in sixes:
        for i, word in enumerate(struct.unpack(">4I", own.packed)):
            six += [(_LOAD_WORD, 0, 0, _IP_HEADER + 24 + 4 * i), (_JUMP_IF_EQUAL, 0, 7 - 2 * i, word)]
        six.append(_ACCEPT)
    is_four: list[_Instruction] = [
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, len(four), 0x40),
    ]
    return [*is_four, *four, *six, _DROP]


def _attach(listener: socket.socket, program: Sequence[_Instruction]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HL", len(program), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, 26, header)  # SO_ATTACH_FILTER, which Python has no name for
