"""Means over all replicas of what each has of its variables, outside of any step (`local_sgd`).

replica 0: w = 1, replica 1: w = 3      ─► 2 in this process, which all others do likewise ─► 2 in each copy
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.runtime.consensus.all_reduce_session import Array, Exchange

GROUP, KEY = 2**29 - 2, 1
"""Of the exchange between workers."""


def replica_means(rows: Sequence[Sequence[Array]], member: Membership | None, seconds: float) -> list[Array]:
    """Return the mean of each variable over the replicas of all workers, who call it together.

    Args:
        rows: of each variable, the values that the replicas of this process have.
        member: this process; None where there is one.
        seconds: how long to wait for the others.

    Raises:
        ClusterError: somebody is missing.
    """
    wide = [np.sum([np.asarray(value, _wide(value)) for value in row], 0) for row in rows]
    count = len(rows[0]) if rows else 1
    if member is not None and rows:
        wide = _added_up(wide, member, seconds)
        count *= len(member.workers)
    return [np.asarray(total / count, np.asarray(row[0]).dtype) for total, row in zip(wide, rows, strict=True)]


def _wide(value: Array) -> type:
    return np.complex128 if np.iscomplexobj(value) else np.float64


def _added_up(totals: Sequence[Array], member: Membership, seconds: float) -> list[Array]:
    flat = [np.ascontiguousarray(total).reshape(-1).view(np.float64) for total in totals]
    joined = np.concatenate(flat)
    with Exchange(member, seconds, joined, GROUP, KEY + joined.size % 2**20) as exchange:
        joined = exchange.add_up(joined, "average the variables of all replicas")
    ends = np.cumsum([part.size for part in flat])[:-1]
    parts = np.split(joined, ends)
    return [part.view(total.dtype).reshape(total.shape) for part, total in zip(parts, totals, strict=True)]
