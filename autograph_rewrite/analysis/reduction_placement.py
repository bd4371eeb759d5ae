"""Where to sum contributions: a minimum cut over each connected region of partial values.

    dW ──► (1 - b1) * dW ──► m + ...        one reduction at dW, not one at each reader
       └─► dW * dW ────────► v + ...

A sum may slide along linear ops. Each region (partial values joined by linear ops) has sources, where contributions
arise, and demands, where somebody needs the whole sum. Cutting all paths between them at the fewest bytes, as early as
possible, gives one reduction of the raw gradient for every optimizer, and one of the sum for tied weights.

Capacities are bytes. Of several minimum cuts, the one closest to the demands is taken.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

from autograph_rewrite.analysis.networks import groups, minimum_cut
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, Fact
from autograph_rewrite.ops.facts.symbolic_dims import Dim
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, SWITCHES, has

Cuts = dict[Hashable, set[Value]]
"""Minimum cuts by all that decides them."""
UNKNOWN_SIZE = 1024
"""Stands in for a dimension that nothing is known about; only the comparison of sizes matters."""


def size_of(dim: Dim) -> int:
    """Return a size for comparisons, symbols replaced by a typical number."""
    if isinstance(dim, int):
        return dim
    return UNKNOWN_SIZE if dim is None else dim.coef * UNKNOWN_SIZE ** len(dim.factors)


def bytes_of(fact: Fact) -> int:
    """Return the (typical) bytes of one instance; half-precision sums travel as float32."""
    elements = math.prod(size_of(dim) for dim in fact.shape) if fact.shape is not None else UNKNOWN_SIZE
    return elements * max(4, dtypes.width(fact.dtype))


def _is_sum(state: Propagation, value: Value) -> bool:
    fact = state.facts.get(value)
    return fact is not None and fact.placement == PARTIAL and not fact.zero


def _linear_readers(state: Propagation, value: Value) -> tuple[list[Value], bool]:
    """Return the partial values made from `value` as it is, and whether some reader wants it whole."""
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
        outputs: values that the outside reads whole.
        unconditionally: rather reduce behind branches than in them.
        cuts: those found before, which is where those found now are kept.
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
        if ends:
            chosen |= {
                _handed_on(value, readers, wanted) for value in _cut(state, region, readers, ends, unconditional, cuts)
            }
    return chosen


def _handed_on(value: Value, readers: Mapping[Value, list[Value]], wanted: set[Value]) -> Value:
    """Follow a value to where it is used: ops that only hand it on need not wait for the sum.

    `tf.gradients` lets the gradient of a layer's input wait for that of its weight, and would let the backward pass
    wait for every exchange.
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
        # A Switch runs always, and what it gives is there in its branch only.
        looped |= {value for value in region if value.node not in unconditional or value.node.op in SWITCHES}
    containers = {value for value in region if dtypes.base(value.dtype) == dtypes.VARIANT}
    if len(sources) == 1 and cost[sources[0]] <= min(cost.values()) and sources[0] not in looped | containers:
        return set(sources)  # by far the usual case: the raw gradient is the smallest and the first
    expensive = 1 + sum(cost.values())
    prices = {value: bytes_ + (expensive if value in looped else 0) for value, bytes_ in cost.items()}
    # A list of contributions cannot be summed: its elements are, before they are put in or after they are taken out.
    impossible = 1 + sum(prices.values())
    prices |= dict.fromkeys(containers, impossible)
    key = tuple(prices.items()), tuple([tuple(readers[value]) for value in region]), tuple(ends)
    if key not in cuts:
        cuts[key] = _minimum_cut(readers, sources or region[:1], ends, prices)
    return cuts[key]


def _loop_values(region: list[Value]) -> set[Value]:
    """Return the values inside a loop: reducing there would repeat the reduction in every iteration."""
    carried = {value for value in region if value.node.op in BACK_EDGES}
    if not carried:
        return set()
    inside: set[Node] = {value.node for value in carried}
    pending = list(inside)
    while pending:
        node = pending.pop()
        if node.op in ENTERS:
            continue
        for value in node.inputs:
            if value.node not in inside:
                inside.add(value.node)
                pending.append(value.node)
    return {value for value in region if value.node in inside and value.node.op not in ENTERS}


def _minimum_cut(
    readers: Mapping[Value, list[Value]], sources: list[Value], ends: list[Value], prices: Mapping[Value, int]
) -> set[Value]:
    edges: dict[tuple[object, object], float] = {}
    for value, price in prices.items():
        edges[(value, "in"), (value, "out")] = price
        for other in readers[value]:
            edges[(value, "out"), (other, "in")] = math.inf
            edges[(other, "in"), (value, "out")] = math.inf  # what is partial reads only partial terms
    for value in sources:
        edges["source", (value, "in")] = math.inf
    for value in ends:
        edges[(value, "out"), "sink"] = math.inf
    _, source_side = minimum_cut(edges, "source", "sink")
    return {value for value in prices if (value, "in") in source_side and (value, "out") not in source_side}
