"""Define a builder's choice for one variable: how its gradient is reduced, and into how many shards it is split."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from autograph_rewrite.analysis.variable_uses import Role
from autograph_rewrite.config.config import Config
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import device_names
from autograph_rewrite.plan.parts.batch_split import bounds
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import job_devices
from autograph_rewrite.training_graph import TrainingGraph, Variable


@dataclass(frozen=True)
class TrainedVariable:
    """A trained variable, as builders see it.

    Attributes:
        digest: of the graph, from which choices that look random are made.
        obstacle: why it cannot be split; empty where it can.
    """

    variable: Variable
    role: Role
    digest: str
    obstacle: str = ""

    @property
    def name(self) -> str:
        """Its public name."""
        return self.variable.name

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Its static shape; empty where it is unknown."""
        return self.variable.shape or ()


@dataclass(frozen=True)
class Parts:
    """Into how many parts a variable is split, along which axis."""

    axis: int
    count: int


@dataclass(frozen=True)
class Choice:
    """How one variable is held and updated.

    Attributes:
        synchronizer: "all_reduce" (every replica holds it) or "ps" (servers do).
        parts: how it is split; None leaves it whole.
        stage: 1, 2 or 3 where it is split over the replicas (`messages.VariableRequest.stage`).
        because: why it is not split, or not on servers, where the builder has a reason; `why-not` prints it.
    """

    synchronizer: str = "all_reduce"
    parts: Parts | None = None
    stage: int = 0
    because: str = field(default="", compare=False)


# A strategy builder is a pure function from a graph item and a configuration to a request.


class StrategyBuilder(Protocol):
    """Decides where variables live and how their gradients are reduced.

    The same item and configuration give the same plan in every process: workers build theirs independently.
    """

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """The request: devices, placements and options. Its edges follow from propagation, later.

        Raises:
            ConfigError: when the configuration asks for something that this version or this item does not have.
        """
        ...


# Fully sharded variables: each replica holds one shard (ZeRO, FSDP).
#
# The stages are those of Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
# (2020).


def over_replicas(trained: TrainedVariable, replicas: int, *, stage: int, axis: int | None = None) -> Choice:
    """Return the choice that splits a variable over the replicas; it stays whole where it is too small.

    Args:
        stage: of ZeRO (`messages.VariableRequest.stage`).
        axis: the axis; left out, the first that the replicas divide evenly, else the first that is long enough.
    """
    sizes = [size or 0 for size in trained.shape]
    possible = [0] if trained.role.sparse else list(range(len(sizes)))
    if axis is not None:
        possible = [axis]
    possible = [one for one in possible if one < len(sizes) and sizes[one] >= replicas]
    even = [one for one in possible if sizes[one] % replicas == 0]
    if replicas < 2:
        return Choice(because="there is one replica only")
    if not possible:
        rows = "it is only looked up by row, so only rows can be split, and " if trained.role.sparse else ""
        asked = f"axis {axis} is" if axis is not None else "no axis is"
        long = "shorter than" if axis is not None else "as long as"
        return Choice(because=f"{rows}{asked} {long} there are replicas ({replicas}): its shape is {sizes}")
    return Choice(parts=Parts((even or possible)[0], replicas), stage=stage)


# The devices of parameter servers, and load balancing between them.
#
# The servers are the parameter servers of the cluster, each with its CPU:0. Without any, every worker is a server: with
# the CPUs that its replicas run on, else with its CPU:0.


HOST = "/device:CPU:0"


def servers(config: Config) -> tuple[str, ...]:
    """Return the devices that may hold variables, in order.

    Raises:
        ConfigError: the configuration names no devices.
    """
    if config.cluster is not None and config.cluster.ps:
        return tuple(device_names.on_task(HOST, "ps", task) for task in range(len(config.cluster.ps)))
    by_process = grouped((device_names.process_of(device), device) for device in job_devices(config))
    found: list[str] = []
    for process, own in by_process.items():
        found += [device for device in own if device_names.parse(device).kind == "CPU"] or [process + HOST]
    return tuple(dict.fromkeys(found))


def first_server(config: Config) -> tuple[str, ...]:
    """Return the one device that holds everything: the first parameter server, else the first worker's CPU:0.

    Raises:
        ConfigError: the configuration names no devices.
    """
    if config.cluster is not None and config.cluster.ps:
        return servers(config)[:1]
    return (device_names.process_of(job_devices(config)[0]) + HOST,)


class Load:
    """How many bytes each server holds, while a plan is made."""

    def __init__(self, names: Sequence[str]) -> None:
        self.bytes: dict[str, float] = dict.fromkeys(names, 0.0)

    def take(self, nbytes: float, among: Collection[str] = ()) -> str:
        """Add bytes to the server (of `among`, if it names some) that holds least; return it, the first of several."""
        least = min(among or self.bytes, key=lambda name: self.bytes.get(name, 0.0))
        self.bytes[least] = self.bytes.get(least, 0.0) + nbytes
        return least

    def take_turns(self, count: int, nbytes: float) -> tuple[str, ...]:
        """Return the servers of `count` shards, `nbytes` together: in turns, beginning with the least loaded."""
        turns = sorted(self.bytes, key=self.bytes.__getitem__)
        chosen = tuple(turns[shard % len(turns)] for shard in range(count))
        for server in chosen:
            self.bytes[server] += nbytes / count
        return chosen


# Numbers of shards, and their sizes.
#
# 12 rows    smallest divisor 2    smallest number of uneven parts 5    5 shards of 3, 3, 2, 2, 2


MOST = 256
"""Most parts of a variable: more cost more in ops than they spread, so a size without a smaller divisor stays whole."""


def smallest_divisor(size: int) -> int:
    """Return the smallest divisor of `size` from 2 on; the size itself where it is prime, 1 below 2."""
    divisor = 2
    while divisor * divisor <= size:
        if size % divisor == 0:
            return divisor
        divisor += 1
    return max(size, 1)


def smallest_non_divisor(size: int) -> int:
    """Return the smallest number from 2 on that does not divide `size`; the size itself where all smaller ones do."""
    return next((count for count in range(2, size) if size % count), max(size, 1))


def shard_sizes(size: int, count: int) -> tuple[int, ...]:
    """Return the sizes of `count` nearly equal shards, the larger ones first."""
    return tuple(end - begin for begin, end in pairwise(bounds(size, count)))
