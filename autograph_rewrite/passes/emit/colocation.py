"""Colocation: a variable and all that reads or writes it share a device, per instance; slots are with their update.

w @ CPU:1, m @ CPU:1 ──► ResourceApplyMomentum(w, m) @ CPU:1        right
w @ CPU:1, m @ CPU:0 ──► ResourceApplyMomentum(w, m)                TensorFlow could place it nowhere

A table is there once, on the host, and so are all lookups in it.

It is checked once everything has its device: TensorFlow would say so in its own words, in the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_specs import canonical
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses
from autograph_rewrite.ops.traits import ENTERS, READS, has
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout

REPORT = "report this, with the graph; strategy AllReduce puts no variable elsewhere"


def require_beside(graph: Graph, handles: Iterable[str], layout: ReplicaLayout) -> None:
    """Refuse a placement that no session could run.

    Args:
        graph: the folded graph; what runs once has its device.
        handles: the names of the nodes that give the variables' handles.
        layout: of the instances of nodes that every replica runs.

    Raises:
        VerifyError: a node is on another device than a variable that it reads or writes.
    """
    of_each, known = [canonical(device) for device in layout.cells[0]], functools.cache(canonical)

    def places(node: Node) -> list[str]:
        if node.span == ONCE:
            return [known(node.device)]
        shared = layout.shared(node)
        return of_each if shared is None else [known(shared)]

    for name in handles:
        handle = graph.nodes.get(name)
        home = places(handle) if handle is not None else []
        for node, _ in handle_uses(handle) if handle is not None else ():
            mine = places(node)
            if not _meet(mine, home):
                problem = f"'{node.name}' runs on {mine[0]}, but '{name}', which it reads or writes, is on {home[0]}"
                raise VerifyError(problem, node=node, hint=REPORT)


def follow(rewrite: Rewrite) -> None:
    """Put what brings a handle into a loop of micro-batches where the variable is."""
    for node in rewrite.graph:
        if node.op not in ENTERS or node.inputs[0].dtype != dtypes.RESOURCE or rewrite.home_of(node) is not None:
            continue
        if (home := rewrite.home_of(node.inputs[0].node)) is not None:
            rewrite.settle(node, home)


def stay_at_tables(rewrite: Rewrite, home: str) -> None:
    """Put lookups, and what hands them a table, where the one table is, whichever replica's keys are looked up."""
    for node in rewrite.graph:
        if not has(node.op, "table_lookups"):
            continue
        while node.span != ONCE and rewrite.home_of(node) is None:
            rewrite.settle(node, home)
            if not node.inputs:
                break
            node = node.inputs[0].node


def read_beside(rewrite: Rewrite) -> None:
    """Put what every replica looks up in a variable that is there once on its device: rows travel, not the table."""
    for node in rewrite.graph:
        if node.span != ONCE and node.op in READS and rewrite.home_of(node) is None:
            handle = handle_node(node.inputs[0])
            if handle.span == ONCE and node.inputs[0].node.span == ONCE:
                rewrite.settle(node, handle.device)


def _meet(mine: list[str], home: list[str]) -> bool:
    """Return whether each instance finds its variable on its own device."""
    if len(home) == 1 or len(mine) == 1:  # one variable for all, or one reader of the first replica's
        return all(place == home[0] for place in mine)
    return mine == home
