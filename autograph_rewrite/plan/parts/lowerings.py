"""Define the lowerings: how a value is converted to another placement. A plan names one for each edge.

A lowering is a row of data: the hops that a value takes, each an operation over some axes of instances by one medium.

    add_n               reduce over the replicas of a process by ops
    host_reduce         reduce over the replicas of a process by ops, then over the processes by a collective
    collective_reduce   reduce over all replicas of all processes by a collective
    micro_reduce        reduce over the micro-batches of a replica by ops, then over all replicas by a collective
    one_shot_reduce     as collective_reduce, but every member gets the values of all, and adds them up

Passes emit hop by hop (`passes.collectives`), and the simulator prices hop by hop (`cost.tasks.communication`). The
hops also tell which edges wait for each other, share keys or may be bucketed. Processes share no memory, so between
them there are only collectives and stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from autograph_rewrite.ir.mesh import MICRO, PROCESS, REPLICA, Span

IN_PROCESS = frozenset((REPLICA, MICRO))
"""The instances of one process."""
ACROSS = frozenset((PROCESS,))
"""One member per process, with the result of all its instances."""
EVERYWHERE = IN_PROCESS | ACROSS
"""All instances of all processes."""
IN_REPLICA = frozenset((MICRO,))
"""The micro-batches of one replica."""
REPLICAS = frozenset((PROCESS, REPLICA))
"""One member per replica of all processes, with the result of all its micro-batches."""


class Operation(Enum):
    """The operation on the values of all members.

    operation    before -> after             every member then has
    reduce       partial -> replicated       the sum (or maximum ...) of all values
    scatter      partial -> split            its block of that
    gather       split -> replicated         the blocks of all
    """

    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"


class Medium(Enum):
    """The medium that carries values between members.

    OPS are ordinary ops on the first device; PEERS are ordinary ops on every device of a process, which read the values
    of the other devices. COLLECTIVE: members find each other by keys, and wait for each other. In a job with servers
    all values cross through stores, from which worker 0 takes for all: an ACCUMULATOR adds up the pushed values, a
    QUEUE per process keeps them as they are. (The steps of collectives have one number in all processes, and TensorFlow
    ends all calls of that number once one process is done.)
    """

    OPS = "ops"
    PEERS = "peers"
    COLLECTIVE = "collective"
    ACCUMULATOR = "accumulator"
    QUEUE = "queue"


STORES = frozenset((Medium.ACCUMULATOR, Medium.QUEUE))

ONE_SHOT = "one-shot"
"""The algorithm of a collective in which every member gets the values of all and reduces them: half as many messages,
one after another, as in the usual ring (a reduce-scatter and an all-gather), which sends fewer bytes for many members.
"""


@dataclass(frozen=True)
class Hop:
    """One step of an exchange.

    Attributes:
        over: the axes whose instances are its members.
        algorithm: of the medium; "": the usual one.
    """

    operation: Operation
    over: Span
    medium: Medium
    algorithm: str = ""


def is_among_replicas(hop: Hop) -> bool:
    """Return whether every replica of every process is a member."""
    return hop.over >= REPLICAS


@dataclass(frozen=True)
class Lowering:
    """How an edge is lowered.

    Attributes:
        text: a description, for people.
        hops: in order; none where each instance converts its value by itself.
        is_bucketed: values of several edges may be sent as one.
        instead_of: the lowerings that a user may replace by this one, where one process has all replicas.
        sums: True: it makes sums only; False: reductions other than sums; None: either.
    """

    name: str
    text: str
    hops: tuple[Hop, ...] = ()
    is_bucketed: bool = False
    instead_of: tuple[str, ...] = ()
    sums: bool | None = None

    def does(self, operation: Operation) -> bool:
        """Return whether there are hops, and each does this operation."""
        return bool(self.hops) and all(hop.operation is operation for hop in self.hops)

    @property
    def is_collective(self) -> bool:
        """Whether members find each other by keys and wait for each other."""
        return any(hop.medium is Medium.COLLECTIVE for hop in self.hops)

    @property
    def is_stored(self) -> bool:
        """Whether every process pushes to stores on a server, and worker 0 takes for all."""
        return any(hop.medium in STORES for hop in self.hops)

    @property
    def crosses(self) -> bool:
        """Whether the result of all replicas of a process crosses to other processes."""
        return any(hop.over == ACROSS for hop in self.hops)

    @property
    def is_local(self) -> bool:
        """Whether ordinary ops on the first device do all of it."""
        return bool(self.hops) and all(hop.medium is Medium.OPS for hop in self.hops)

    @property
    def is_among_peers(self) -> bool:
        """Whether ordinary ops on every device do it, which read the values of the other devices."""
        return any(hop.medium is Medium.PEERS for hop in self.hops)

    @property
    def is_everywhere(self) -> bool:
        """Whether every replica gets the result, and not only the first device of each process."""
        return any(is_among_replicas(hop) or hop.medium is Medium.PEERS for hop in self.hops)


_REDUCE_IN_PROCESS = Hop(Operation.REDUCE, IN_PROCESS, Medium.OPS)
_GATHER_IN_PROCESS = Hop(Operation.GATHER, IN_PROCESS, Medium.OPS)

_ROWS = (
    Lowering(
        "add_n",
        "the sum of the replicas' values, made on the first device",
        (_REDUCE_IN_PROCESS,),
        is_bucketed=True,
        instead_of=("collective_reduce", "micro_reduce"),
        sums=True,
    ),
    Lowering(
        "fold",
        "the maximum, minimum or product of the replicas' values, made on the first device",
        (_REDUCE_IN_PROCESS,),
        instead_of=("collective_reduce", "micro_reduce"),
        sums=False,
    ),
    Lowering(
        "concat",
        "the replicas' blocks in replica order, made on the first device",
        (_GATHER_IN_PROCESS,),
        instead_of=("collective_gather", "micro_gather"),
    ),
    Lowering(
        "all_gather",
        "the replicas' blocks in replica order, joined on every device, which reads those of the others",
        (Hop(Operation.GATHER, IN_PROCESS, Medium.PEERS),),
        instead_of=("collective_gather",),
    ),
    Lowering(
        "reduce_scatter",
        "each replica's own block of the sum, which it makes of the blocks that all hold",
        (Hop(Operation.SCATTER, IN_PROCESS, Medium.PEERS),),
        sums=True,
    ),
    Lowering("slice", "each replica's own block of a value that it holds"),
    Lowering("zeros", "the value on the first replica, zeros elsewhere: a sum of one term"),
    Lowering("local_size", "the size of the block instead of the size of the whole"),
    Lowering("global_size", "the size of the whole instead of the size of the block"),
    Lowering(
        "host_reduce",
        "combined on each process's first device, then by one CollectiveReduceV2 among the processes",
        (_REDUCE_IN_PROCESS, Hop(Operation.REDUCE, ACROSS, Medium.COLLECTIVE)),
        is_bucketed=True,
    ),
    Lowering(
        "host_gather",
        "joined on each process's first device, then by one CollectiveGatherV2 among the processes",
        (_GATHER_IN_PROCESS, Hop(Operation.GATHER, ACROSS, Medium.COLLECTIVE)),
    ),
    Lowering(
        "accumulator",
        "pushed to an accumulator on a server; worker 0 takes the sum once all have pushed",
        (_REDUCE_IN_PROCESS, Hop(Operation.REDUCE, ACROSS, Medium.ACCUMULATOR)),
    ),
    Lowering(
        "server_reduce",
        "pushed to queues on a server; worker 0 takes and combines what all have pushed",
        (_REDUCE_IN_PROCESS, Hop(Operation.REDUCE, ACROSS, Medium.QUEUE)),
    ),
    Lowering(
        "server_gather",
        "pushed to queues on a server; worker 0 takes and joins the parts in worker order",
        (_GATHER_IN_PROCESS, Hop(Operation.GATHER, ACROSS, Medium.QUEUE)),
    ),
    Lowering(
        "collective_reduce",
        "CollectiveReduceV2: every device gets the reduced value",
        (Hop(Operation.REDUCE, EVERYWHERE, Medium.COLLECTIVE),),
        is_bucketed=True,
    ),
    Lowering(
        "collective_gather",
        "CollectiveGatherV2: every device gets all blocks, in replica order",
        (Hop(Operation.GATHER, EVERYWHERE, Medium.COLLECTIVE),),
        is_bucketed=True,
    ),
    Lowering(
        "micro_reduce",
        "combined over the micro-batches of each replica, then by one CollectiveReduceV2 among the replicas",
        (Hop(Operation.REDUCE, IN_REPLICA, Medium.OPS), Hop(Operation.REDUCE, REPLICAS, Medium.COLLECTIVE)),
        is_bucketed=True,
    ),
    Lowering(
        "one_shot_reduce",
        "CollectiveGatherV2: every device gets all values, and combines them in replica order",
        (Hop(Operation.REDUCE, EVERYWHERE, Medium.COLLECTIVE, ONE_SHOT),),
        is_bucketed=True,
    ),
    Lowering(
        "host_one_shot",
        "combined on each process's first device, then on each of those, which get all by one CollectiveGatherV2",
        (_REDUCE_IN_PROCESS, Hop(Operation.REDUCE, ACROSS, Medium.COLLECTIVE, ONE_SHOT)),
        is_bucketed=True,
    ),
    Lowering(
        "micro_one_shot",
        "combined over the micro-batches of each replica; every replica gets all by one CollectiveGatherV2",
        (
            Hop(Operation.REDUCE, IN_REPLICA, Medium.OPS),
            Hop(Operation.REDUCE, REPLICAS, Medium.COLLECTIVE, ONE_SHOT),
        ),
        is_bucketed=True,
    ),
    Lowering(
        "micro_gather",
        "what each replica sends of its micro-batches' sum, joined by one CollectiveGatherV2 among the replicas",
        (Hop(Operation.GATHER, IN_REPLICA, Medium.OPS), Hop(Operation.GATHER, REPLICAS, Medium.COLLECTIVE)),
        is_bucketed=True,
    ),
)
LOWERINGS: Mapping[str, Lowering] = MappingProxyType({row.name: row for row in _ROWS})
UNKNOWN = Lowering("", "none that this version knows")


def lowering(name: str) -> Lowering:
    """Return a lowering by name; for an unknown name, which `plan.verify` refuses, one without hops."""
    return LOWERINGS.get(name, UNKNOWN)
