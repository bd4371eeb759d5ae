"""What user code asks about replicas, as names of nodes that the graph keeps and TensorFlow ignores.

    autograph_replica/id        PlaceholderWithDefault(0)    which replica runs this           (`ar.replica_id`)
    autograph_replica/count     PlaceholderWithDefault(1)    how many there are                (`ar.num_replicas`)
    autograph_replica/sum       Identity(x)                  x, added up over the replicas     (`ar.all_reduce`)
    autograph_replica/gather    Identity(x)                  likewise, of a row for each       (`ar.all_gather`)
    autograph_replica/weight    Identity(1)                  what x is multiplied by for a mean

Where nothing is distributed, the numbers are those of one replica, as they stand there.
"""

from __future__ import annotations

import re

SCOPE = "autograph_replica"
AVERAGES = "autograph_local_sgd"
"""The scope of what passes add to average variables that replicas train by themselves."""
ID, COUNT, SUM, GATHER, WEIGHT = "id", "count", "sum", "gather", "weight"
ADDED = (SUM, GATHER)
"""The marks of what is added up over the replicas."""
IS_FIRST, IS_FIRST_PART = "is_first", "is_first_part"
"""Made by passes: whether an instance is the first of all; whether it is the first micro-batch of its replica."""
PART = "part"
"""Made by passes: what each replica takes for its own, as it is."""
_MARK = re.compile(rf"(?:.*/)?{SCOPE}/({ID}|{COUNT}|{SUM}|{GATHER}|{WEIGHT})(?:_\d+)?")


def replica_mark(node: str) -> str:
    """Return what the name of a node asks about replicas, "" where it is no mark."""
    found = _MARK.fullmatch(node) if SCOPE in node else None
    return found[1] if found is not None else ""
