"""Order every read of a variable before the step's update, where the graph leaves it open.

    before   ResourceGather(table)   ResourceScatterAdd(table)     one device happens to read first
    after    ResourceGather(table) ──^──► ResourceScatterAdd(table)

On one device such a race is usually won by the read; spread over replicas it is not.
A read that follows the update by any path stays behind it, and reads in loops and branches are left alone. So is a read
that follows other updates, if an output or target runs this update without them: fetched alone, it would run them, too.
Reachability is propagated as bit masks, one bit per read or update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.traits import READS
from autograph_rewrite.passes.base.order_accesses import AccessOrder, Repeated, order_accesses
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


class Runs:
    """What each output and target runs if it is fetched alone.

    Args:
        order: the nodes of the graph, producers first.
        roots: the outputs and targets.
        waiting: nodes, besides updates, that are to wait for others.
    """

    def __init__(self, order: Sequence[Node], roots: Iterable[Node], waiting: Iterable[Node] = ()) -> None:
        self._updates = _number(node for node in order if is_update(node))
        self._bits = _number([*self._updates, *waiting])
        self._before = marks_before(order, self._bits)
        self._runs = {self._before[root] | self._bits.get(root, 0) for root in roots}

    def is_before(self, update: Node, node: Node) -> bool:
        """Return whether an update comes before a node."""
        return bool(self._before[node] & self._bits[update])

    def may_wait(self, node: Node, read: Node) -> bool:
        """Return whether no run writes more if a node waits for a read: all that run it write what the read follows."""
        writes = self._before[read] & ((1 << len(self._updates)) - 1)
        return all(run & writes == writes for run in self._runs if run & self._bits[node])


def read_before_update(graph: Graph, targets: Sequence[Node], outputs: Sequence[Node] = ()) -> int:
    """Add the missing edges; return how many.

    Args:
        graph: the folded graph, complete.
        targets: the nodes that one step runs.
        outputs: what may be fetched besides.
    """
    step = ancestors(targets)
    order = topological_order(graph)
    unconditional = unconditional_nodes(order)
    updates = [node for node in graph if node in step and node in unconditional and is_update(node)]
    reads = [node for node in graph if node.op in READS and node in unconditional]
    if not updates or not reads:
        return 0
    by_handle: dict[Node, list[Node]] = {}
    for read in reads:
        by_handle.setdefault(handle_node(read.inputs[0]), []).append(read)
    pairs = [(update, read) for update in updates for handle in _written(update) for read in by_handle.get(handle, ())]
    marks = _number(reads)
    before = marks_before(order, marks)
    pairs = [(update, read) for update, read in pairs if not before[update] & marks[read]]
    if not pairs:
        return 0
    runs = Runs(order, [*targets, *outputs])
    pairs = [(u, read) for u, read in pairs if not runs.is_before(u, read) and _needs_no_more(read, step)]
    pairs = [(u, read) for u, read in pairs if runs.may_wait(u, read)]
    written = {update for update, _ in pairs}
    for update, read in pairs:
        update.add_control(read)
    if any(runs.is_before(update, read) for _, read in pairs for update in written) and _has_cycle(graph):
        for update, read in pairs:  # reads of several variables that wait for each other's updates: leave them be
            update.remove_control(read)
        return 0
    return len(pairs)


def _written(update: Node) -> list[Node]:
    """Return the handles of what an update writes: a variable, and those that its optimizer keeps for it."""
    return [handle_node(value) for value in update.inputs if value.dtype == dtypes.RESOURCE]


def _number(nodes: Iterable[Node]) -> dict[Node, int]:
    """Return a bit for each node."""
    return {node: 1 << i for i, node in enumerate(dict.fromkeys(nodes))}


def _needs_no_more(read: Node, step: set[Node]) -> bool:
    """Return whether the step runs, or can run, the read without being fed or writing anything else."""
    more = (node for node in ancestors([read]) if node not in step)
    return read in step or not any(node.op.startswith("Placeholder") or is_update(node) for node in more)


def _has_cycle(graph: Graph) -> bool:
    try:
        topological_order(graph)
    except GraphError:
        return True
    return False


def _run(rewrite: Rewrite) -> None:
    """Restore the original's order of reads and updates wherever conversions have lost it."""
    repeated = rewrite.get(Repeated).nodes if rewrite.has(Repeated) else ()
    order_accesses(rewrite.graph, rewrite.get(AccessOrder), repeated)
    read_before_update(rewrite.graph, rewrite.targets, [value.node for value in rewrite.outputs])


ORDER_ACCESSES = Pass("order-accesses", _run, needs=(AccessOrder,))
