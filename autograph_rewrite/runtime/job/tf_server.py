"""This process in its job: TensorFlow's server, which the eager runtime starts, used by all modes.

    TF_CONFIG ──► join() ──► the eager runtime starts a gRPC server when the first op runs
                               ├─ functions and Keras: collectives over all workers
                               └─ sessions: target grpc://<this worker>, the same server

TensorFlow fixes its devices when the first op runs, and variables made before could not be read any more after a server
took over. So a worker joins when TensorFlow is imported (`join_on_import`), which only says how to start: no port is
opened, and nothing waits for anybody, before the program runs its first op.

TensorFlow's server is not authenticated, and it listens on all interfaces whatever address it is given; `bind_address`
confines it to the configured one, and guards the port until it has.
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
    """Join the job that environment and command line describe; what is wrong with it is told once it is needed."""
    try:
        member = membership_of(chosen_config(None))
    except ConfigError:
        return
    if member is not None and member.is_worker:
        join(member, required=False)


def join(member: Membership, *, required: bool = True) -> None:
    """Make this process a worker of its job.

    Args:
        required: raise if that comes too late, because TensorFlow has started already.

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
    """Return what a session connects to; starts the server if it does not run yet."""
    tf_private.context().ensure_initialized()
    known = _server()
    if not known.is_confined and not known.is_told:
        known.is_told = True
        warnings.warn(open_to_all(member), stacklevel=2)
    return f"grpc://{member.address}"


def configure(config: Any, member: Membership, servers: Iterable[str] = ()) -> None:
    """Tell a session, or the server, whom to meet.

    Args:
        servers: devices of other processes that hold variables; a session waits for those processes when it starts.
    """
    config.experimental.collective_group_leader = LEADER
    if not config.device_filters:
        own = f"/job:{member.job}/replica:0/task:{member.task}"
        holders = (process_of(device) for device in servers)
        config.device_filters.extend(dict.fromkeys((own, *holders)))


def session_of(graph: Any, member: Membership, devices: Iterable[str] = (), at: str = "") -> Any:
    """Return a session of what this process runs with others.

    Args:
        at: the target that it connects to; "": this process's own.
    """
    v1 = tensorflow().compat.v1
    config = v1.ConfigProto()
    configure(config, member, devices)
    return v1.Session(at or target(member), graph=graph, config=config)


def meet(member: Membership, seconds: float, what: str) -> None:
    """Wait until all other workers answer: TensorFlow would wait for them without end.

    Raises:
        ClusterError: somebody is not there in time.
    """
    target(member)  # this one has to answer, too
    meetings().meet(others(member, {"worker": member.workers}), seconds, what)


def meetings() -> Meetings:
    """Return whom this process has met."""
    return _server().meetings


def counts() -> Counts:
    """Return what this process has counted since it joined its job."""
    return _server().counts


def _server() -> ServerDef:
    """Return what TensorFlow's server is started from, in a process that has joined its job."""
    known: ServerDef = tf_private.collective_server()
    return known


def be_patient(member: Membership, seconds: float) -> None:
    """Note how long the program's configuration lets this process wait for others, for what is not given one."""
    known = tf_private.collective_server()
    if isinstance(known, ServerDef) and known.member == member:
        known.patience = seconds


def patience(default: float) -> float:
    """Return how long the program's configuration lets this process wait for others.

    Args:
        default: in seconds, before the program has given one.
    """
    known = tf_private.collective_server()
    return known.patience if isinstance(known, ServerDef) and known.patience is not None else default


