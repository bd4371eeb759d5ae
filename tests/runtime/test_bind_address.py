"""A server can be reached at the address that the cluster names for it, and nowhere else."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograph_rewrite.runtime.job.tf_server import PortGuard, _program, confine
from tests.jobs.programs.fixtures import Python

FOUR, SIX = st.ip_addresses(v=4), st.ip_addresses(v=6)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def accepts(program: list[tuple[int, int, int, int]], packet: bytes) -> bool:
    """Run a filter as the kernel would."""
    place, value = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        match code:
            case 0x20 | 0x30:
                begin = operand - 0xFFF00000
                value = int.from_bytes(packet[begin : begin + (4 if code == 0x20 else 1)], "big")
            case 0x54:
                value &= operand
            case 0x15:
                place += if_true if value == operand else if_false
            case 0x06:
                return bool(operand)


def packet_to(address: Address) -> bytes:
    """Return the IP header of a packet to an address."""
    if address.version == 4:
        return bytes([0x45]) + bytes(15) + address.packed
    return bytes([0x60]) + bytes(23) + address.packed


@given(st.lists(FOUR | SIX, max_size=4), FOUR | SIX)
def test_what_is_sent_to_another_address_is_dropped(own: list[Address], other: Address) -> None:
    program = _program(own)
    assert accepts(program, packet_to(other)) == (other in own or other.is_loopback)
    for address in (*own, ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")):
        assert accepts(program, packet_to(address))


@pytest.fixture
def own_address() -> str:
    """Return an address of this machine that is not loopback; nothing is sent to learn it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.fixture
def port() -> Iterator[int]:
    """Return the port of a server that listens on all interfaces."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True


def test_a_server_on_loopback_cannot_be_reached_elsewhere(own_address: str, port: int) -> None:
    assert reachable(own_address, port)
    assert confine(f"127.0.0.1:{port}")
    assert not reachable(own_address, port)
    assert reachable("127.0.0.1", port)


def test_a_server_at_an_interface_can_be_reached_there_and_on_loopback(own_address: str, port: int) -> None:
    assert confine(f"{own_address}:{port}")
    assert reachable(own_address, port)
    assert reachable("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.200", "no.such.host.invalid", "0.0.0.0"])
def test_a_host_that_is_no_address_of_this_machine_changes_nothing(own_address: str, port: int, host: str) -> None:
    assert not confine(f"{host}:{port}")
    assert reachable(own_address, port)


def test_a_port_where_nobody_listens_is_told() -> None:
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        assert not confine(f"127.0.0.1:{idle.getsockname()[1]}")


STRANGER = """
import socket, sys

host, port, accepted = sys.argv[1], int(sys.argv[2]), 0
print("begins", flush=True)
while not accepted:
    try:
        socket.create_connection((host, port), timeout=0.02).close()
        accepted += 1
        print("accepted", flush=True)
    except OSError:
        pass
"""


@contextmanager
def stranger(host: str, port: int) -> Iterator[list[str]]:
    """Let another process try to connect all the time; yields what it says, which is complete at the end."""
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, host, str(port)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        yield said
        child.kill()
        said += child.stdout.read().splitlines()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_nobody_gets_past_the_guard_before_the_server_is_confined(
    own_address: str, family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no IPv6, the guard does as gRPC and listens at 0.0.0.0."""
    monkeypatch.setattr("autograph_rewrite.runtime.job.tf_server._has_six", lambda: family is socket.AF_INET6)
    port = free_port()
    guard = PortGuard(f"127.0.0.1:{port}")
    assert os.environ["TF_GRPC_REUSE_PORT"] == "true"
    assert not reachable(own_address, port)
    is_dual = family is socket.AF_INET6
    with socket.create_server(("", port), family=family, reuse_port=True, dualstack_ipv6=is_dual):
        assert [reachable(own_address, port) for _ in range(2)] == [False] * 2
        assert [reachable("127.0.0.1", port) for _ in range(10)] == [True] * 10
        assert guard.release()
        assert not reachable(own_address, port)
        assert reachable("127.0.0.1", port)
    assert "TF_GRPC_REUSE_PORT" not in os.environ


def test_a_guard_takes_no_port_that_another_has(own_address: str, port: int) -> None:
    PortGuard(f"127.0.0.1:{port}").close()
    assert reachable(own_address, port)


def test_a_guard_without_a_server_tells_that_nothing_is_confined() -> None:
    assert not PortGuard(f"127.0.0.1:{free_port()}").release()


def test_a_server_of_tensorflow_s_is_never_reached_elsewhere(own_address: str, forked_python: Python) -> None:
    """TensorFlow listens on all interfaces by itself; the day it does not, this module can go."""
    code = f"""
import time
import tensorflow as tf
from autograph_rewrite.runtime.job.tf_server import PortGuard, confine
from tests.runtime.test_bind_address import free_port, reachable, stranger

def serve(port):
    tf.distribute.Server({{"worker": [f"127.0.0.1:{{port}}"]}}, job_name="worker", task_index=0)
    time.sleep(0.2)

port = free_port()
with stranger("{own_address}", port) as said:
    serve(port)
    confine(f"127.0.0.1:{{port}}")
print(said, reachable("{own_address}", port))
port = free_port()
with stranger("{own_address}", port) as said:
    guard = PortGuard(f"127.0.0.1:{{port}}")
    serve(port)
    print(guard.release())
print(said, reachable("{own_address}", port), reachable("127.0.0.1", port))
"""
    assert forked_python(code).stdout == "['accepted'] False\nTrue\n[] False True\n"


def test_a_worker_is_never_reached_elsewhere(own_address: str, forked_python: Python) -> None:
    """Nothing of the package has run by then but its import."""
    code = f"""
import json, os
from tests.runtime.test_bind_address import free_port, reachable, stranger

port = free_port()
workers = [f"127.0.0.1:{{port}}", "127.0.0.1:1"]
os.environ["TF_CONFIG"] = json.dumps(
    {{"cluster": {{"worker": workers}}, "task": {{"type": "worker", "index": 0}}}}
)
import tensorflow as tf
from autograph_rewrite.runtime.job.join_on_import import join_on_import

join_on_import()
with stranger("{own_address}", port) as said:
    tf.constant(1) + 1
    print(reachable("{own_address}", port), reachable("127.0.0.1", port), "TF_GRPC_REUSE_PORT" in os.environ)
print(said)
"""
    assert forked_python(code).stdout == "False True False\n[]\n"
