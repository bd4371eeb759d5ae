"""Mark regions that must be replicated: containers that cannot be resharded, loops whose placements do not settle.

    blocks ──► list ──► TensorListConcat wants it whole          a list cannot be converted once it is there,
    whole  ──► list ──► TensorListConcat                         so what is put in is whole from the start

Marked nodes are computed whole, once, with a note; then propagation starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import reachable
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import ANY, REPLICATED, UNKNOWN, Fact
from autograph_rewrite.ops.facts.symbolic_dims import to_global
from autograph_rewrite.ops.rules.join import join
from autograph_rewrite.ops.rules.marked import is_whole, make_whole
from autograph_rewrite.ops.rules.tensor_arrays import EMPTY, element
from autograph_rewrite.ops.traits import MERGES, has

if TYPE_CHECKING:
    from autograph_rewrite.analysis.propagate import Propagation
    from autograph_rewrite.analysis.transfer import NodeTransfer

NOT_ALIKE = "a container whose elements cannot all be cut into blocks alike, so it holds whole values"
UNSETTLED = "what goes around the loop cannot be cut into blocks alike in every iteration, so it is whole"


def mark_containers(state: Propagation) -> int:
    """Mark the containers that hold blocks but have a reader of the whole; return how many nodes are newly marked."""
    lists: list[Value] = []
    chosen: dict[Node, None] = {}
    for node, transferred in state.transfers.items():
        for index in transferred.operand_reshards:
            value = node.inputs[index]
            if value.dtype == dtypes.VARIANT and state.facts[value].placement.differs:
                lists.append(value)
        if transferred.holds is not None and _is_misfit(state, node):
            chosen[maker(state, state.facts[node.inputs[transferred.holds[0]]].cell)] = None
    chosen |= dict.fromkeys(
        node for node in _connected(lists) if not (has(node.op, "forwards_handle") or node.op == "IdentityN")
    )
    return _mark(chosen, NOT_ALIKE)


def mark_loops(state: Propagation) -> int:
    """Mark the merges and containers that were still changing; return how many nodes are newly marked."""
    chosen = {node: None for node in state.moving if node.op in MERGES}
    for node in state.moving:
        holds = state.transfers[node].holds
        if holds is not None:
            chosen[maker(state, state.facts[node.inputs[holds[0]]].cell)] = None
    return _mark(chosen, UNSETTLED)


def _is_misfit(state: Propagation, node: Node) -> bool:
    """Return whether a write puts a whole value into an array or stack of blocks."""
    transferred = state.transfers[node]
    assert transferred.holds is not None
    container, index = transferred.holds
    cell = state.facts[node.inputs[container]].cell
    wanted = transferred.operand_reshards.get(index)
    return bool(cell) and content(state, cell).placement.is_split and wanted is not None and wanted == REPLICATED


def _connected(lists: Iterable[Value]) -> dict[Node, None]:
    """Return the nodes that make, change, forward or read these lists, or lists made of them or into them."""

    def around(value: Value) -> list[Node]:
        return [value.node, *(node for node, _ in value._uses)]

    def beside(value: Value) -> Iterator[Value]:
        values = (other for node in around(value) for other in (*node.inputs, *node.read_outputs))
        return (other for other in values if other.dtype == dtypes.VARIANT)

    return dict.fromkeys(node for value in reachable(lists, beside) for node in around(value))


def _mark(nodes: Iterable[Node], reason: str) -> int:
    return sum([make_whole(node, reason) for node in nodes])


# Placement of the contents of tensor arrays and stacks: the join of everything that is written to them.
#
#     x: split(0) ──► TensorArray        dx: of unknown size ──► TensorArrayGrad        blocks, as x
#
# TensorFlow gives an array of gradients the element shape of its source array, and refuses any other. So both hold
# blocks, or both hold whole values, whatever is known about the size of a gradient.


def content(state: Propagation, cell: str) -> Fact:
    """Return the content of a container, as far as it is known."""
    return state.cells.get(cell) or _tied(state, cell, EMPTY)


def put(state: Propagation, node: Node, transferred: NodeTransfer) -> bool:
    """Record the element that a write puts into its container; return whether some container's content changed.

    Args:
        state: facts so far; the container's content is updated in it.
        transferred: the write's transfer, which tells the operands that are container and element.
    """
    assert transferred.holds is not None
    container, index = transferred.holds
    cell = state.facts[node.inputs[container]].cell
    if not cell:
        return False
    fact = state.facts[node.inputs[index]]
    if fact.is_segmented:
        fact = _whole(state, fact)  # writes read blocks with segments whole
    state.puts.setdefault(cell, {})[node] = element(node.op, fact)
    return _update(state, cell)


def maker(state: Propagation, cell: str) -> Node:
    """Return the node that made a container, or the array whose gradients it holds."""
    return state.graph.nodes[cell.partition("@")[0]]


def _update(state: Propagation, cell: str) -> bool:
    joined = join(state.puts[cell].values(), state.semantics.extent.units)._replace(cell="")
    found = _tied(state, cell, joined)
    changed = state.cells.get(cell) != found
    state.cells[cell] = found
    for other in [other for other in state.puts if _values_of(other) == cell] if changed else ():
        _update(state, other)
    return changed


def _values_of(cell: str) -> str:
    """Return the array whose gradients a container holds; empty for any other container."""
    return cell.rpartition("@")[0]


def _tied(state: Propagation, cell: str, fact: Fact) -> Fact:
    """Return a container's content from the fact of its elements and, if it holds gradients, from its source array."""
    if is_whole(maker(state, cell)):
        return _whole(state, fact)
    values = _values_of(cell)
    held = content(state, values) if values else EMPTY
    if held.placement in (ANY, UNKNOWN):
        return fact
    if not held.placement.is_split:
        return _whole(state, fact) if fact.placement.is_split else fact
    is_empty = fact.placement in (ANY, UNKNOWN)
    return held._replace(zero=is_empty or fact.zero, value=None, cell=values)


def _whole(state: Propagation, fact: Fact) -> Fact:
    if not fact.placement.differs:
        return fact
    shape = None if fact.shape is None else tuple(to_global(dim, state.semantics.extent.units) for dim in fact.shape)
    return fact._replace(placement=REPLICATED, shape=shape, value=None)