def abort_when_lost(member: Membership, seconds: float) -> None:
    """Let all collectives of functions fail, with the reason, once a worker is not there any more; from now on.

    For steps that another function runs, so that there is nothing to cancel, and no error of theirs to replace: a
    connection that breaks in the middle of an exchange ends the step with TensorFlow's words. Who is gone is printed.
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
    """What a process counts; all workers count alike.

    Attributes:
        exchanges: numbers of exchanges outside of a step.
        channels: of series of exchanges that keep their own time.
        accounts: of exchanges of accounts, between workers that tell each other what they do.
        failures: how many steps have failed after which all workers carry on together.
        numbers: how many numbers runs with collectives have used up.
        has_failed: whether the last run of worker 0 for all has failed, and its number will be the next one's.
        stays: what waits for the other workers when the program ends, in its order.
    """

    exchanges: Iterator[int] = field(default_factory=lambda: count(1))
    channels: Iterator[int] = field(default_factory=lambda: count(1))
    accounts: Iterator[int] = field(default_factory=lambda: count(1))
    failures: int = 0
    numbers: int = 0
    has_failed: bool = False
    stays: list[Callable[[], None]] = field(default_factory=list)


class ServerDef:
    """What TensorFlow starts its server from, made when it asks: by then the program may have asked for devices."""

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
        """Return this process's part in the job, which TensorFlow asks for as soon as it has started the server."""
        if self._guard is not None:
            self.is_confined = self._guard.release()
            self._guard = None
        return self.member.job

    def __getattr__(self, name: str) -> Any:
        """Read a field of the message."""
        return getattr(self._message(), name)

    def SerializeToString(self) -> bytes:
        """Return the message, for TensorFlow to start its server.

        Raises:
            ClusterError: it could not.
        """
        if self._guard is not None:  # TensorFlow tries again
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
    """Raise if somebody listens at this process's port; TensorFlow says no more than that it could not."""
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
    """Return what to say of a server that could not be confined."""
    return (
        f"TensorFlow's server listens on all interfaces, not only at {member.address}: its port "
        "must be closed to everybody but the processes of this job"
    )


# Handshake: all processes have identified themselves before TensorFlow first blocks on one of them.
#
#     nobody there            connection refused      the process has not come yet, or has ended
#     there, and silent       no answer in time       it is stopped, cut off, or another program
#     there, somebody else    answers wrongly         another program, or a process of another job
#
# TensorFlow itself waits without end: for the worker that numbers the steps of all, and for all whom a session needs.

_TELL = 0.5
"""Share of the time to wait that is left when that is said."""
_REPEAT = 0.2
"""Seconds between two looks for somebody who is still starting."""
_SAID = {
    "UNAVAILABLE": "",
    "DEADLINE_EXCEEDED": ", where somebody listens but does not answer,",
    liveness.OTHER: ", where a process of another job listens,",
}
_STRANGER = ", where another program listens,"
_HINT = "start all processes of the job, each at its own address; look at what it printed last"


class Meetings:
    """Which processes this one has met."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._met: set[str] = set()

    def meet(self, others: Mapping[str, str], seconds: float, what: str, hint: str = _HINT) -> None:
        """Wait until some processes answer; who had answered before may not be gone.

        Raises:
            ClusterError: somebody is not there in time.
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
    """Return who is not there, with what is known of each.

    Args:
        statuses: gRPC's name of what became of asking, by name.
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
# Whoever reaches such a server may run any graph in its process, and there is no password. TensorFlow has no option for
# the interface, so the kernel drops what was not sent to the right address: a socket filter needs no privileges, and
# the connections that a listening socket accepts inherit it. Loopback always works.
#
# A filter can only be attached to a server that listens already. What comes before that goes to a guard:
#
#     guard = Guard("10.0.0.1:2222")   listens at [::]:2222, and answers nobody
#     tf.distribute.Server(...)        shares the port (SO_REUSEPORT), and is given what was sent to 10.0.0.1
#     guard.release()                  the server's own sockets have filters, so the guard goes

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


class PortGuard:
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
    """The addresses of this machine at which a server is to be reached; none where that cannot be told, or be done."""
    host, found = address.rpartition(":")[0].strip("[]"), list[_Address]()
    if sys.platform == "linux":
        with suppress(OSError):
            for family, _, _, _, place in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.bind((place[0], 0))  # only an address of our own can be bound
                    found.append(ipaddress.ip_address(str(place[0]).partition("%")[0]))
    return [] if any(own.is_unspecified for own in found) else found


def _listeners(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that listen at a port, opened a second time."""
    for found in sockets():
        is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        listens = is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and found.getsockname()[1] == port:
            yield found
        else:
            found.close()


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
