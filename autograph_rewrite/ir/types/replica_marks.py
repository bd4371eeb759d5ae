"""Defines marks: names of nodes by which user code asks about replicas, and which TensorFlow ignores.

    autograph_replica/id        PlaceholderWithDefault(0)    which replica runs this           (`ar.replica_id`)
    autograph_replica/count     PlaceholderWithDefault(1)    how many there are                (`ar.num_replicas`)
    autograph_replica/sum       Identity(x)                  x, added up over the replicas     (`ar.all_reduce`)
    autograph_replica/gather    Identity(x)                  likewise, of a row for each       (`ar.all_gather`)
    autograph_replica/weight    Identity(1)                  what x is multiplied by for a mean

In a graph that is not distributed, the marks give the numbers of one replica.
"""

from __future__ import annotations

import re

SCOPE = "autograph_replica"
AVERAGES = "autograph_local_sgd"
"""The scope of the nodes that passes add to average variables in local SGD."""
ID, COUNT, SUM, GATHER, WEIGHT = "id", "count", "sum", "gather", "weight"
ADDED = (SUM, GATHER)
"""The marks of values that are summed over the replicas."""
IS_FIRST, IS_FIRST_PART = "is_first", "is_first_part"
"""Made by passes: whether an instance is the first of all; whether it is the first micro-batch of its replica."""
PART = "part"
"""Made by passes: a value that each replica uses as it is, unreduced."""
_MARK = re.compile(rf"(?:.*/)?{SCOPE}/({ID}|{COUNT}|{SUM}|{GATHER}|{WEIGHT})(?:_\d+)?")


def replica_mark(node: str) -> str:
    """Return the mark in the name of a node; "" where there is none."""
    found = _MARK.fullmatch(node) if SCOPE in node else None
    return found[1] if found is not None else ""
