"""Riders: small sums that nothing in the step waits for travel with the last bucket of gradients.

    loss, metrics      ──┐
    sizes and digests  ──┼──► one collective instead of three
    gradients          ──┘

A collective of a few numbers takes as long as one of some thousands (0.7 ms of processor time between two processes).
In a session nothing rides: whoever fetches the loss alone would have to compute all gradients for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.facts.placement import REPLICATED
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.traversal import ancestors, dependencies
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.item import Variable
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.plan.parts.messages import SIZES, STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan

LARGEST = 4096
"""Bytes of a rider at most: it is there before the bucket, and gains less by waiting the longer it takes."""
EXACT = {"float32": 4, "float64": 8}
"""The types, with their bytes, that hold integers of 16 bits, and add zeros to them, without rounding."""


Depth = Callable[[EdgePlan], int | None]
"""Tells how many reductions lie before a sum of fixed shape that every step makes; None for anything else."""


def add_riders(plan: Plan, state: Propagation, edges: Iterable[EdgePlan], depth_of: Depth) -> list[EdgePlan]:
    """Return the edges, those that ride with the numbers of their buckets.

    Args:
        plan: the request.
        state: the placements.
        edges: with their buckets, in graph order.
        depth_of: of sums.
    """
    listed = list(edges)
    host = next((edge for edge in reversed(listed) if edge.bucket and edge.compressor == NONE), None)
    if host is None or host.lowering != "collective_reduce" or host.dtype not in EXACT:
        return listed
    deepest = depth_of(host) or 0
    depths = {edge.value: depth_of(edge) for edge in _final_sums(plan, state, listed, host)}
    riding = {value for value, depth in depths.items() if depth is not None and depth <= deepest}
    counts = any(_counts_examples(state, edge) for edge in listed)
    if not counts and all(parse(device).kind == "CPU" for device in plan.devices):
        numbers = 2 * (1 + DIGEST) * len(plan.processes) * EXACT[host.dtype]
        told = {"lowering": host.lowering, "dtype": host.dtype, "bytes": numbers, "bucket": host.bucket}
        listed = [replace(edge, **told) if edge.to == SIZES else edge for edge in listed]
    return [
        replace(edge, bucket=host.bucket) if edge.value in riding and edge.to == host.to else edge for edge in listed
    ]


def are_run_together(plan: Plan, variables: Mapping[str, Variable]) -> bool:
    """Return whether all of a step is run or nothing, by processes that have one replica each."""
    is_function = any(variable.captured for variable in variables.values())
    is_plain = plan.model is None and plan.pipeline is None and plan.microbatches == 1 and not plan.homes
    return is_function and is_plain and len(plan.processes) > 1 and plan.replicas_each == 1


def _final_sums(plan: Plan, state: Propagation, edges: Iterable[EdgePlan], host: EdgePlan) -> Iterator[EdgePlan]:
    """Yield the small sums of the step that no other exchange depends on, if they are like those of a bucket."""
    graph = state.graph
    nodes = {graph.value(edge.value).node for edge in edges}
    before = ancestors({producer for node in nodes for producer in dependencies(node)})
    for edge in edges:
        is_alike = all(getattr(edge, trait) == getattr(host, trait) for trait in ("dtype", "lowering", "from_", "to"))
        is_alike = is_alike and plan.options_of(edge.owner).hint == plan.options_of(host.owner).hint
        is_small = edge.owner == STEP and not edge.bucket and edge.bytes <= LARGEST
        if is_alike and is_small and graph.value(edge.value).node not in before:
            yield edge


def _counts_examples(state: Propagation, edge: EdgePlan) -> bool:
    """Return whether what an edge is lowered to may ask how many examples each process has."""
    value = state.graph.value(edge.value)
    if edge.to == SIZES:
        return value not in state.whole_inputs
    is_cut = value in state.whole_inputs and edge.to != repr(REPLICATED)
    return not (is_cut or edge.from_.startswith("partial"))
