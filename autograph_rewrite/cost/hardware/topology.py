"""Model the topology: processes of a plan, their devices and links, and the duration of each collective on them.

All processes do the same, so only one is simulated, and likewise only one of its equal replicas. The alpha-beta model:

    all-reduce, N members     2 (N - 1) hops of 1/N of the bytes, one after another on a ring; few leave a process
    all-gather                N - 1 messages of the bytes of one member
    push, pull                every process sends to, or receives from, one device, whose link all of them share

A message of n bytes takes alpha + n beta (Hockney 1994); the ring is that of Patarasuk and Yuan, Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations (2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autograph_rewrite.cost.hardware.machine import Link, Machine
from autograph_rewrite.ir.types.device_names import parse, process_of, short
from autograph_rewrite.plan.parts.residence import REPLICATED, Residence
from autograph_rewrite.plan.plan import Plan

OUT, IN, LOCAL = "network out", "network in", "local link"
CPU, FIRST, REST, HOST = "cpu", "first device", "other devices", "host cpu"
MESSAGE = 60e-6
"""Seconds for which a message of TensorFlow over gRPC keeps sender and receiver busy, whatever its size.

Measured on loopback: 20 more variables on a server of two workers take 0.43 ms each, 20 more all-reduces 0.33 ms each.
"""
REMOTE_RUN = 0.2e-3
"""Seconds for which a step with a part in another process keeps both busy, in addition to the messages of that part."""
HOST_LINK = "host link"
"""The link between each accelerator and its host."""
OTHERS = "other cpu devices"
"""All CPU devices of a process but the first: they share its cores, but hold other variables."""


@dataclass(frozen=True)
class LinkTransfer:
    """The cost of an exchange.

    Attributes:
        seconds: from its start to its end.
        holds: how long it occupies each lane.
        traffic: bytes over one link of each kind.
    """

    seconds: float = 0.0
    holds: Mapping[str, float] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Holding:
    """Who holds a variable that is not whole on every replica.

    Attributes:
        homes: the device of each part; empty if the parts are where whole variables are, too.
        parts: how many there are.
        is_apart: the parts are on servers, to which replicas push and from which they pull.
        is_shared_out: each replica has one part.
        scatters: each replica receives only its part of the gradient.
        gathers: the whole is gathered for each use, and freed afterwards.
    """

    homes: tuple[str, ...]
    parts: int
    is_apart: bool = False
    is_shared_out: bool = False
    scatters: bool = False
    gathers: bool = False

    @classmethod
    def of(cls, residence: Residence) -> Holding:
        """Return the holding of a residence."""
        parts, level = max(1, len(residence.sizes)), residence.stage
        return cls(residence.servers, parts, residence.is_on_server, level > 0, level >= 2, level == 3)


@dataclass(frozen=True)
class Topology:
    """The processes and devices of a plan, on described machines."""

    plan: Plan
    machine: Machine
    network: Link

    @cached_property
    def processes(self) -> int:
        """How many processes train."""
        return len(self.plan.processes)

    @cached_property
    def local(self) -> int:
        """How many replicas one process runs."""
        return self.plan.replicas_each

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the replicas share the cores and the memory of their process."""
        return all(parse(device).kind == "CPU" for device in self.plan.devices_of(0))

    @cached_property
    def cpu(self) -> Machine | None:
        """The machine, if the replicas compute on its CPU; None for accelerators."""
        return self.machine if self.on_cpu else None

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes on which one process computes."""
        if self.on_cpu:
            return (CPU,)
        return (FIRST, REST) if self.local > 1 else (FIRST,)

    @cached_property
    def holdings(self) -> dict[str, Holding]:
        """The holding of each variable that is not whole on every replica, by name."""
        residences = self.plan.residences.items()
        return {name: Holding.of(residence) for name, residence in residences if residence != REPLICATED}

    @cached_property
    def remote_seconds(self) -> float:
        """The extra time of a step that runs parts in the processes of servers."""
        if self.processes == 1:
            return 0.0
        held = [holding.homes for holding in self.holdings.values() if holding.is_apart]
        homes, workers = {process_of(home) for homes in held for home in homes}, set(self.plan.processes)
        hosted = {process: len(workers - {process}) if process in homes else 0 for process in homes | workers}
        return REMOTE_RUN * max(hosted[one] + (len(homes) - (one in homes)) * (one in workers) for one in hosted)

    @cached_property
    def logical(self) -> int:
        """How many logical devices share the tensors of a replica."""
        return self.plan.model.size if self.plan.model is not None else 1

    def place(self, lane: str, device: int) -> str:
        """Return the name of the memory of a logical device.

        Args:
            lane: one of `lanes`.
            device: its number within a replica.
        """
        return f"{lane}, logical device {device}" if self.logical > 1 and lane in self.lanes else lane

    def computes(self, lane: str, device: int) -> str:
        """Return the lane on which a logical device computes: CPU devices of a process share its cores."""
        if not self.on_cpu or lane not in self.lanes or (self.machine.apart and self.logical > 1):
            return self.place(lane, device)
        home = process_of(self.logical_name(device))
        return CPU if home in ("", process_of(self.plan.devices[0])) else self.home_lane(home, CPU)

    @property
    def computing(self) -> set[str]:
        """The lanes on which replicas compute."""
        return {self.computes(lane, device) for lane in self.lanes for device in range(self.logical)}

    def logical_name(self, device: int, replica: int = 0) -> str:
        """Return the name of a logical device of a replica."""
        return self.plan.model.devices[replica * self.logical + device] if self.plan.model is not None else ""

    def between(self, nbytes: float, source: int, target: int) -> LinkTransfer:
        """Return the transfer of bytes from one logical device of a replica to another.

        Args:
            source: number of the sending device.
            target: number of the receiving device.
        """
        one, other = self.logical_name(source), self.logical_name(target)
        lane = f"{short(one)} to {short(other)}"
        if process_of(one) != process_of(other):
            seconds = self.network.time(nbytes)
        elif not parse(one).kind == parse(other).kind == "CPU":
            seconds = self.machine.local.time(nbytes)
        elif self.machine.apart:
            seconds = self.machine.memory.time(nbytes)
        else:  # they see the same memory
            return LinkTransfer(self.machine.memory.seconds, {}, {lane: nbytes})
        return LinkTransfer(seconds, {lane: seconds}, {lane: nbytes})

    def ring_reduce(self, nbytes: float, *, hosts: bool = False) -> LinkTransfer:
        """Return the transfer of an all-reduce of all replicas, or of one member per process (`hosts`)."""
        members = self.processes if hosts else self.plan.replicas
        return self._ring(2 * (members - 1), nbytes / max(members, 1), hosts)

    def ring_gather(self, nbytes: float, *, hosts: bool = False) -> LinkTransfer:
        """Return the transfer of an all-gather of `nbytes` of each member; a reduce-scatter takes as long."""
        members = self.processes if hosts else self.plan.replicas
        return self._ring(members - 1, nbytes, hosts)

    def _ring(self, steps: int, chunk: float, hosts: bool) -> LinkTransfer:
        if steps <= 0:
            return LinkTransfer()
        near = self.machine.memory if self.on_cpu else self.machine.local
        if self.processes > 1:
            members = self.processes if hosts else self.plan.replicas
            hops = steps * self.processes / members  # the hops of a chunk that are between processes
            seconds = self.network.time(chunk * steps) + (hops - 1) * self.network.seconds
            seconds += hops * MESSAGE if self.on_cpu else 0.0  # accelerators send by NCCL, without gRPC
            seconds += (steps - hops) * near.seconds
            inside = {LOCAL: chunk * steps * (self.local - 1)} if self.local > 1 and not hosts else {}
            traffic = {OUT: chunk * steps, IN: chunk * steps, **inside}
            return LinkTransfer(seconds, {OUT: seconds, IN: seconds}, traffic)
        moved = chunk * steps * (self.local if self.on_cpu else 1)  # CPU devices share their memory's bandwidth
        seconds = near.time(moved, steps)
        return LinkTransfer(seconds, {LOCAL: seconds}, {LOCAL: chunk * steps * self.local})

    def within(self, nbytes: float) -> LinkTransfer:
        """Return the transfer of bytes between the devices of one process; CPU devices copy nothing."""
        if self.local == 1 or not nbytes:
            return LinkTransfer()
        if self.on_cpu:
            return LinkTransfer(self.machine.memory.seconds)
        seconds = self.machine.local.time(nbytes)
        return LinkTransfer(seconds, {LOCAL: seconds}, {LOCAL: nbytes})

    def to_host(self, nbytes: float) -> LinkTransfer:
        """Return the transfer of bytes between the host and each accelerator of one process."""
        seconds = self.machine.host.time(nbytes)
        return LinkTransfer(seconds, {HOST_LINK: seconds}, {HOST_LINK: nbytes})

    def push(self, nbytes: float, *homes: str) -> LinkTransfer:
        """Return the transfer of all processes' contributions to servers, of which each receives an equal part."""
        return _together([self._with_home(nbytes / len(homes), home, OUT, "in") for home in homes])

    def pull(self, nbytes: float, *homes: str) -> LinkTransfer:
        """Return the transfer of a value, of which servers hold equal parts, to all processes."""
        return _together([self._with_home(nbytes / len(homes), home, IN, "out") for home in homes])

    def hand_on(self, nbytes: float, *homes: str) -> LinkTransfer:
        """Return the transfer from the first server to the others, each of which receives an equal part."""
        first, share = process_of(homes[0]), nbytes / len(homes)
        others = [home for home in homes[1:] if process_of(home) != first]
        if not others:
            return LinkTransfer()
        alone = MESSAGE + share / self.network.bytes_per_second
        sent, received = self.home_lane(homes[0], "out"), [self.home_lane(one, "in") for one in others]
        holds = {**{lane: alone * received.count(lane) for lane in received}, sent: alone * len(others)}
        traffic = {**{lane: share * received.count(lane) for lane in received}, sent: share * len(others)}
        return LinkTransfer(self.network.seconds + alone * len(others), holds, traffic)

    def _with_home(self, nbytes: float, home: str, own: str, theirs: str) -> LinkTransfer:
        others = self.processes - (process_of(home) in self.plan.processes)
        if others <= 0:  # it is in this process
            return self.within(nbytes) if self.on_cpu or parse(home).kind != "CPU" else self.to_host(nbytes)
        lane = self.home_lane(home, theirs)
        alone = MESSAGE + nbytes / self.network.bytes_per_second
        together = alone * others
        seconds = self.network.seconds + together  # on their way, messages do not wait for each other
        return LinkTransfer(seconds, {own: alone, lane: together}, {own: nbytes, lane: nbytes * others})

    def compute_lane(self, home: str) -> str:
        """Return the lane on which the updates of variables on a server run."""
        if process_of(home) in self.plan.processes and self.processes == 1:
            return HOST if not self.on_cpu and parse(home).kind == "CPU" else self.lanes[0]
        return self.home_lane(home, CPU)

    def memory_lane(self, home: str) -> str:
        """Return the lane whose devices hold the variables of a server."""
        lane = self.compute_lane(home)
        return OTHERS if lane == CPU and home != self.plan.devices[0] else lane

    def home_lane(self, home: str, what: str) -> str:
        """Return the name of a lane of a server's process."""
        task = process_of(home).replace("/replica:0", "").removeprefix("/") or "server"
        return f"{task} {what}"


def _together(exchanges: Sequence[LinkTransfer]) -> LinkTransfer:
    """Return parallel exchanges as one transfer: each lane carries its parts one after another."""
    holds = added(one.holds for one in exchanges)
    traffic = added(one.traffic for one in exchanges)
    seconds = max([*(one.seconds for one in exchanges), *holds.values()], default=0.0)
    return LinkTransfer(seconds, holds, traffic)


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the values of each key."""
    found: dict[str, float] = {}
    for key, value in (pair for part in parts for pair in part.items()):
        found[key] = found.get(key, 0.0) + value
    return found
