"""Placement of the contents of tensor arrays and stacks: the join of everything that is written to them.

    x: split(0) ──► TensorArray        dx: of unknown size ──► TensorArrayGrad        blocks, as x

TensorFlow makes an array of gradients with the element shape of the array that they belong to, and refuses another. So
both hold blocks, or both whole values; and a gradient has a block for each replica, whatever is known about its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autograph_rewrite.ops.facts.placement import ANY, REPLICATED, UNKNOWN, Fact
from autograph_rewrite.ops.facts.symbolic_dims import to_global
from autograph_rewrite.ops.rules.base import WHOLE
from autograph_rewrite.ops.rules.join import join
from autograph_rewrite.ops.rules.tensor_arrays import EMPTY, element

if TYPE_CHECKING:
    from autograph_rewrite.analysis.propagate import Propagation
    from autograph_rewrite.analysis.transfer import NodeTransfer
    from autograph_rewrite.ir.graph import Node


def content(state: Propagation, cell: str) -> Fact:
    """Return what a container holds, as far as that is known."""
    found = state.cells.get(cell)
    return found if found is not None else _tied(state, cell, EMPTY)


def put(state: Propagation, node: Node, transferred: NodeTransfer) -> bool:
    """Record what a write puts into its container; return whether some container's content changed.

    Args:
        state: facts so far; the container's content is updated in it.
        transferred: its transfer, which names the operands that are container and element.
    """
    assert transferred.holds is not None
    container, index = transferred.holds
    cell = state.facts[node.inputs[container]].cell
    if not cell:
        return False
    fact = state.facts[node.inputs[index]]
    if fact.is_segmented:
        fact = _whole(state, fact)  # as it is read
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
    """Return the array of whose elements a container holds the gradients; empty for any other container."""
    return cell.rpartition("@")[0]


def _tied(state: Propagation, cell: str, fact: Fact) -> Fact:
    """Return what a container holds, given what is put in."""
    if WHOLE in maker(state, cell).attrs:
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
