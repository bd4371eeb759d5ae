"""A job of which one process is absent, stopped, cut off or replaced by a stranger, at the start or in mid-step.

Network        every process finds every other one behind a link, which can be blocked and cut
Stranger       listens where a process should: it says nothing, talks another protocol, or is of another job
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tests.jobs.programs.fixtures import Jobs, free_ports, tf_config, until
from tests.jobs.programs.nursery import Worker
from tests.jobs.programs.proxy import Link

TRAINING = "tests/jobs/programs/training.py"
ROLES = {"chief": 0, "worker": 1, "server": 2}
"""The processes of a job of two workers and, perhaps, a parameter server."""
FAULTS = ("absent", "stopped", "cut", "stranger")
SIGNALS = {"absent": signal.SIGKILL, "stopped": signal.SIGSTOP}
LIMIT = 180


class Network:
    """One link for each direction between two of `count` processes."""

    def __init__(self, count: int) -> None:
        self.ports = free_ports(count)
        self._pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        self.links: dict[tuple[int, int], Link] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        for a, b in self._pairs:
            self.links[a, b] = self._stack.enter_context(Link(self.ports[b]))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def addresses(self, task: int) -> list[str]:
        """Return the addresses that a process is told."""
        seen = [
            port if other == task else self.links[task, other].port if self.links else port
            for other, port in enumerate(self.ports)
        ]
        return [f"127.0.0.1:{port}" for port in seen]

    def between(self, a: int, b: int) -> Iterator[Link]:
        """Yield the links of both directions."""
        yield self.links[a, b]
        yield self.links[b, a]

    def around(self, one: int) -> Iterator[Link]:
        """Yield all links to and from a process."""
        yield from (link for pair, link in self.links.items() if one in pair)


class Stranger:
    """Somebody else at a port; use it as a context manager.

    Args:
        port: where it listens.
        kind: "silent" says nothing, "web" talks HTTP, "other" is a process of another job.
    """

    def __init__(self, port: int, kind: str = "silent") -> None:
        self._kind = kind
        self._server: Any = None
        if kind == "other":
            self._server = _other_process(port)
            return
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end = time.monotonic() + 10
        while True:
            try:
                self._listener.bind(("127.0.0.1", port))
                break
            except OSError:
                assert time.monotonic() < end, "the port does not get free"
                time.sleep(0.01)
        self._listener.listen(64)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop(0)
            return
        self._listener.close()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                if self._kind == "web":
                    near.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    near.close()


def _other_process(port: int) -> Any:
    """Return a server that answers as TensorFlow's of worker 7 would."""
    import grpc

    def status(_: bytes, __: Any) -> bytes:
        return b"\x0a\x2a/job:worker/replica:0/task:7/device:CPU:0"

    handler = grpc.unary_unary_rpc_method_handler(status)
    server = grpc.server(ThreadPoolExecutor(1))
    generic = grpc.method_handlers_generic_handler("tensorflow.WorkerService", {"GetStatus": handler})
    server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server


@dataclass(frozen=True)
class Trouble:
    """What happens to whom, and when.

    Attributes:
        mode: of training.
        kind: how the job is distributed: "replicas", "served" or "stages".
        role: of who gets into trouble.
        fault: what becomes of it.
        when: "start" or "step"; of worker 0, also once it has "met" worker 1, or worker 1 has an "open" session: then
            it is the one who disturbs.
        stranger: what kind of stranger.
    """

    mode: str
    kind: str
    role: str
    fault: str
    when: str
    stranger: str = "silent"

    @property
    def __name__(self) -> str:
        """What the test is called."""
        who = f"-{self.stranger}" if self.stranger != "silent" else ""
        return f"{self.mode}-{self.kind}-{self.role}-{self.fault}{who}-at-{self.when}"

    @property
    def victim(self) -> int:
        """The number of the process."""
        return ROLES[self.role]

    @property
    def name(self) -> str:
        """What messages call it."""
        return "ps 0" if self.role == "server" else f"worker {self.victim}"


@dataclass
class Outcome:
    """What the workers that are left did.

    Attributes:
        left: those workers.
        seconds: how long each took to end.
    """

    left: list[Worker]
    seconds: list[float]


def run(trouble: Trouble, jobs: Jobs, patience: float) -> Outcome:
    """Run a job and let happen what happens; return when all workers that are left have ended, or LIMIT has passed."""
    count = 3 if trouble.kind == "served" else 2
    strategy = {"served": {"JOB_STRATEGY": "PSLoadBalancing"}, "stages": {"JOB_STAGES": "1"}}.get(trouble.kind, {})
    environ = {"JOB_TIMEOUT": str(patience), "JOB_PAUSE": "0.02", **strategy}
    if trouble.when in ("met", "open"):
        environ["JOB_DISTURBS"] = f"{trouble.when}:{SIGNALS[trouble.fault]:d}"
    with ExitStack() as stack:
        network = stack.enter_context(Network(count)) if trouble.fault == "cut" else Network(count)
        at_start = trouble.when == "start"
        if at_start and trouble.fault == "cut":
            for link in network.around(trouble.victim):
                link.cut()
        if at_start and trouble.fault == "stranger":
            stack.enter_context(Stranger(network.ports[trouble.victim], trouble.stranger))
        processes: dict[int, Worker] = {}
        for number in reversed(range(count)):
            if at_start and number == trouble.victim and trouble.fault in ("absent", "stranger"):
                continue
            said = _said(network.addresses(number), number)
            stops = at_start and number == trouble.victim and trouble.fault == "stopped"
            more = {"JOB_STOPS": "1"} if stops and trouble.role != "server" else {}
            process = jobs.start(TRAINING, trouble.mode, jobs.folder, environ={**environ, **more, "TF_CONFIG": said})
            if stops and trouble.role == "server":
                until(lambda started=process: "serves" in started.output, LIMIT)
                process.kill(signal.SIGSTOP)
            processes[number] = process
        workers = [processes[number] for number in (0, 1) if number in processes]
        left = [processes[number] for number in (0, 1) if number in processes and number != trouble.victim]
        if trouble.when != "step":
            until(lambda: all("begins" in worker.output or worker.code is not None for worker in left), LIMIT)
        else:
            until(lambda: all("did step 2" in w.output or w.code is not None for w in workers), LIMIT)
            time.sleep(0.3)
            _disturb(trouble, processes[trouble.victim], network, stack)
        began = time.monotonic()
        return Outcome(left, _times(left, began))


def _said(addresses: Sequence[str], number: int) -> str:
    """Return TF_CONFIG of a process."""
    if number == ROLES["server"]:
        return tf_config(addresses[:2], 0, addresses[2:], "ps")
    return tf_config(addresses[:2], number, addresses[2:])


def _disturb(trouble: Trouble, victim: Worker, network: Network, stack: ExitStack) -> None:
    match trouble.fault:
        case "absent" | "stopped":
            victim.kill(SIGNALS[trouble.fault])
        case "cut":
            for link in network.around(trouble.victim):
                link.cut()
        case "stranger":
            victim.kill(signal.SIGKILL)
            stack.enter_context(Stranger(network.ports[trouble.victim], trouble.stranger))


def _times(workers: Sequence[Worker], began: float) -> list[float]:
    """Return how long each worker takes to end."""
    took = [0.0] * len(workers)

    def wait(number: int) -> None:
        workers[number].wait(LIMIT)
        took[number] = time.monotonic() - began

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took
