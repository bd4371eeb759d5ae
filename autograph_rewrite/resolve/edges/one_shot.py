"""One-shot sums: which all-reduces between processes send all to everybody, instead of going around a ring twice.

    ring       2 (n - 1) messages of bytes / n, one after another
    one-shot     (n - 1) messages of bytes; each member adds up what it has got, in the same order as all others

A message between two processes costs TensorFlow's gRPC about half a millisecond of processor time, whatever it holds
(benchmarks/one_shot.py). Two members send as many bytes in either way. In functions, and where the runs of a session
are over together (`runtime.session.on_servers.finish_together`): else who is done with a run deletes what another
process has not asked for yet, and a gather is done before a ring is.

After: XLA's one-shot and two-shot all-reduce; Thakur et al., Optimization of Collective Communication Operations in
MPICH (2005), section 4.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType

from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.plan.parts.messages import SIZES, EdgePlan
from autograph_rewrite.plan.plan import Plan

INSTEAD = MappingProxyType(
    {"collective_reduce": "one_shot_reduce", "host_reduce": "host_one_shot", "micro_reduce": "micro_one_shot"}
)
"""By lowering that goes around a ring, the one that does the same in one shot."""
MOST_MEMBERS = 8
GATHERED = 1024 * 1024
"""Bytes of all members together at most: more no longer fits into the caches of a core, which adds it up."""
SENT_MORE = 48 * 1024
"""Bytes that a message of a one-shot may have more than one of a ring: at 1 Gbit/s they take as long as a message."""


def choose(plan: Plan, edges: Iterable[EdgePlan], fits: Callable[[EdgePlan], bool]) -> list[EdgePlan]:
    """Return the edges, those of small sums between processes in one shot.

    Args:
        plan: the request.
        edges: with their buckets.
        fits: tells whether the shape of an edge's value is the same in all steps, and a gather knows its type.
    """
    listed = list(edges)
    members = len(plan.processes)
    if not may_be(plan):
        return listed
    rings = [edge for edge in listed if _is_ring(plan, edge) and (edge.to == SIZES or fits(edge))]
    together = Counter[int]()
    for edge in rings:
        together[edge.bucket] += edge.bytes
    whole = Counter(edge.bucket for edge in listed if edge.bucket)
    found = Counter(edge.bucket for edge in rings if edge.bucket)

    def is_small(edge: EdgePlan) -> bool:
        sent = together[edge.bucket] if edge.bucket else edge.bytes
        return 0 < sent * members <= GATHERED and sent - 2 * sent / members <= SENT_MORE

    chosen = {id(edge) for edge in rings if is_small(edge) and whole[edge.bucket] == found[edge.bucket]}
    return [replace(edge, lowering=INSTEAD[edge.lowering]) if id(edge) in chosen else edge for edge in listed]


def may_be(plan: Plan) -> bool:
    """Return whether small sums of a job can be in one shot.

    Args:
        plan: the request.
    """
    on_cpu = all(parse(device).kind == "CPU" for device in plan.devices)
    return 1 < len(plan.processes) <= MOST_MEMBERS and on_cpu and plan.model is None


def _is_ring(plan: Plan, edge: EdgePlan) -> bool:
    """Return whether a ring between processes, which nobody asked for, carries an edge's values as they are."""
    if edge.lowering not in INSTEAD or edge.compressor != NONE or plan.options_of(edge.owner).hint != "auto":
        return False
    return edge.lowered.crosses or plan.replicas_each == 1
