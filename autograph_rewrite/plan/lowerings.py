"""The ways to turn a value of one placement into another, by name: what a plan says, and the passes do.

Where the replicas share one process and one copy of each variable, a reshard is ordinary ops on one device.
Where each device has its own, its members are collectives, which need keys and an order. Processes share nothing, so
between them there are only collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LOWERINGS: Mapping[str, str] = MappingProxyType(
    {
        "add_n": "the sum of the replicas' values, made on the first device",
        "fold": "the maximum, minimum or product of the replicas' values, made on the first device",
        "concat": "the replicas' blocks in replica order, made on the first device",
        "split": "the blocks of a value that exists once, one for each replica",
        "slice": "each replica's own block of a value that it holds",
        "broadcast": "every replica reads the value that exists once",
        "first": "the value of the first replica, where all are equal",
        "zeros": "the value on the first replica, zeros elsewhere: a sum of one term",
        "local_size": "the size of the block instead of the size of the whole",
        "global_size": "the size of the whole instead of the size of the block",
        "global_index": "positions in the whole instead of positions in the block",
        "host_reduce": "combined on each process's first device, then by one CollectiveReduceV2 among the processes",
        "host_gather": "joined on each process's first device, then by one CollectiveGatherV2 among the processes",
        "accumulator": "pushed to an accumulator on a server; worker 0 takes the sum once all have pushed",
        "server_reduce": "pushed to queues on a server; worker 0 takes and combines what all have pushed",
        "server_gather": "pushed to queues on a server; worker 0 takes and joins the parts in worker order",
        "collective_reduce": "CollectiveReduceV2: every device gets the reduced value",
        "collective_gather": "CollectiveGatherV2: every device gets all blocks, in replica order",
    }
)

# Their members find each other by keys and wait for each other.
COLLECTIVES = frozenset({"collective_reduce", "collective_gather", "host_reduce", "host_gather"})

# One member per process instead of one per replica.
HOST = frozenset({"host_reduce", "host_gather"})

# Pushed by every process, and taken by worker 0 for all. In a job with servers everything is exchanged so: the steps of
# collectives have one number in all processes, and TensorFlow ends all calls of that number once one process is done.
PUSHED = frozenset({"accumulator", "server_reduce", "server_gather"})

# What one process has made of all its replicas crosses to the others.
CROSSING = HOST | PUSHED

# Replicas or processes add up what they hold, or otherwise make one value of it.
REDUCTIONS = frozenset({"add_n", "fold", "collective_reduce", "host_reduce", "accumulator", "server_reduce"})

# They join what they hold.
GATHERS = frozenset({"concat", "collective_gather", "host_gather", "server_gather"})

# Their values may share a bucket: one flat value, reduced or concatenated at once.
BUCKETED = frozenset({"add_n", "collective_reduce", "collective_gather"})
