"""Dense synchronous jobs of two processes that a link of 1 Gbit/s joins, beside MultiWorkerMirroredStrategy.

    process 0 in a network namespace ── veth pair, a token bucket at each end ── process 1 in another one

No step can be faster than its computing, nor than the link carries its gradients: each of two processes sends as many
bytes as there are gradients, and receives as many at the same time. Needs root, `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.child import ChildFailed, call
from benchmarks.dist import free_ports
from benchmarks.dist_dense import HOW, PROGRAMS, crew
from benchmarks.effort import Effort
from benchmarks.figure import Figure, milliseconds
from benchmarks.timing import ratio
from benchmarks.turns import times

TITLE = "two processes and a link of 1 Gbit/s, beside MultiWorkerMirroredStrategy, pinned to a core each"
GIGABITS = 1.0
HOSTS = ("agbench0", "agbench1")
"""Network namespaces."""
ADDRESSES = ("10.78.0.1", "10.78.0.2")
BURST = "256kb"
"""What the token bucket lets through at once: some of the segments of 64 KiB that a veth pair carries whole."""


def run(effort: Effort) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures, and the times that they are made of."""
    figures, details = [], {}
    with hosts(GIGABITS):
        for name in effort.some(PROGRAMS):
            sent = call("benchmarks.dist_link:gradient_bytes", {"name": name, "tiny": effort.tiny}, timeout=300)
            found = details[name] = {"seconds": steps(name, effort), "bytes": sent}
            figures += _figures(name, **found)
    return figures, details


def has_hosts() -> bool:
    """Return whether this process may make network namespaces, and has what makes them."""
    return not os.geteuid() and all(map(shutil.which, ("ip", "tc")))


@contextlib.contextmanager
def hosts(gigabits: float) -> Iterator[None]:
    """Make two network namespaces that a link joins, and remove them in the end.

    Args:
        gigabits: per second, in each direction.

    Raises:
        ChildFailed: this process may not, or cannot.
    """
    if not has_hosts():
        raise ChildFailed("network namespaces need root, and `ip` and `tc` of iproute2")
    _remove()
    try:
        for host in HOSTS:
            _do("ip", "netns", "add", host)
        _do("ip", "link", "add", "eth0", "netns", HOSTS[0], "type", "veth", "peer", "name", "eth0", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            for line in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _do("ip", "-n", host, *line.split())
            bucket = f"dev eth0 root tbf rate {gigabits:g}gbit burst {BURST} latency 50ms"
            _do("tc", "-n", host, "qdisc", "add", *bucket.split())
        yield
    finally:
        _remove()


def steps(name: str, effort: Effort) -> dict[str, list[float]]:
    """Return the seconds per step of each contestant, one number per round."""
    with ExitStack() as stack:
        crews = {}
        for how in HOW:
            addresses = [f"{host}:{port}" for host, port in zip(ADDRESSES, free_ports(2), strict=True)]
            prefixes = [("ip", "netns", "exec", host) for host in HOSTS]
            network = {"cluster": {"workers": addresses, "network": {"bandwidth_gbps": GIGABITS}}}
            given = {"name": name, "tiny": effort.tiny, "config": network}
            crews[how] = stack.enter_context(crew(how, len(HOSTS), given, addresses, prefixes))
            crews[how].ready()
        return times(crews, rounds=effort.rounds(15), calls=2 if effort.tiny else 10)


def gradient_bytes(name: str, tiny: bool) -> int:
    """Return how many bytes the gradients of a program are (in a process that has TensorFlow)."""
    from benchmarks import programs

    weights = programs.build(name, tiny=tiny).model.trainable_variables
    return sum(weight.value.dtype.size * int(weight.value.shape.num_elements()) for weight in weights)


def _figures(name: str, seconds: dict[str, list[float]], **sent: int) -> list[Figure]:
    carried = sent["bytes"] * 8 / (GIGABITS * 1e9)
    bounds = [max(alone, carried) for alone in seconds["alone"]]
    ours, theirs, alone = (milliseconds(median(seconds[how])) for how in HOW)
    how = f"{ours}; alone {alone}, {sent['bytes'] / 1e6:.3g} MB take {milliseconds(carried)}"
    return [
        Figure(
            f"{name}: step / max(computing, bytes / bandwidth)", ratio(seconds["ours"], bounds), at_most=1.1, how=how
        ),
        Figure(
            f"{name}: ours / theirs", ratio(seconds["ours"], seconds["theirs"]), at_most=1.0, how=f"{ours} / {theirs}"
        ),
    ]


def _remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _do(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ChildFailed(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
