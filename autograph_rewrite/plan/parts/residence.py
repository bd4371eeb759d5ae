"""Define the residence of a variable in a plan: where it lives.

    Replicated()                                          every replica, or the one process, has the whole
    OnServer("/job:ps/task:0/device:CPU:0")               one device holds it and computes its update
    Sharded(0, sizes=(3, 3, 2, 2))                        10 rows in 4 shards at 0 3 6 8, each of them replicated
    Sharded(0, sizes=(5, 5), servers=(ps 0, ps 1))        ... each on a server
    Sharded(0, sizes=(5, 5), servers=(GPU 0, GPU 1), stage=3)      ... each on a replica (ZeRO, FSDP)

Plan files write it as placement "replicated", "single" or "split(axis)", with servers, sizes and stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from autograph_rewrite.plan.parts.messages import VariableRequest

_SPLIT = re.compile(r"split\((\d{1,3})\)")


@dataclass(frozen=True)
class Replicated:
    """Every replica has it, or all replicas of a process share it."""

    placement: ClassVar[str] = "replicated"
    servers: ClassVar[tuple[str, ...]] = ()
    sizes: ClassVar[tuple[int, ...]] = ()
    stage: ClassVar[int] = 0
    is_on_server: ClassVar[bool] = False


@dataclass(frozen=True)
class OnServer:
    """One device holds it."""

    device: str
    placement: ClassVar[str] = "single"
    sizes: ClassVar[tuple[int, ...]] = ()
    stage: ClassVar[int] = 0
    is_on_server: ClassVar[bool] = True

    @property
    def servers(self) -> tuple[str, ...]:
        """The device that holds it."""
        return (self.device,)


@dataclass(frozen=True)
class Sharded:
    """It is cut along one axis.

    Attributes:
        sizes: of the shards, in order.
        servers: the device of each shard; empty where every replica has them all.
        stage: of a variable that is split over the replicas (`VariableRequest.stage`); 0 for any other.
    """

    axis: int
    sizes: tuple[int, ...]
    servers: tuple[str, ...] = ()
    stage: int = 0

    @property
    def placement(self) -> str:
        """The placement in plan files."""
        return f"split({self.axis})"

    @property
    def is_on_server(self) -> bool:
        """Whether servers, not replicas, hold its shards."""
        return bool(self.servers) and not self.stage

    def keeps_whole(self, *, is_slot: bool) -> bool:
        """Whether replicas still keep the whole: in ZeRO's first two stages they do, except for slots."""
        return 0 < self.stage < 3 and not is_slot

    @property
    def extent(self) -> int:
        """The size of the axis."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard begins."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def shape(self, whole: Sequence[int | None], shard: int) -> tuple[int | None, ...]:
        """Return the shape of one shard."""
        return (*whole[: self.axis], self.sizes[shard], *whole[self.axis + 1 :])

    def of_shard(self, shard: int) -> Residence:
        """Return the residence of one shard as a separate variable."""
        return OnServer(self.servers[shard]) if shard < len(self.servers) else Replicated()


Residence = Replicated | OnServer | Sharded
REPLICATED = Replicated()


def split_axis(placement: str) -> int | None:
    """Return the axis of a placement that is written `split(axis)`, None for another placement."""
    found = _SPLIT.fullmatch(placement)
    return int(found[1]) if found else None


def residence_of(request: VariableRequest) -> Residence:
    """Return the residence that a request asks for; a request that `plan.verify` refuses counts as replicated."""
    axis = split_axis(request.placement)
    if axis is not None:
        return Sharded(axis, request.sizes, request.servers, request.stage)
    if request.placement == OnServer.placement and request.servers:
        return OnServer(request.servers[0])
    return REPLICATED


def placed(request: VariableRequest, residence: Residence) -> VariableRequest:
    """Return the request with another residence of its variable."""
    return replace(
        request, placement=residence.placement, servers=residence.servers, sizes=residence.sizes, stage=residence.stage
    )


def names_of_wholes(name: str) -> Iterator[str]:
    """Yield a name, and the names of the variables that it may be a shard of, directly or as a shard of a shard."""
    while True:
        yield name
        whole, is_shard, number = name.rpartition("/part_")
        if not is_shard or not number.isdigit():
            return
        name = whole


def shard_name(variable: str, shard: int) -> str:
    """Return the name of one shard."""
    return f"{variable}/part_{shard}"
