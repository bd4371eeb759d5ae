"""Decide where to sum contributions: a minimum cut over each connected region of partial values.

    dW ──► (1 - b1) * dW ──► m + ...        one reduction at dW, not one at each reader
       └─► dW * dW ────────► v + ...

A sum may move along linear ops. Each region (partial values joined by linear ops) has sources, where contributions
arise, and demands, where a reader needs the whole sum. Cutting all paths between them at the fewest bytes gives one
reduction of the raw gradient for every optimizer, and one of the sum for tied weights.

Capacities are bytes. A single source that no value is smaller than is the cut; otherwise, of several minimum cuts, the
one closest to the demands is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping

from autograph_rewrite.analysis.networks import groups, minimum_cut
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import REPLICA
from autograph_rewrite.ir.traversal import reachable
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_over
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.rules.marked import BLOCKWISE, why_in_block
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, SWITCHES, has

Cuts = dict[Hashable, set[Value]]
"""Minimum cuts, by everything that they depend on."""
UNKNOWN_SIZE = 1024
"""The size of an unknown dimension; only the comparison of sizes matters."""


def size_of(dim: Dim) -> int:
    """Return a size for comparisons, symbols replaced by a typical number."""
    if isinstance(dim, int):
        return dim
    return UNKNOWN_SIZE if dim is None else dim.coef * UNKNOWN_SIZE ** len(dim.factors)


def bytes_of(fact: Fact) -> int:
    """Return the (typical) bytes of one instance; half-precision sums are sent as float32."""
    elements = math.prod(size_of(dim) for dim in fact.shape) if fact.shape is not None else UNKNOWN_SIZE
    return elements * max(4, dtypes.width(fact.dtype))


def _is_sum(state: Propagation, value: Value) -> bool:
    fact = state.facts.get(value)
    return fact is not None and fact.placement == PARTIAL and not fact.zero


def _linear_readers(state: Propagation, value: Value) -> tuple[list[Value], bool]:
    """Return the partial values made from `value` without a sum, and whether some reader needs it whole."""
    made: list[Value] = []
    demanded = False
    for node, index in value._uses:
        transferred = state.transfers.get(node)
        if transferred is None:
            continue
        if index in transferred.operand_reshards:
            demanded = True
            continue
        made += [
            node.output(i) for i, fact in enumerate(transferred.outputs) if _is_sum(state, node.output(i)) and fact
        ]
    return made, demanded


def place_reductions(
    state: Propagation, outputs: Iterable[Value] = (), *, unconditionally: bool = False, cuts: Cuts | None = None
) -> set[Value]:
    """Return the partial values to reduce for all their readers.

    Args:
        state: a propagation in which they are not reduced yet.
        unconditionally: prefer reductions after branches to reductions in them.
        cuts: cuts that were found before; new ones are added.
    """
    cuts = {} if cuts is None else cuts
    unconditional = unconditional_nodes(state.order) if unconditionally else None
    wanted = set(outputs)
    readers: dict[Value, list[Value]] = {}
    demands: set[Value] = set()
    for node in state.order:
        for index in range(len(state.transfers[node].outputs)):
            value = node.output(index)
            if _is_sum(state, value):
                readers[value], demanded = _linear_readers(state, value)
                if demanded or value in wanted:
                    demands.add(value)
    chosen: set[Value] = set()
    for region in _regions(readers):
        ends = [value for value in region if value in demands]
        found = _cut(state, region, readers, ends, unconditional, cuts) if ends else ()
        chosen |= {_handed_on(value, readers, wanted) for value in found}
    return chosen


def _handed_on(value: Value, readers: Mapping[Value, list[Value]], wanted: set[Value]) -> Value:
    """Follow a value through ops that only forward it: they need not wait for the sum.

    `tf.gradients` makes the gradient of a layer's input wait for that of its weight: the backward pass would wait for
    every exchange.
    """
    while value not in wanted and len(value._uses) == 1 and len(readers[value]) == 1:
        (node, _), (copy,) = next(iter(value._uses)), readers[value]
        if not has(node.op, "rearranges") or copy.node is not node or not copy._uses:
            break
        value = copy
    return value


def _regions(readers: Mapping[Value, list[Value]]) -> list[list[Value]]:
    """Group values that linear ops connect; each group in graph order."""
    return groups(readers, ((value, other) for value, made in readers.items() for other in made))


def _cut(
    state: Propagation,
    region: list[Value],
    readers: Mapping[Value, list[Value]],
    ends: list[Value],
    unconditional: set[Node] | None,
    cuts: Cuts,
) -> set[Value]:
    made = {other for value in region for other in readers[value]}
    sources = [value for value in region if value not in made]
    cost = {value: bytes_of(state.facts[value]) for value in region}
    looped = _loop_values(region)
    if unconditional is not None:
        # A Switch always runs, but its output exists in its branch only.
        looped |= {value for value in region if value.node not in unconditional or value.node.op in SWITCHES}
    containers = {value for value in region if dtypes.base(value.dtype) == dtypes.VARIANT}
    if len(sources) == 1 and cost[sources[0]] <= min(cost.values()) and sources[0] not in looped | containers:
        return set(sources)  # the usual case: the raw gradient is the smallest and the first
    expensive = 1 + sum(cost.values())  # a cut with one value in a loop or branch costs more than any without
    prices = {value: bytes_ + (expensive if value in looped else 0) for value, bytes_ in cost.items()}
    # A list cannot be summed: its elements are, before they are put in or after they are taken out.
    impossible = 1 + sum(prices.values())
    prices |= dict.fromkeys(containers, impossible)
    key = tuple(prices.items()), tuple([tuple(readers[value]) for value in region]), tuple(ends)
    if key not in cuts:
        cuts[key] = _minimum_cut(readers, sources or region[:1], ends, prices)
    return cuts[key]


def _loop_values(region: list[Value]) -> set[Value]:
    """Return the values inside a loop: reducing there would repeat the reduction in every iteration."""

    def before(node: Node) -> list[Node]:
        return [] if node.op in ENTERS else [value.node for value in node.inputs]

    inside = reachable((value.node for value in region if value.node.op in BACK_EDGES), before)
    return {value for value in region if value.node in inside and value.node.op not in ENTERS}


def _minimum_cut(
    readers: Mapping[Value, list[Value]], sources: list[Value], ends: list[Value], prices: Mapping[Value, int]
) -> set[Value]:
    edges: dict[tuple[object, object], float] = {}
    for value, price in prices.items():
        edges[(value, "in"), (value, "out")] = price
        for other in readers[value]:
            edges[(value, "out"), (other, "in")] = math.inf
            edges[(other, "in"), (value, "out")] = math.inf  # a partial value is made of partial terms only
    for value in sources:
        edges["source", (value, "in")] = math.inf
    for value in ends:
        edges[(value, "out"), "sink"] = math.inf
    _, source_side = minimum_cut(edges, "source", "sink")
    return {value for value in prices if (value, "in") in source_side and (value, "out") not in source_side}


# Where to gather the rows of a sparse gradient: once, before the optimizer's ops, not after each of them.
#
#     rows ──► rows * rows ──► scatter into the accumulator        one gather of rows, one of indices,
#       └────► rows / root ──► scatter into the table              not one at each scatter
#
# Only rows that lead to these readers alone, through cheap ops, are considered. The cheapest cut wins; of equal ones,
# the one nearest to the rows.


REDUCE, SEGMENT = families("reduce"), families("segment")
CHEAP = families("elementwise", "layout", "concat_split", "slicing", "sizes", "control", "segment", "gather_scatter")
SIZE_BYTES = 8
"""The price of making a size global: next to nothing."""
EXCHANGE_BYTES = 256 * 1024
"""The price of starting an exchange, in bytes sent meanwhile (50 us at 40 Gb/s); indices are sent along with rows."""


def choose_gathers(state: Propagation, outputs: Iterable[Value] = ()) -> set[Value]:
    """Return the split values to gather, and the sizes to make global, for all their readers.

    It is empty where gathering at each reader is no worse.
    """
    if state.loops or state.cells:
        return set()  # values inside a loop would be gathered in every iteration
    serving, demanded = _serving_gathers(state, set(outputs))
    serving = _around_rows(serving, demanded)
    demanded &= set(serving)
    if len(demanded) < 2:
        return set()
    return _cut_rows(state, serving, demanded)


def _around_rows(serving: Mapping[Value, list[Value]], demanded: set[Value]) -> dict[Value, list[Value]]:
    """Return the regions that gather rows, or sum them into a table; mere sums over examples are better reduced."""
    kept: set[Value] = set()
    for region in _regions(serving):
        if any(value in demanded and family_of(value.node.op) not in REDUCE for value in region):
            kept.update(region)
    return {value: made for value, made in serving.items() if value in kept}


def _is_local(state: Propagation, value: Value) -> bool:
    fact = state.facts.get(value)
    return fact is not None and (fact.placement.is_split or fact.is_local) and value not in state.whole_inputs


def _made(state: Propagation, node: Node) -> list[Value]:
    transferred = state.transfers.get(node)
    return [] if transferred is None else [node.output(i) for i in range(len(transferred.outputs))]


def _serving_gathers(state: Propagation, outputs: set[Value]) -> tuple[dict[Value, list[Value]], set[Value]]:
    """Return the values that lead only to gathers, with the values made from each, and those that are gathered now.

    Nodes are visited readers first, from the gathers on: nodes that lead to none are not visited.
    """
    serving: dict[Value, list[Value]] = {}
    demanded: set[Value] = set()
    position = {node: -i for i, node in enumerate(state.order)}
    queue = [(position[node], node.name, node) for node in _gathered_from(state)]
    heapq.heapify(queue)
    seen = {node for _, _, node in queue}
    while queue:
        node = heapq.heappop(queue)[-1]
        if _serves(state, node, outputs, serving, demanded):
            for producer in {value.node: None for value in node.inputs}:
                if producer not in seen and producer in position:
                    seen.add(producer)
                    heapq.heappush(queue, (position[producer], producer.name, producer))
    return serving, demanded


def _gathered_from(state: Propagation) -> set[Node]:
    """Return the nodes whose values are gathered, or are sums of rows that are reduced."""
    found = {value.node for value in state.reduced if value.node in state.transfers and _is_summed(state, value)}
    for node, transferred in state.transfers.items():
        if is_over(node, REPLICA):  # a gather that a pass inserted stays in its place
            continue
        for index, reshard in transferred.operand_reshards.items():
            if reshard == REPLICATED and _is_local(state, node.inputs[index]):
                found.add(node.inputs[index].node)
    return found


def _serves(
    state: Propagation, node: Node, outputs: set[Value], serving: dict[Value, list[Value]], demanded: set[Value]
) -> bool:
    """Note which outputs of a node lead only to gathers; return whether there is one, so that its inputs may, too."""
    found = False
    for value in _made(state, node):
        if value in outputs:
            continue
        if _is_summed(state, value):
            serving[value] = []
            demanded.add(value)
            found = True
            continue
        made = _readers(state, value, serving) if _is_local(state, value) else None
        if made is None:
            continue
        serving[value] = made
        found = True
        wanted = any(state.transfers[n].operand_reshards.get(i) == REPLICATED for n, i in value._uses)
        if wanted and state.facts[value].placement.is_split:
            demanded.add(value)
    return found


def _is_summed(state: Propagation, value: Value) -> bool:
    """Return whether a value is reduced where it arises as a sum of rows: a table, or the norm of an update.

    It could be computed from the gathered rows instead.
    """
    if value not in state.reduced:
        return False
    fact = state.source(value)
    if not fact.placement.is_partial:
        return False
    family = family_of(value.node.op)
    return family in SEGMENT or (family in REDUCE and fact.shape == ())


def _readers(state: Propagation, value: Value, serving: Mapping[Value, list[Value]]) -> list[Value] | None:
    """Return the split values and sizes made from `value`; None if a reader uses its blocks for something else."""
    made: list[Value] = []
    for node, index in value._uses:
        transferred = state.transfers.get(node)
        if transferred is None or is_over(node, REPLICA):
            return None
        if transferred.operand_reshards.get(index) == REPLICATED or transferred.constant:
            continue
        if why_in_block(node) == BLOCKWISE:
            return None  # it needs blocks throughout
        results = [r for r in _made(state, node) if state.source(r).placement.differs]
        if family_of(node.op) not in CHEAP | REDUCE or any(result not in serving for result in results):
            return None
        made += results
    return made


def _price(state: Propagation, value: Value) -> int:
    fact = state.source(value)
    if fact.is_local:
        return SIZE_BYTES
    return bytes_of(fact) + (EXCHANGE_BYTES if fact.dtype in dtypes.INEXACT else 0)


def _cut_rows(state: Propagation, serving: Mapping[Value, list[Value]], demanded: set[Value]) -> set[Value]:
    edges: dict[tuple[object, object], float] = {}
    for value, made in serving.items():
        # Reversed: the cut that `minimum_cut` returns is the one nearest to its sink, the rows.
        edges[(value, "out"), (value, "in")] = _price(state, value)
        for other in made:
            edges[(other, "in"), (value, "out")] = math.inf
            edges[(value, "out"), (other, "in")] = math.inf  # a split value reads no whole terms of the region
        sources = [source for source in value.node.inputs if state.facts[source].placement.differs]
        if not sources or any(source not in serving for source in sources):
            edges[(value, "in"), "rows"] = math.inf  # blocks that cannot be gathered earlier enter here
    for value in demanded:
        edges["readers", (value, "out")] = math.inf
    # Without a finite cut, rows reach a reader without passing a place where they could be gathered.
    best, reader_side = minimum_cut(edges, "readers", "rows")
    now = sum(_price(state, value) for value in demanded)
    if best >= now:
        return set()
    return {
        value
        for value in serving
        if (value, "out") in reader_side and (value, "in") not in reader_side and _is_local(state, value)
    }
