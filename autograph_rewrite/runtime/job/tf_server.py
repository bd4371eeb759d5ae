"""Join the job of this process: configure and confine TensorFlow's server, which the eager runtime starts.

    TF_CONFIG ──► join() ──► the eager runtime starts a gRPC server when the first op runs
                               ├─ functions and Keras: collectives over all workers
                               └─ sessions: target grpc://<this worker>, the same server

TensorFlow fixes its devices when the first op runs, and a server that starts later makes earlier variables unreadable.
So a worker joins when TensorFlow is imported (`join_on_import`). Joining only prepares the start: before the program
runs its first op, no port is open and no process waits for another.

TensorFlow's server has no authentication, and listens on all interfaces whatever address it is given. `confine`
restricts it to the configured address, and `PortGuard` guards the port until then.
"""

from __future__ import annotations

import atexit
import ctypes
import ipaddress
import os
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from autograph_rewrite import tf_private
from autograph_rewrite.cluster.membership import Membership, membership_of
from autograph_rewrite.errors import ClusterError, ConfigError
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.selected import chosen_config
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job import liveness
from autograph_rewrite.runtime.job.background_thread import repeat
from autograph_rewrite.runtime.job.liveness import PeerMonitor, listed, others, silent_at_exit, sockets
from autograph_rewrite.runtime.job.say import say

LEADER = "/job:worker/replica:0/task:0"
_ASK = 2.0
"""Seconds from one look at the other workers to the next."""


def join_early() -> None:
    """Join the job that environment and command line describe; errors in them are reported when a job is needed."""
    try:
        member = membership_of(chosen_config(None))
    except ConfigError:
        return
    if member is not None and member.is_worker:
        join(member, required=False)


def join(member: Membership, *, required: bool = True) -> None:
    """Make this process a worker of its job.

    Args:
        required: raise if it is too late, because TensorFlow has started already.

    Raises:
        ClusterError: TensorFlow has started, without the server or with another one.
    """
    known = tf_private.collective_server()
    if isinstance(known, ServerDef):
        if known.member == member:
            return
        raise ClusterError(
            f"this process is {known.member.name} of {len(known.member.workers)} already, by {known.member.source}",
            hint="a process can be in one job only: start another one",
        )
    if not tf_private.has_started():
        tf_private.context().enable_collective_ops(ServerDef(member))
    elif required:
        raise ClusterError(
            f"TensorFlow has started already, so {member.name} cannot join the job any more",
            hint="start the program with `autograph-rewrite launch` or `run`, which join first; or import "
            "autograph_rewrite before the program's first TensorFlow operation; or add this line there:\n"
            "       ar.join(config)",
        )


def target(member: Membership) -> str:
    """Return the address that a session connects to; start the server if it does not run yet."""
    tf_private.context().ensure_initialized()
    known = _server()
    if not known.is_confined and not known.is_told:
        known.is_told = True
        warnings.warn(open_to_all(member), stacklevel=2)
    return f"grpc://{member.address}"


def configure(config: Any, member: Membership, servers: Iterable[str] = ()) -> None:
    """Set the collective leader in the configuration of a session or server, and the processes to connect to.

    Args:
        servers: devices of other processes that hold variables; a session waits for these when it starts.
    """
    config.experimental.collective_group_leader = LEADER
    if not config.device_filters:
        own = f"/job:{member.job}/replica:0/task:{member.task}"
        holders = (process_of(device) for device in servers)
        config.device_filters.extend(dict.fromkeys((own, *holders)))


def session_of(graph: Any, member: Membership, devices: Iterable[str] = (), at: str = "") -> Any:
    """Return a session of a graph that this process runs with others.

    Args:
        at: the target that it connects to; "": this process's server.
    """
    v1 = tensorflow().compat.v1
    config = v1.ConfigProto()
    configure(config, member, devices)
    return v1.Session(at or target(member), graph=graph, config=config)


def meet(member: Membership, seconds: float, what: str) -> None:
    """Wait until all other workers answer: TensorFlow would wait for them without end.

    Raises:
        ClusterError: a worker does not answer in time.
    """
    target(member)  # starts the server: the others wait for an answer of this process, too
    meetings().meet(others(member, {"worker": member.workers}), seconds, what)


