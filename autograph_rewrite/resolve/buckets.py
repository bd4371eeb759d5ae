"""Assign gradients to buckets: which small gradients share one all-reduce, and which other small sums ride with them.

Buckets are filled in the order in which gradients become ready: as measured (`runtime.function.ready_order`), else by
the length of the longest path to each in the graph.

    loss, metrics      ──┐
    sizes and digests  ──┼──► one collective instead of three
    gradients          ──┘

A collective of a few numbers takes as long as one of some thousands (0.7 ms of processor time between two processes),
so small sums that nothing in the step waits for ride with the last bucket. In a session nothing rides: a fetch of the
loss alone would compute all gradients.

Buckets in the order of the backward pass: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
Training (2020).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.ir.control_flow import Guards, frames_of, guards_of, unconditional_nodes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import ancestors, dependencies, descendants, levels
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED
from autograph_rewrite.plan.codecs import codec_of
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import SIZES, STEP, EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.training_graph import Variable

TOO_LARGE_TO_COPY = 128 * 1024
"""Bytes from which packing a value into a bucket, between devices of one memory, takes longer than a separate
collective (about 50 us)."""

LARGEST = 4096
"""Most bytes of a rider: it is ready before the bucket, and a larger one gains less by waiting."""
EXACT = {"float32": 4, "float64": 8}
"""The types, with their bytes, that hold integers of 16 bits, and add zeros to them, without rounding."""


Depth = Callable[[EdgePlan], int | None]
"""Returns the number of reductions before a sum of fixed shape that every step makes; None for anything else."""
Key = tuple[str, str]


class BucketFiller:
    """Fills buckets one after another, separate ones for each kind."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[object, tuple[int, int]] = {}  # kind -> (number, bytes so far)

    def put(self, kind: object, nbytes: int, limit: int) -> int:
        """Return the number of the bucket for a value: the open one of its kind, or a new one.

        Args:
            kind: equal for values that may share a bucket.
            limit: bytes that a bucket holds at most.
        """
        number, filled = self._open.get(kind, (0, 0))
        if not number or filled + nbytes > limit:
            self._last += 1
            number, filled = self._last, 0
        self._open[kind] = number, filled + nbytes
        return number


def assign_buckets(
    plan: Plan, state: Propagation, edges: Mapping[Key, EdgePlan], variables: Mapping[str, Variable]
) -> list[EdgePlan]:
    """Return the edges with bucket numbers.

    Args:
        plan: the request, with `bucket_bytes` per variable.
        edges: by (value, target), in graph order.
    """
    candidates = {edge.value for edge in edges.values() if edge.owner != STEP and _is_summed(edge)}
    if not candidates:
        return list(edges.values())
    depths, level = _depths(state), levels(state.order)
    when = when_run(plan, state)
    in_memory = len(plan.processes) == 1 and all(parse(device).kind == "CPU" for device in plan.devices)
    filler = BucketFiller()
    chosen: dict[Key, int] = {}
    # Optimizers name gradients in the order of the layers, but those of the last layer are ready first.
    measured = {name: at for at, name in enumerate(plan.bucket_order)}

    def readiness(edge: EdgePlan) -> tuple[int, int]:
        return measured.get(edge.value, len(measured)), level.get(state.graph.value(edge.value).node, 0)

    for key, edge in sorted(edges.items(), key=lambda one: readiness(one[1])):
        value = state.graph.value(edge.value) if edge.value in candidates and edge.to == "replicated" else None
        depth = depths.get(value.node, when.get(value.node)) if value is not None else None
        if value is None or depth is None or not _is_fixed(state, value):
            continue
        options = plan.options_of(edge.owner)
        if not 0 < edge.bytes < options.bucket_bytes or (in_memory and edge.bytes >= TOO_LARGE_TO_COPY):
            continue
        kind = (edge.dtype, options.hint, edge.compressor, options.bucket_bytes, edge.logical, depth)
        chosen[key] = filler.put(kind, edge.bytes, options.bucket_bytes)
    members = Counter(chosen.values())
    listed = [
        replace(edge, bucket=chosen[key]) if key in chosen and members[chosen[key]] > 1 else edge
        for key, edge in edges.items()
    ]

    def depth_of(edge: EdgePlan) -> int | None:
        value = state.graph.value(edge.value)
        return depths.get(value.node) if _is_fixed(state, value) else None

    rides = plan.local_sgd is None and are_run_together(plan, variables)  # with local SGD, not every step has a bucket
    return add_riders(plan, state, listed, depth_of) if rides else listed


