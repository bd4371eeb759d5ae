"""Peer liveness: ping the processes of a job through TensorFlow's worker service.

A killed process refuses the connection; a process that is stopped or cut off does not answer. The survivors raise an
error that names both. No process is asked before a step has failed or takes long.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError

STATUS = "/tensorflow.WorkerService/GetStatus"
PATIENCE = 3.0
"""Seconds for an answer: a living process gives one within milliseconds, however busy it is."""
_LEAST = 1.0
"""Seconds for an answer of a process that has been silent for long already."""
OTHER = "OTHER"
"""The status of a process that answers as another process than expected."""


def silent(member: Membership) -> list[str]:
    """Return the other processes that do not answer, as `worker 1 (10.0.0.2:2222)`."""
    return [name for name, status in ask(others(member, member.cluster), PATIENCE).items() if status != "OK"]


class PeerMonitor:
    """Looks again and again, while a step waits, whether the other processes are still there.

    Args:
        seconds: how long a process that accepts connections may stay silent.
    """

    def __init__(self, member: Membership, seconds: float, *, workers: bool = True, servers: bool = False) -> None:
        jobs = {"worker": member.workers if workers else (), "ps": member.ps if servers else ()}
        self._others = others(member, jobs)
        self._seconds = seconds
        self._silent_since: dict[str, float] = {}

    def lost(self) -> list[str]:
        """Return the processes at whose address nobody listens any more, or that have been silent for too long."""
        now = time.monotonic()
        left = self._seconds - max((now - since for since in self._silent_since.values()), default=0.0)
        answers = ask(self._others, min(PATIENCE, self._seconds, max(left, _LEAST)))
        gone = [name for name, status in answers.items() if status == "UNAVAILABLE"]
        if gone:  # a connection may break once
            again = ask({name: self._others[name] for name in gone}, PATIENCE)
            gone = [name for name in gone if again[name] == "UNAVAILABLE"]
        mute = {name for name, status in answers.items() if status != "OK"}
        self._silent_since = {name: self._silent_since.get(name, now) for name in mute}
        return [name for name in mute if name in gone or time.monotonic() - self._silent_since[name] >= self._seconds]

    def account(self) -> str:
        """Return, for messages, which of the others were silent in the last look."""
        now = time.monotonic()
        silent = [f"{name} has not answered for {now - since:.0f} s" for name, since in self._silent_since.items()]
        return listed(silent) or f"{listed(self._others)} answers, and has not come to what this process waits for"

    def break_off(self, names: Iterable[str]) -> bool:
        """Break the connections to some processes, which ends TensorFlow's waits; return whether there were any."""
        return break_connections(self._others[name] for name in names)

    def break_off_servers(self) -> bool:
        """Break the connections to the parameter servers; return whether there were any."""
        return self.break_off(name for name in self._others if name.startswith("ps "))


def all_answer(addresses: Iterable[str]) -> bool:
    """Return whether some processes all answer; without threads, so that it works while Python ends."""
    return all(_status(address, PATIENCE) == "OK" for address in addresses)


def silent_at_exit(member: Membership) -> list[str]:
    """Return one other worker that does not answer, or []; without threads, for the end of Python."""
    workers = others(member, {"worker": member.workers})
    return next(([name] for name, address in workers.items() if not all_answer([address])), [])


class Presence:
    """Tells which of some processes run: those that accept connections, however busy they are.

    Attributes:
        answered: the last time at which one of them answered, or none ran. A process that accepts connections without
            answering may be stopped, or another program.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = {address: address for address in addresses}
        self.answered = time.monotonic()

    def there(self, patience: float = PATIENCE) -> set[str]:
        """Return the addresses at which a process listens; wait up to `patience` seconds."""
        statuses = ask(self._addresses, patience)
        there = {name for name, status in statuses.items() if status != "UNAVAILABLE"}
        if "OK" in statuses.values() or not there:
            self.answered = time.monotonic()
        return there


def others(member: Membership, jobs: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the addresses of the other processes by name."""
    found = {name_of(job, task, a): a for job, addresses in jobs.items() for task, a in enumerate(addresses)}
    return {name: address for name, address in found.items() if address != member.address}


def ask(addresses: Mapping[str, str], patience: float, *, as_themselves: bool = False) -> dict[str, str]:
    """Ask processes whether they are there; return gRPC's name of the status of each.

    Args:
        addresses: by the name that messages give a process.
        as_themselves: whether a process that answers as another one has the status `OTHER` instead of `OK`.
    """
    if not threading.main_thread().is_alive():
        return dict.fromkeys(addresses, "OK")  # the program ends: no thread can be started any more
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = {
            name: pool.submit(_status, address, patience, _task_of(name) if as_themselves else b"")
            for name, address in addresses.items()
        }
        return {name: answer.result() for name, answer in answers.items()}