def meetings() -> Meetings:
    """Return the record of the processes that this one has met."""
    return _server().meetings


def counts() -> Counts:
    """Return the counters of this process since it joined its job."""
    return _server().counts


def _server() -> ServerDef:
    """Return the definition of TensorFlow's server, in a process that has joined its job."""
    known: ServerDef = tf_private.collective_server()
    return known


def be_patient(member: Membership, seconds: float) -> None:
    """Store the timeout of the program's configuration, for functions that get no configuration."""
    known = tf_private.collective_server()
    if isinstance(known, ServerDef) and known.member == member:
        known.patience = seconds


def patience(default: float) -> float:
    """Return for how many seconds the program's configuration lets this process wait for others.

    Args:
        default: before the program has given a configuration.
    """
    known = tf_private.collective_server()
    return known.patience if isinstance(known, ServerDef) and known.patience is not None else default


def abort_when_lost(member: Membership, seconds: float) -> None:
    """From now on, abort all collectives of functions once a worker is lost, and print which one.

    For steps inside another function, which can be neither cancelled nor given another error. If a connection breaks
    during an exchange, the step ends with TensorFlow's message.
    """
    if _server().is_guarded:
        return
    _server().is_guarded = True
    lookout = PeerMonitor(member, seconds)

    def guard() -> bool:
        lost = lookout.lost()
        if lost:
            atexit.unregister(at_exit)
            tf_private.context().abort_collective_ops(tensorflow().errors.UNAVAILABLE, _say(member, lost))
        return not lost

    def at_exit() -> None:
        if isinstance(getattr(sys, "last_value", None), tensorflow().errors.OpError):  # sooner than the next look
            lost = silent_at_exit(member)
            if lost:
                _say(member, lost)

    repeat(guard, _ASK)
    atexit.register(at_exit)


def _say(member: Membership, lost: list[str]) -> str:
    problem = f"{member.name} waited for {listed(lost)}: no answer"
    say(problem)
    return problem


@dataclass
class Counts:
    """The counters of a process, equal on all workers.

    Attributes:
        exchanges: numbers of exchanges outside of a step.
        channels: numbers of series of exchanges that run in parallel with steps.
        accounts: numbers of exchanges of step accounts.
        failures: how many steps have failed after which all workers carry on together.
        numbers: how many step numbers runs with collectives have used up.
        has_failed: whether the last run of worker 0 for all has failed, so that the next gets its number.
        stays: functions that wait for the other workers when the program ends.
    """

    exchanges: Iterator[int] = field(default_factory=lambda: count(1))
    channels: Iterator[int] = field(default_factory=lambda: count(1))
    accounts: Iterator[int] = field(default_factory=lambda: count(1))
    failures: int = 0
    numbers: int = 0
    has_failed: bool = False
    stays: list[Callable[[], None]] = field(default_factory=list)


class ServerDef:
    """The definition from which TensorFlow starts its server.

    The message is built when TensorFlow asks for it: until then the program may configure devices.
    """

    def __init__(self, member: Membership) -> None:
        self.member = member
        self.meetings = Meetings(member)
        self.counts = Counts()
        self.patience: float | None = None
        self.is_guarded = False
        self.is_confined = False
        self.is_told = False
        self._guard: PortGuard | None = None

    @property
    def job_name(self) -> str:
        """Return `worker` or `ps`, and confine the server: TensorFlow reads this when the server has started."""
        if self._guard is not None:
            self.is_confined = self._guard.release()
            self._guard = None
        return self.member.job

    def __getattr__(self, name: str) -> Any:
        """Read a field of the message."""
        return getattr(self._message(), name)

    def SerializeToString(self) -> bytes:
        """Return the message, and guard the port until the server has started.

        Raises:
            ClusterError: the port is taken.
        """
        if self._guard is not None:  # the last start failed, and TensorFlow tries again
            self._guard.close()
        require_free(self.member)
        encoded: bytes = self._message().SerializeToString()
        self._guard = PortGuard(self.member.address)
        return encoded

    def _message(self) -> Any:
        tf = tensorflow()
        config = tf.compat.v1.ConfigProto()
        config.CopyFrom(tf_private.context().config)
        configure(config, self.member)
        cluster = tf.train.ClusterDef()
        for name, addresses in self.member.cluster.items():
            job = cluster.job.add(name=name)
            for task, address in enumerate(addresses):
                job.tasks[task] = address
        return tf.train.ServerDef(
            cluster=cluster,
            job_name=self.member.job,
            task_index=self.member.task,
            default_session_config=config,
            protocol="grpc",
        )


