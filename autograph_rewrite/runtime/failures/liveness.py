"""Peer liveness: ping the processes of a job through TensorFlow's own worker service.

A process that was killed refuses the connection, one that was stopped or cut off does not answer; both are named in the
error that the survivors raise. Nobody is asked before something has gone wrong, or takes long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.runtime.failures.sockets import break_connections

STATUS = "/tensorflow.WorkerService/GetStatus"
PATIENCE = 3.0
"""Seconds for an answer: a living process gives one within milliseconds, however busy it is."""
_LEAST = 1.0
"""Seconds for an answer of one who has been silent for long already."""
OTHER = "OTHER"
"""The status of a process that answers as somebody else."""


def silent(member: Membership, patience: float = PATIENCE) -> list[str]:
    """Return the other processes that do not answer, as `worker 1 (10.0.0.2:2222)`."""
    return [name for name, status in ask(others(member, member.cluster), patience).items() if status != "OK"]


class PeerMonitor:
    """Looks again and again, while a step waits, whether the other processes are still there.

    Args:
        member: this process.
        seconds: how long one that is there may stay silent.
        workers: look for the other workers.
        servers: look for the parameter servers.
    """

    def __init__(self, member: Membership, seconds: float, *, workers: bool = True, servers: bool = False) -> None:
        jobs = {"worker": member.workers if workers else (), "ps": member.ps if servers else ()}
        self._others = others(member, jobs)
        self._seconds = seconds
        self._silent_since: dict[str, float] = {}

    def lost(self) -> list[str]:
        """Return who has ended, for nobody listens at its address any more, or has been silent for too long."""
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
        """Return what was last seen of the others, for messages."""
        now = time.monotonic()
        silent = [f"{name} has not answered for {now - since:.0f} s" for name, since in self._silent_since.items()]
        return listed(silent) or f"{listed(self._others)} answers, and has not come to what this process waits for"

    def break_off(self, names: Iterable[str]) -> bool:
        """Break the connections to those who were lost, so that TensorFlow does not wait for them; tell if any were."""
        return break_connections(self._others[name] for name in names)

    def break_off_servers(self) -> bool:
        """Break the connections to the parameter servers; tell if there were any."""
        return self.break_off(name for name in self._others if name.startswith("ps "))


def all_answer(addresses: Iterable[str]) -> bool:
    """Return whether all of some processes answer; they are asked one by one, which goes while Python ends, too."""
    return all(_status(address, PATIENCE) == "OK" for address in addresses)


def silent_at_exit(member: Membership) -> list[str]:
    """Return one other worker that does not answer, if there is one: Python has no threads while it ends.

    Args:
        member: this process.
    """
    workers = others(member, {"worker": member.workers})
    return next(([name] for name, address in workers.items() if not all_answer([address])), [])


class Presence:
    """Tells which of some processes are there: they accept connections, however busy they are.

    Args:
        addresses: theirs.

    Attributes:
        answered: when one of them has last answered, or none was there; who only accepts connections may be stopped,
            or another program.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = {address: address for address in addresses}
        self.answered = time.monotonic()

    def there(self, patience: float = PATIENCE) -> set[str]:
        """Return the addresses at which somebody listens.

        Args:
            patience: seconds to wait for an answer.
        """
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
    """Return what becomes of asking each: gRPC's name of the status.

    Args:
        addresses: by what messages call a process.
        patience: seconds to wait for an answer.
        as_themselves: `OTHER` instead of `OK` for one that says to be another process of a job.
    """
    if not threading.main_thread().is_alive():
        return dict.fromkeys(addresses, "OK")  # the program ends: no threads can be had any more, and nobody cares
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

    # A call that blocks: others have gRPC start threads, which may be in the way when Python ends.
    with contextlib.closing(grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])) as channel:
        call = channel.unary_unary(STATUS, request_serializer=None, response_deserializer=None)
        try:
            answer: bytes = call(b"", timeout=patience)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK" if task in answer else OTHER


def name_of(job: str, task: int, address: str) -> str:
    """Return what messages call a process.

    Args:
        job: such as "worker".
        task: its number in the job.
        address: `host:port`.
    """
    return f"{job} {task} ({address})"


def listed(names: Iterable[str]) -> str:
    """Return names for a message."""
    return ", ".join(names)


def workers_in(names: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of the workers among processes that are called as `name_of` does."""
    return tuple(int(name.split(" ", 2)[1]) for name in names if name.startswith("worker "))
