"""Lowering of an edge: which of the table's rows its placements, its devices and its owner's residence call for.

    partial(sum), one process       collective_reduce, or add_n where one copy of a variable serves all
    partial(sum), processes         host_reduce: added up in each process, then among processes
    the same with `hint: ring`, or GPUs   collective_reduce: one ring of all; on GPUs its way through a host is NCCL's
    partial(sum), servers           accumulator

Hierarchical sums: Goyal et al., Accurate, Large Minibatch SGD (2017), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autograph_rewrite.analysis.facts.placement import PARTIAL, REPLICATED, Fact
from autograph_rewrite.analysis.facts.symbolic_dims import is_local, rows_per_example
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.plan.parts.messages import EdgePlan, Options
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.wire_types import as_sent, can_gather_collectively

ACCUMULATED = frozenset((dtypes.HALF, dtypes.FLOAT, dtypes.DOUBLE))
"""The types of conditional accumulators: TensorFlow has no kernel of one for others."""


def homed(plan: Plan, state: Propagation, found: Mapping[tuple[str, str], EdgePlan]) -> dict[tuple[str, str], EdgePlan]:
    """Return the edges as they are lowered where variables live on single devices.

    Args:
        plan: says where.
        state: the placements of all values.
        found: the edges, by value and target.
    """
    if not plan.homes:
        return dict(found)
    lower = _at_home if len(plan.processes) == 1 else _through_servers
    return {key: replace(edge, lowering=lower(plan, state, edge)) for key, edge in found.items()}


def _at_home(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return how values meet on the device of their owner, where one process has all replicas."""
    placement = state.source(state.graph.value(edge.value)).placement
    if edge.owner not in plan.homes or edge.to != repr(REPLICATED):
        return edge.lowering
    if placement.is_split:
        return "concat"
    return ("add_n" if placement == PARTIAL else "fold") if placement.is_partial else edge.lowering


def _through_servers(plan: Plan, state: Propagation, edge: EdgePlan) -> str:
    """Return how a value crosses between the processes of a job with servers: none of them by a collective."""
    fact = state.source(state.graph.value(edge.value))
    if edge.lowering in ("collective_gather", "host_gather"):
        return "server_gather"
    if edge.lowering not in ("collective_reduce", "micro_reduce", "host_reduce"):
        return edge.lowering
    return "accumulator" if fact.placement == PARTIAL and as_sent(fact).dtype in ACCUMULATED else "server_reduce"


def lowering_of(plan: Plan, fact: Fact, target: str, options: Options) -> str:
    """Return the lowering of an edge where no servers hold variables.

    Args:
        plan: the request.
        fact: of the value.
        target: the placement that is asked for, as edges write it.
        options: of the edge's owner.
    """
    if target.startswith("split"):
        return "slice"
    if target.startswith("partial"):
        return "zeros"
    if target == "local":
        return "local_size"
    crosses = len(plan.processes) > 1
    if fact.is_local:
        counted = any(rows_per_example(entry) is None for entry in fact.value or () if is_local(entry))
        return "host_reduce" if crosses and counted else "global_size"
    mirrored = plan.mode == "mirrored" and plan.replicas > 1
    if fact.placement.is_partial:
        wire = wire_types.wire_type(fact.dtype, fact.placement.op)
        if mirrored and wire in wire_types.COLLECTIVE_TYPES and not _is_hierarchical(plan, options):
            return "micro_reduce" if plan.microbatches > 1 else "collective_reduce"
        return by_hosts(plan, fact)
    if (
        mirrored
        and plan.microbatches == 1
        and can_gather_collectively(fact, rows_per_example(fact.split_size), plan.devices)
    ):
        return "collective_gather"
    return "host_gather" if crosses else "concat"


def _is_hierarchical(plan: Plan, options: Options) -> bool:
    """Return whether replicas of a process add up by themselves before processes do.

    Among CPU devices of one memory an AddN moves less than a ring of them all, and the ring among processes is shorter
    (measured: benchmarks/hierarchy.py). NCCL knows the links between GPUs better. Who names a ring gets one. What
    compressors send has an error of each replica's own to feed back.
    """
    several = len(plan.processes) > 1 and plan.replicas_each > 1 and options.hint == "auto"
    return several and options.compressor == NONE and all(parse(device).kind == "CPU" for device in plan.devices)


def by_hosts(plan: Plan, fact: Fact) -> str:
    """Return how the parts of a value are combined on the first device of each process."""
    if len(plan.processes) > 1:
        return "host_reduce"
    return "add_n" if fact.placement == PARTIAL else "fold"