def require_free(member: Membership) -> None:
    """Raise if the port of this process is taken; TensorFlow's error does not say so."""
    port = int(member.address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last job may linger
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"{member.name} cannot listen at {member.address}: {error.strerror}",
                hint="is it running already, or another job? Each process needs a port of its own",
            ) from None


def open_to_all(member: Membership) -> str:
    """Return the warning about a server that could not be confined."""
    return (
        f"TensorFlow's server listens on all interfaces, not only at {member.address}: its port "
        "must be closed to everybody but the processes of this job"
    )


# Handshake: all processes identify themselves before TensorFlow first blocks on one of them.
#
#     nobody there            connection refused      the process has not come yet, or has ended
#     there, and silent       no answer in time       it is stopped, cut off, or another program
#     there, somebody else    answers wrongly         another program, or a process of another job
#
# TensorFlow itself waits without end: for the worker that numbers all steps, and for all processes of a session.

_TELL = 0.5
"""Share of the timeout that is left when a message says that this process waits."""
_REPEAT = 0.2
"""Seconds between two questions to a process that has not answered yet."""
_SAID = {
    "UNAVAILABLE": "",
    "DEADLINE_EXCEEDED": ", where somebody listens but does not answer,",
    liveness.OTHER: ", where a process of another job listens,",
}
_STRANGER = ", where another program listens,"
_HINT = "start all processes of the job, each at its own address; look at what it printed last"


class Meetings:
    """Waits for other processes, and records which ones have answered."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._met: set[str] = set()

    def meet(self, others: Mapping[str, str], seconds: float, what: str, hint: str = _HINT) -> None:
        """Wait until some processes answer.

        Raises:
            ClusterError: one does not answer in time, or has answered before and is gone.
        """
        deadline, is_told = time.monotonic() + seconds, False
        absent, gone = dict(others), set[str]()
        while absent:
            left = deadline - time.monotonic()
            statuses = liveness.ask(absent, min(liveness.PATIENCE, max(left, _REPEAT)), as_themselves=True)
            absent = {name: address for name, address in absent.items() if statuses[name] != "OK"}
            before, gone = gone, {n for n in absent if n in self._met and statuses[n] == "UNAVAILABLE"}
            if absent and (time.monotonic() >= deadline or gone & before):  # a connection may break once
                self._met -= gone
                names = absent_with_status(absent, statuses)
                found = ClusterError(f"{self._member.name} waited for {names} to {what}: no answer", hint=hint)
                found.lost = liveness.workers_in(sorted(absent))
                raise found
            if absent:
                if deadline - time.monotonic() < seconds * _TELL and not is_told:
                    is_told = True
                    names, ends = absent_with_status(absent, statuses), f"after {seconds:g} s (timeout_seconds) it ends"
                    say(f"{self._member.name} has waited {seconds * (1 - _TELL):.0f} s for {names} to {what}; {ends}")
                time.sleep(_REPEAT)
        self._met |= others.keys()


def absent_with_status(absent: Iterable[str], statuses: Mapping[str, str]) -> str:
    """Return the names of absent processes, each with the meaning of its status.

    Args:
        statuses: gRPC's status of asking each process, by name.
    """
    return liveness.listed(f"{name}{_SAID.get(statuses[name], _STRANGER)}" for name in sorted(absent))


def homes_of(member: Membership, plan: Plan) -> dict[str, str]:
    """Return the addresses of the other processes whose devices hold variables, by name."""
    wanted = {process_of(home) for home in plan.homes.values()}
    return {
        liveness.name_of(job, task, address): address
        for job, addresses in member.cluster.items()
        for task, address in enumerate(addresses)
        if address != member.address and f"/job:{job}/replica:0/task:{task}" in wanted
    }


# Bind TensorFlow's server to the address that the cluster specification names, and to no other.
#
#     tf.distribute.Server at 10.0.0.1:2222      listens at [::]:2222, whatever the cluster says
#     confine("10.0.0.1:2222")                   who connects to another address of this host gets no answer
#
# Any client of this server can run any graph in its process, without a password. TensorFlow has no option for the
# interface, so the kernel drops packets to other addresses: a socket filter needs no privileges, and the connections
# that a listening socket accepts inherit it. Loopback always works.
#
# A filter can only be attached to a server that listens already. A guard takes earlier connections:
#
#     guard = PortGuard("10.0.0.1:2222")   listens at [::]:2222, and answers nobody
#     tf.distribute.Server(...)            shares the port (SO_REUSEPORT), and is given what was sent to 10.0.0.1
#     guard.release()                      the server's own sockets have filters, so the guard goes

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
"""The variable that TensorFlow reads when it starts a server: whether other sockets may share its port."""


class PortGuard:
    """Listens at the port of a server before the server does, and drops connections to other addresses.

    All sockets of one user that share a port are a group, in the order of their binding. The first socket attaches a
    program that chooses one for each connection: number 0, the guard, which drops everything, or 1, the server.
    """

    def __init__(self, address: str) -> None:
        """Begin to guard; do nothing where this is not Linux, or the server cannot be confined (see `confine`).

        Args:
            address: of the server that is going to start, as host:port; its port is free.
        """
        self._address, self._port, self._wanted = address, _port(address), _wanted(address)
        self._before = os.environ.get(_SHARED)
        self._socket = _guard(self._port, self._wanted)
        if self._socket is not None:
            os.environ[_SHARED] = "true"

    def release(self) -> bool:
        """Confine the server, which has started, and close the guard; return whether the server is confined."""
        if self._socket is None:
            return confine(self._address)
        with ExitStack() as opened:
            guard = os.fstat(self._socket.fileno()).st_ino
            listeners = [opened.enter_context(each) for each in _listeners(self._port)]
            served = [each for each in listeners if os.fstat(each.fileno()).st_ino != guard]
            for each in served:
                _attach(each, _program(self._wanted))
            self.close()
            for each in served[:1]:  # all sockets share one choosing program, which is needed no more
                each.setsockopt(socket.SOL_SOCKET, _DETACH_REUSEPORT_FILTER, 0)
        return bool(served)

    def close(self) -> None:
        """Close the socket, and restore the environment."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        os.environ.pop(_SHARED)
        if self._before is not None:
            os.environ[_SHARED] = self._before


