"""Gradient bucketing: which small gradients share one all-reduce, in the order of the backward pass.

Buckets in the order of the backward pass: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
Training (2020).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autograph_rewrite.analysis.facts.placement import PARTIAL
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import dependencies
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.item import Variable
from autograph_rewrite.plan.codecs import codec_of
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.riders import add_riders, are_run_together

TOO_LARGE_TO_COPY = 128 * 1024
"""Bytes from which on, between devices of one memory, packing a value into a bucket takes longer than a collective of
its own (about 50 us)."""


Key = tuple[str, str]


def assign_buckets(
    plan: Plan, state: Propagation, edges: Mapping[Key, EdgePlan], variables: Mapping[str, Variable]
) -> list[EdgePlan]:
    """Return the edges with bucket numbers.

    Args:
        plan: the request, with `bucket_bytes` per variable.
        state: the placements.
        edges: by (value, target), in graph order.
        variables: of the item.
    """
    candidates = {edge.value for edge in edges.values() if edge.owner != STEP and _is_summed(edge)}
    if not candidates:
        return list(edges.values())
    depths = _depths(state)
    in_memory = len(plan.processes) == 1 and all(parse(device).kind == "CPU" for device in plan.devices)
    number = 0
    open_buckets: dict[object, tuple[int, int]] = {}  # kind -> (number, bytes so far)
    chosen: dict[Key, int] = {}
    for key, edge in edges.items():
        value = state.graph.value(edge.value) if edge.value in candidates and edge.to == "replicated" else None
        depth = depths.get(value.node) if value is not None else None
        if value is None or depth is None or not _is_fixed(state, value):
            continue
        options = plan.options_of(edge.owner)
        if not 0 < edge.bytes < options.bucket_bytes or (in_memory and edge.bytes >= TOO_LARGE_TO_COPY):
            continue
        kind = (edge.dtype, options.hint, edge.compressor, options.bucket_bytes, edge.logical, depth)
        current, filled = open_buckets.get(kind, (0, 0))
        if not current or filled + edge.bytes > options.bucket_bytes:
            number += 1
            current, filled = number, 0
        open_buckets[kind] = current, filled + edge.bytes
        chosen[key] = current
    members = Counter(chosen.values())
    listed = [
        replace(edge, bucket=chosen[key]) if key in chosen and members[chosen[key]] > 1 else edge
        for key, edge in edges.items()
    ]

    def depth_of(edge: EdgePlan) -> int | None:
        value = state.graph.value(edge.value)
        return depths.get(value.node) if _is_fixed(state, value) else None

    return add_riders(plan, state, listed, depth_of) if are_run_together(plan, variables) else listed


def _is_summed(edge: EdgePlan) -> bool:
    """Return whether a collective adds the value up, element by element."""
    if edge.compressor == NONE:
        return edge.lowered.is_everywhere and edge.lowered.does(Operation.REDUCE)
    return codec_of(edge.compressor).elementwise and edge.is_collective and edge.lowered.is_everywhere


def _is_fixed(state: Propagation, value: Value) -> bool:
    fact = state.source(value)
    return fact.placement == PARTIAL and not wire_types.may_change(fact)


def _depths(state: Propagation) -> dict[Node, int]:
    """Return, for nodes outside of loops and branches, how many reductions lie one behind the other before them."""
    sources = {value.node for value in state.reduced}
    depths: dict[Node, int] = dict.fromkeys(state.order, 0)
    first = next((i for i, node in enumerate(state.order) if node in sources), len(state.order))
    for node in state.order[first + 1 :]:
        depth = max([depths[producer] for producer in dependencies(node)], default=0)
        depths[node] = depth + any([value in state.reduced for value in node.inputs])
    unconditional = unconditional_nodes(state.order)
    return {node: depth for node, depth in depths.items() if node in unconditional}