def _is_summed(edge: EdgePlan) -> bool:
    """Return whether a collective adds the value up, element by element."""
    if edge.compressor == NONE:
        return edge.is_collective and edge.lowered.is_bucketed and edge.lowered.does(Operation.REDUCE)
    return codec_of(edge.compressor).elementwise and edge.is_collective and edge.lowered.is_everywhere


def _is_fixed(state: Propagation, value: Value) -> bool:
    fact = state.source(value)
    return fact.placement == PARTIAL and not wire_types.may_change(fact)


def when_run(plan: Plan, state: Propagation) -> dict[Node, Guards]:
    """Return the nodes whose sums may share a bucket, with the branches that they are in: equal ones run together.

    They are outside of loops and branches; averages (`local_sgd`) may also be in a branch.
    """
    always: Guards = frozenset()
    found = dict.fromkeys(unconditional_nodes(state.order), always)
    if plan.local_sgd is not None:
        guards = guards_of(state.order, frames_of(state.order))
        found |= {node: guard for node, guard in guards.items() if node not in state.looped}
    return found


def _depths(state: Propagation) -> dict[Node, int]:
    """Return, for nodes outside of loops and branches, how many reductions precede them, one after another."""
    sources = {value.node for value in state.reduced}
    behind = descendants(sources)  # few nodes: sums lead to updates, and no further
    depths: dict[Node, int] = {}
    for node in [node for node in state.order if node in behind]:
        depth = max([depths.get(producer, 0) for producer in dependencies(node)], default=0)
        depths[node] = depth + any([value in state.reduced for value in node.inputs])
    return {node: depths.get(node, 0) for node in unconditional_nodes(state.order)}


def add_riders(plan: Plan, state: Propagation, edges: Iterable[EdgePlan], depth_of: Depth) -> list[EdgePlan]:
    """Return the edges, with bucket numbers also for riders.

    Args:
        edges: with their buckets, in graph order.
    """
    listed = list(edges)
    plain = [edge for edge in listed if edge.bucket and edge.compressor == NONE]
    host = max(plain, key=lambda edge: edge.bucket, default=None)
    if host is None or host.lowering != "collective_reduce" or host.dtype not in EXACT:
        return listed
    deepest = depth_of(host) or 0
    depths = {edge.value: depth_of(edge) for edge in _final_sums(plan, state, listed, host)}
    riding = {value for value, depth in depths.items() if depth is not None and depth <= deepest}
    counts = any(_counts_examples(state, edge) for edge in listed)
    if not counts and all(parse(device).kind == "CPU" for device in plan.devices):
        numbers = 2 * (1 + DIGEST) * len(plan.processes) * EXACT[host.dtype]
        listed = [
            replace(edge, lowering=host.lowering, dtype=host.dtype, bytes=numbers, bucket=host.bucket)
            if edge.to == SIZES
            else edge
            for edge in listed
        ]
    return [
        replace(edge, bucket=host.bucket) if edge.value in riding and edge.to == host.to else edge for edge in listed
    ]


def are_run_together(plan: Plan, variables: Mapping[str, Variable]) -> bool:
    """Return whether a step always runs as a whole, in processes that have one replica each."""
    is_function = any(variable.captured for variable in variables.values())
    is_plain = not plan.part_devices and plan.microbatches == 1 and not plan.homes
    return is_function and is_plain and len(plan.processes) > 1 and plan.replicas_each == 1


def _final_sums(plan: Plan, state: Propagation, edges: Iterable[EdgePlan], host: EdgePlan) -> Iterator[EdgePlan]:
    """Yield the small sums of the step that no other exchange depends on, if they match the sums of a bucket."""
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
    """Return whether the lowering of an edge may ask how many examples each process has."""
    value = state.graph.value(edge.value)
    if edge.to == SIZES:
        return value not in state.whole_inputs
    is_cut = value in state.whole_inputs and edge.to != repr(REPLICATED)
    return not (is_cut or edge.from_.startswith("partial"))