def _guard(port: int, wanted: Sequence[_Address]) -> socket.socket | None:
    """Return a socket that listens at a port and answers nobody; None where that is impossible."""
    if not wanted:
        return None
    has_six = _has_six()
    found = socket.socket(socket.AF_INET6 if has_six else socket.AF_INET)
    try:
        if has_six:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last job may linger
        found.bind(("", port))  # before SO_REUSEPORT, so that it fails if the port is taken
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _attach(found, [_DROP])
        _attach(found, _program(wanted, 1), _ATTACH_REUSEPORT_FILTER)
        found.listen()
    except OSError:  # a kernel before 4.6, or a sandbox without socket filters
        found.close()
        return None
    return found


def _has_six() -> bool:
    """Return whether gRPC listens at [::], for IPv4 and IPv6, not at 0.0.0.0: it makes the same test."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def confine(address: str) -> bool:
    """Restrict the server that listens at the port of `address` to that address and loopback.

    Returns:
        Whether it was done: not if this is not Linux, nobody listens there, or the host is no address of this
        machine (for example one that a router translates) or means all of them (0.0.0.0).
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
    """Return the addresses of this machine at which a server is to be reached; none where `confine` does nothing."""
    host, found = address.rpartition(":")[0].strip("[]"), list[_Address]()
    if sys.platform == "linux":
        with suppress(OSError):
            for family, _, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.bind((place[0], 0))  # only an address of this machine can be bound
                    found.append(ipaddress.ip_address(str(place[0]).partition("%")[0]))
    return [] if any(own.is_unspecified for own in found) else found


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yield the sockets of this process that listen at a port, each opened a second time."""
    for found in sockets():
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        listens = is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and found.getsockname()[1] == port:
            yield found
        else:
            found.close()


def _program(addresses: Sequence[_Address], accepted: int = _WHOLE) -> list[_Instruction]:
    """Return a filter that yields `accepted` for packets to one of these addresses or to loopback, else 0."""
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
