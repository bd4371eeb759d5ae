"""Which nodes must run on every replica: those that read or produce values that differ between replicas.

    dw: partial on each ──► AddN(all) ──► dw * dw ──► update          once, where the variable lives
    rows: split on each ──► Shape ──► [3, 4]: the same everywhere     each; a constant takes its place

Everything else may run once: servers run a part of it, and mirrored replicas repeat it.
"""

from __future__ import annotations

from collections.abc import Container

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.traits import has


def differs_by_replica(state: Propagation, node: Node, future_splits: Container[Value] = ()) -> bool:
    """Return whether the instances of a node read or give different values, so that it cannot run once.

    Args:
        state: the placements.
        node: an original node.
        future_splits: empty lists that will hold blocks.
    """
    transferred = state.transfers[node]
    if transferred.constant:  # it stays only where something waits for it
        return True
    for index in range(len(transferred.outputs)):  # of every node of the graph: a generator would cost as much again
        value = node.output(index)
        if state.source(value).placement.differs or value in future_splits:
            return True
        if (cell := state.facts[value].cell) in state.cells and state.cells[cell].placement.differs:
            return True
    for index, value in enumerate(node._inputs):
        fact = state.facts[value]
        if fact.cell and state.cells.get(fact.cell, fact).placement.differs:
            return True
        if fact.placement.differs and fact.dtype == dtypes.RESOURCE:  # each replica has its shard of a variable
            return True
        if (
            fact.placement.differs
            and index not in transferred.operand_reshards
            and transferred.outputs
            and not has(node.op, "measures")
        ):
            return True
    return False