def _task_of(name: str) -> bytes:
    """Return how a process called `worker 1 (10.0.0.2:2222)` calls itself: its devices begin with it."""
    job, task, _ = name.split(" ", 2)
    return f"/job:{job}/replica:0/task:{task}/".encode()


def _status(address: str, patience: float, task: bytes = b"") -> str:
    import grpc

    # A blocking call: for others gRPC starts threads, which may disturb the end of Python.
    with closing(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])) as channel:
        call = channel.unary_unary(STATUS, request_serializer=None, response_deserializer=None)
        try:
            answer: bytes = call(b"", timeout=patience)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK" if task in answer else OTHER


def name_of(job: str, task: int, address: str) -> str:
    """Return what messages call a process: `worker 1 (10.0.0.2:2222)`."""
    return f"{job} {task} ({address})"


def listed(names: Iterable[str]) -> str:
    """Return names as one text, for a message."""
    return ", ".join(names)


def workers_in(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of the workers among the names of processes, as `name_of` gives them."""
    return tuple(int(name.split(" ", 2)[1]) for name in names if name.startswith("worker "))


# The sockets of this process, TensorFlow's included: find them by address, and shut them down.
#
# TensorFlow waits without end for a process that is stopped or cut off from the network, and closing the session does
# not help. When the connection is broken, TensorFlow treats the process as one that has died.

Place = tuple[str, int]


def sockets() -> Iterator[socket.socket]:
    """Yield the sockets of this process, each opened a second time; close them. None if this is not Linux."""
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
    """Yield the places (IP address, port) of an address (host:port)."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        for *_, place in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            yield _place(place)


def _place(place: tuple[object, ...]) -> Place:
    """Return an address in one spelling: an IPv4 address is often mapped to IPv6."""
    found = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found), int(str(place[1]))


# Map errors of TensorFlow to failures of peers.

_OF_THE_JOB = ("DeadlineExceededError", "CancelledError", "UnavailableError", "AbortedError", "InternalError")
_SIGNS = (
    "Collective ops is aborted",
    "RingReduce",
    "RingGather",
    "Connection reset",
    "Socket closed",
    "worker/replica",
)
_REFUSED = "Restart your program to reset"
"""In TensorFlow's error of every collective after one was broken off other than by the failure of its step."""
_ENDED_BY_ANOTHER = ("InternalError", "UnavailableError", "AbortedError")
_ENDS, _GLANCE = 3.0, 0.1
"""Seconds that a worker may still answer while it ends, because its step has failed; and between two looks."""

_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
"""TensorFlow's name of the node that failed: in a step, the collective that was waited for."""


def is_of_the_job(error: Exception) -> bool:
    """Return whether another process, not the user's computation, may have caused a failure of TensorFlow."""
    kind, text = type(error).__name__, str(getattr(error, "message", error))
    return kind in _OF_THE_JOB[:4] or (kind == "InternalError" and any(sign in text for sign in _SIGNS))


def missing(
    member: Membership,
    what: str,
    seconds: float,
    error: Exception | None = None,
    lost: Sequence[str] = (),
    differs: Callable[[], ClusterError | None] | None = None,
) -> ClusterError:
    """Return the error of a worker that waited in vain, with the names of the processes that do not answer.

    Args:
        lost: the processes that are known not to answer.
        differs: returns the error of a difference between workers; asked if all answer.
    """
    quiet = lost or _silent(member, error)
    node = _NODE.search(str(getattr(error, "message", "")))
    where = node.group(1) if node is not None else None
    if quiet:
        problem = f"{member.name} waited for {listed(quiet)} to {what}: no answer"
        hint = "look at what it printed last; start the job again once it can run"
        found = ClusterError(problem, where=where, hint=hint)
        found.lost = workers_in(quiet)
        return found
    text = str(getattr(error, "message", error))
    if _REFUSED in text:
        return ClusterError(
            f"{member.name} failed to {what}: TensorFlow refuses all collectives once one was broken off",
            where=where,
            hint="start the job again; `launch --elastic` does that by itself",
        )
    difference = differs() if differs is not None else None
    if difference is not None:
        return difference
    if error is not None and type(error).__name__ not in ("DeadlineExceededError", "CancelledError"):
        lines = text.strip().splitlines()
        problem = f"{member.name} failed to {what}: {lines[0][:300] if lines else type(error).__name__}"
        return ClusterError(problem, where=where)
    return ClusterError(
        f"{member.name} waited {seconds:g} s for the other workers to {what}; all processes answer",
        where=where,
        hint="do all workers run the same program, fetch the same values, and have equally many batches? If one of "
        "them is only slower, raise timeout_seconds",
    )


def _silent(member: Membership, error: Exception | None) -> list[str]:
    """Return the processes that do not answer; one that may have ended a collective gets time to end."""
    ends = time.monotonic() + (_ENDS if type(error).__name__ in _ENDED_BY_ANOTHER else 0.0)
    while not (quiet := silent(member)) and time.monotonic() < ends:
        time.sleep(_GLANCE)
    return quiet
