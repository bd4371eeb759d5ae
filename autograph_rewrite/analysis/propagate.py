"""Placement propagation: one forward walk finds each value's placement and the edges that need a reshard.

    x: split(0)  w: replicated            MatMul(x, w): split(0)
    MatMul(x^T, dy): partial(sum)   ──►   ResourceApplyAdam wants it replicated: one reshard edge

Each loop is walked until nothing changes, before the nodes after it are visited: a first guess about a loop's results
could confirm itself in the next loop. `place_reductions` decides where contributions are summed; the walk is then
repeated with these sums seen as replicated. Equal nodes share one answer (`cache`, by facts).

Propagation of placements from a few annotations to all values follows Lepikhin et al., GShard (2020), and Xu et al.,
GSPMD (2021); here the only annotation is the batch, and `partial` is a placement, as in PyTorch's DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from autograph_rewrite.analysis.replicated_regions import content, mark_containers, mark_loops, put
from autograph_rewrite.analysis.transfer import NodeTransfer, convert, stated_as
from autograph_rewrite.analysis.transfer import transferred as answer_of
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import by_loops, frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ops.facts.placement import REPLICATED, UNKNOWN, Fact, Placement, Shape
from autograph_rewrite.ops.facts.symbolic_dims import Dim, common_symbol, local_symbol
from autograph_rewrite.ops.rules.base import Reshard, Semantics
from autograph_rewrite.ops.rules.inference import const_fact
from autograph_rewrite.ops.rules.marked import MARK, PINNED, kind_of
from autograph_rewrite.ops.rules.table import rule_of
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, MERGES, has

Stated = Mapping[Value, Placement | Fact]
NOTHING_GIVEN: Stated = MappingProxyType({})
NOTHING_REDUCED: Mapping[Value, Reshard] = MappingProxyType({})
MAX_ROUNDS = 24  # walks, of all nodes or of one loop, before placements count as not settled
RESTARTS = 4  # walks from empty containers, at most
FALLBACKS = 64
"""How often more of a graph is marked to be whole before propagation gives up."""


@dataclass
class Propagation:
    """The placements of a graph.

    Attributes:
        order: its nodes, producers first.
        facts: what readers see of each value.
        raw: the fact before the conversion of each value in `whole_inputs` and `reduced`.
        transfers: the placements of each node and the conversions of its inputs.
        reduced: contributions that are summed, and rows that are gathered, once for all readers; these see the whole or
            a block of it.
        whole_inputs: batch inputs, whole in the graph, with the dimension that is split for their readers.
        given: placements or facts that the caller states; they replace those that rules find.
    """

    graph: Graph
    order: list[Node]
    semantics: Semantics
    facts: dict[Value, Fact] = field(default_factory=dict)
    raw: dict[Value, Fact] = field(default_factory=dict)
    transfers: dict[Node, NodeTransfer] = field(default_factory=dict)
    reduced: dict[Value, Reshard] = field(default_factory=dict)
    whole_inputs: dict[Value, int] = field(default_factory=dict)
    given: Stated = field(default_factory=dict)
    cells: dict[str, Fact] = field(default_factory=dict)
    puts: dict[str, dict[Node, Fact]] = field(default_factory=dict)
    cache: dict[Any, NodeTransfer] = field(default_factory=dict)
    visited: dict[Node, tuple[object, object]] = field(default_factory=dict)  # inputs and attributes of each answer
    loops: bool = False
    looped: frozenset[Node] = frozenset()  # the nodes in loops
    runs: list[list[Node]] = field(default_factory=list)  # the order, with the nodes of each loop together
    edits: int = 0  # of the graph when `order` was made
    moving: list[Node] = field(default_factory=list)  # nodes that changed in the last walk, if they did not settle

    @cached_property
    def behind(self) -> Mapping[Node, int]:
        """Which batch inputs each node depends on: a bit for each, in their order."""
        return marks_before(self.order, {value.node: 1 << i for i, value in enumerate(self.whole_inputs)})

    def source(self, value: Value) -> Fact:
        """Return the fact of a value before any conversion."""
        return self.raw.get(value) or self.facts[value]


def propagate(
    graph: Graph,
    batch_inputs: Mapping[Value, int],
    semantics: Semantics,
    *,
    reduced: Mapping[Value, Reshard] = NOTHING_REDUCED,
    given: Stated = NOTHING_GIVEN,
    cache: dict[Any, NodeTransfer] | None = None,
) -> Propagation:
    """Find the placement of every value.

    Args:
        graph: a flat graph (function calls inlined).
        batch_inputs: the values that are cut into blocks, with the dimension to cut.
        reduced: contributions that are summed where they arise, with the placement of the sum that readers see.
        given: placements or facts that replace those that the rules find.
        cache: answers of an earlier walk over the same kind of nodes.

    Raises:
        GraphError: the graph has a cycle outside its loops.
        PassError: the loops do not settle.
    """
    cache = {} if cache is None else cache
    for _ in range(FALLBACKS):
        state = Propagation(graph, topological_order(graph), semantics, edits=graph.edits, given=given, cache=cache)
        state.reduced, state.whole_inputs = dict(reduced), dict(batch_inputs)
        _find(state)
        if not (mark_loops(state) if state.moving else mark_containers(state)):
            break
    if state.moving:
        raise PassError("the placements of a loop do not settle", node=state.moving[0], hint="please report this graph")
    return state


def _find(state: Propagation) -> None:
    """Find the placements under the present marks; they do not settle where `moving` is not empty."""
    loops = state.loops = any(node.op in BACK_EDGES for node in state.order)
    state.looped = frozenset(frames_of(state.order)) if loops else frozenset()
    state.runs = by_loops(state.order) if loops else [state.order]
    settled = _settle(state, optimistic=True)
    for _ in range(RESTARTS if loops and settled else 0):  # if not settled, the nodes in `moving` have to be marked
        before = dict(state.facts)
        _forget_containers(state)
        settled = _settle(state, optimistic=True)
        if not settled or state.facts == before:
            break
    if loops and settled:
        _forget_totals(state)
        settled = _settle(state, optimistic=True)
    if settled and any(fact.placement == UNKNOWN for fact in state.facts.values()):
        _settle(state, optimistic=False)


def revise(state: Propagation, *, reduced: Iterable[Value] = ()) -> Propagation:
    """Propagate again after nodes were replaced, or with more values to reduce; visit only affected nodes.

    Args:
        state: placements of the graph as it was; its contents are reused.
        reduced: further contributions that are summed where they arise.
    """
    return restate(
        state, state.whole_inputs, given=state.given, reduced=state.reduced | dict.fromkeys(reduced, REPLICATED)
    )


def restate(
    state: Propagation,
    batch_inputs: Mapping[Value, int],
    *,
    given: Stated,
    reduced: Mapping[Value, Reshard] = NOTHING_REDUCED,
) -> Propagation:
    """Propagate again with other statements, also after nodes were replaced; visit only affected nodes.

    Args:
        state: placements of the graph as it was; its contents are reused.
        batch_inputs: replaces the values that are cut into blocks.
        given: replaces the given placements or facts.
        reduced: replaces the contributions that are summed where they arise.
    """
    if state.loops or state.cells:
        return propagate(state.graph, batch_inputs, state.semantics, reduced=reduced, given=given, cache=state.cache)
    if state.graph.edits != state.edits:
        state = _without_erased(state)
    new = replace(state, reduced=dict(reduced), whole_inputs=dict(batch_inputs), given=given)
    differ: set[Value] = set()
    changed: tuple[tuple[Mapping[Value, object], Mapping[Value, object]], ...] = (
        (state.reduced, reduced), (state.whole_inputs, batch_inputs), (state.given, given),
    )  # fmt: skip
    for before, after in changed:
        differ |= {value for value in (*before, *after) if before.get(value) != after.get(value)}
    # An edit replaces the list of a node's inputs or attributes, so identity shows it.
    asked = ((node, *new.visited.get(node, (None, None))) for node in new.order)
    dirty = {node for node, inputs, attrs in asked if inputs is not node._inputs or attrs is not node._attrs}
    dirty |= {value.node for value in differ}
    for node in new.order:
        if node in dirty:
            for value in _record(new, node, _visit(new, node, optimistic=True)):
                dirty.update([reader for reader, _ in value._uses])
    return new


def _without_erased(state: Propagation) -> Propagation:
    """Return the state for a graph in which nodes were added and erased, without the answers for erased ones."""
    alive = set(order := topological_order(state.graph))
    transfers = {node: transferred for node, transferred in state.transfers.items() if node in alive}
    facts = {value: fact for value, fact in state.facts.items() if value.node in alive}
    return replace(state, order=order, transfers=transfers, facts=facts, edits=state.graph.edits)


def _record(state: Propagation, node: Node, transferred: NodeTransfer) -> list[Value]:
    """Keep an answer; return the values whose facts it changes."""
    state.transfers[node] = transferred
    state.visited[node] = node._inputs, node._attrs
    changed = []
    for index, fact in enumerate(transferred.outputs):
        value = node.output(index)
        fact = _presented(state, value, fact)
        if state.facts.get(value) != fact:
            state.facts[value] = fact
            changed.append(value)
    return changed


def _settle(state: Propagation, *, optimistic: bool) -> bool:
    """Walk until nothing changes; return whether it came to that. `moving` keeps the nodes that still change."""
    for _ in range(MAX_ROUNDS):
        state.moving.clear()
        changed = _walk(state, optimistic=optimistic)
        if not (changed and (state.loops or state.cells)):
            state.moving.clear()
            return True
    return False


def _forget_containers(state: Propagation) -> None:
    """Forget the contents of containers: a first guess about an element would confirm itself around the loop."""
    state.cells.clear()
    state.puts.clear()
    for value, fact in list(state.facts.items()):
        if fact.dtype == dtypes.VARIANT:
            del state.facts[value]
            state.transfers.pop(value.node, None)
    for node in [node for node, transferred in state.transfers.items() if transferred.holds is not None]:
        del state.transfers[node]


def _forget_totals(state: Propagation) -> None:
    """Forget the totals that loops add up from zero.

    If the first guess about a term was made before containers were known, the total has confirmed itself: a gradient
    would be reduced in every iteration.
    """
    for node in state.order:
        if node.op not in MERGES or not any(state.facts[value].zero for value in node.inputs):
            continue
        for carrier in [value.node for value in node.inputs if value.node.op in BACK_EDGES]:
            if state.facts[carrier.output()].placement == REPLICATED:
                del state.facts[carrier.output()]
                del state.transfers[carrier]


def _walk(state: Propagation, *, optimistic: bool) -> bool:
    """Visit every node, those of a loop until it settles; return whether some fact or container changed."""
    changed = False
    for nodes in state.runs:
        is_loop = len(state.runs) > 1 and nodes[0].op in ENTERS
        for _ in range(MAX_ROUNDS if is_loop else 1):
            if not _walk_once(state, nodes, optimistic):
                break
            changed = True
    return changed


def _walk_once(state: Propagation, nodes: Iterable[Node], optimistic: bool) -> bool:
    changed = False
    for node in nodes:
        transferred = _visit(state, node, optimistic)
        if state.transfers.get(node) is transferred:
            continue
        moved = transferred.holds is not None and put(state, node, transferred)
        if _record(state, node, transferred) or moved:
            state.moving.append(node)
            changed = True
    return changed


def _presented(state: Propagation, value: Value, fact: Fact) -> Fact:
    """Return the fact that readers see: a batch input as its blocks, a reduced value as its sum."""
    axis = state.whole_inputs.get(value)
    if state.given and value in state.given:
        stated = state.given[value]
        fact = stated if isinstance(stated, Fact) else stated_as(fact, stated, state.semantics.extent.units)
    if fact.shape is not None and None in fact.shape and value.node not in state.looped:
        fact = fact._replace(shape=_named(value, fact.shape, axis))
    if axis is not None:
        state.raw[value] = fact
        return _batch_fact(fact, axis, state.semantics.extent.units)
    if value in state.reduced and fact.placement.differs:
        state.raw[value] = fact
        return convert(fact, state.reduced[value], state.semantics.extent.units)
    state.raw.pop(value, None)
    return fact


def _named(value: Value, shape: Shape, batch_axis: int | None) -> Shape:
    """Return a shape with a symbol for each open dimension but the batch's.

    Only for values outside of loops: in a loop, the value of a later iteration may have another size under the same
    symbol.
    """
    return tuple(
        [common_symbol(f"{value.name}/{i}") if dim is None and i != batch_axis else dim for i, dim in enumerate(shape)]
    )


def _batch_fact(fact: Fact, axis: int, batch: int | None) -> Fact:
    """Return the fact of a batch input as its readers see it: one block.

    Args:
        fact: of the global batch.
        batch: examples of the global batch, where it is static; each may have several rows of the input.
    """
    shape = fact.shape
    if shape is not None:
        extent = shape[axis]
        rows = extent // batch if batch and isinstance(extent, int) and extent % batch == 0 else 1
        shape = (*shape[:axis], local_symbol()._replace(coef=max(rows, 1)), *shape[axis + 1 :])
    return Fact(Placement("split", axis), fact.dtype, shape)


_UNKNOWN_FACT = Fact(UNKNOWN, 0)
_NAMES = ("shared_name", "container", "debug_name")  # they tell equal resources apart


@cache
def _decides(attr: str) -> bool:
    """Return whether an answer may depend on an attribute: one that the op declares, or the mark of a pass."""
    return attr == MARK if attr.startswith("_") else attr not in _NAMES


def _visit(state: Propagation, node: Node, optimistic: bool) -> NodeTransfer:
    if has(node.op, "constant"):
        return state.transfers.get(node) or NodeTransfer((const_fact(node),))
    inputs = tuple([state.facts.get(value, _UNKNOWN_FACT) for value in node.inputs])
    if node.op in MERGES:
        inputs = _without_own_size(node, inputs)
    if not optimistic:
        inputs = tuple([f._replace(placement=REPLICATED) if f.placement == UNKNOWN else f for f in inputs])
    cells = tuple([(i, content(state, fact.cell)) for i, fact in enumerate(inputs) if fact.cell])
    attrs = tuple([item for item in node._attrs.items() if _decides(item[0])])
    key = (node.op, attrs, inputs, cells, node._attrs.get("_output_shapes"))
    transferred = state.cache.get(key)
    if transferred is None:
        transferred = answer_of(node, inputs, dict(cells), state.semantics)
        rule = rule_of(node.op)
        if rule is None or not (rule.identity or any(_is_fresh(fact) for fact in transferred.outputs)):
            state.cache[key] = transferred
    return transferred


def _without_own_size(node: Node, inputs: tuple[Fact, ...]) -> tuple[Fact, ...]:
    """Return the facts that meet; a block size that went around the loop unchanged becomes the size that entered."""
    own = local_symbol(f"{node.name}:0")
    sizes = [fact.split_size for fact in inputs]
    entered = next((size for size in sizes if size is not None and size != own), None)
    if own not in sizes or entered is None:
        return inputs
    return tuple([fact._replace(shape=_replaced(fact.shape, own, entered)) for fact in inputs])


def _replaced(shape: Shape | None, old: Dim, new: Dim) -> Shape | None:
    return None if shape is None else tuple([new if dim == old else dim for dim in shape])


def _is_fresh(fact: Fact) -> bool:
    """Return whether a fact names its own node, so that no other node may share it."""
    return bool(fact.cell) or any(
        "#" in factor for dim in fact.shape or () if isinstance(dim, tuple) for factor in dim.factors
    )


def notes(state: Propagation) -> list[tuple[Node, str]]:
    """Return the nodes that run whole because no rule divides them, with the reason."""
    return [(node, transferred.note) for node, transferred in state.transfers.items() if transferred.note]


def is_pinned(node: Node) -> bool:
    """Return whether a node runs once even where each replica holds a copy of the variables.

    Randomness, inputs and side effects must happen as often as on one device. An op that touches a variable is not
    pinned: every mirror of the variable needs it.
    """
    rule = rule_of(node.op)
    if kind_of(node) == PINNED:
        return True
    if rule is not None:
        return rule.pinned
    op = find_op(node.op)
    touches_variable = any(dtypes.base(value.dtype) == dtypes.RESOURCE for value in node.inputs)
    return op is not None and op.is_stateful and not touches_variable
