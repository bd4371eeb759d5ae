"""Restore the order of accesses to each variable that conversions, copies and devices may have lost.

    before   assign_sub(w) ──► gradient ──► apply(w) ──^──► read(w)
    after    assign_sub(w/part_k) ──► ... ──► apply(w/part_k) ──^──► read(w/part_k), on each replica

The order in the original graph is recorded before any pass changes it. After all passes, each pair of accesses to one
variable or shard, of which at least one writes, must be in that order for all instances. Where the path between them
was lost (a size became a constant, a value is read from the first replica only), an edge is added. Where the order is
reversed, the rewrite is refused. Accesses in a loop or a branch end before a later access begins. Accesses in a branch
wait for earlier ones outside; a loop keeps the edges that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autograph_rewrite.analysis.variable_uses import completions
from autograph_rewrite.errors import GraphError, VerifyError
from autograph_rewrite.ir.control_flow import frames_of, guards_of, unconditional_nodes
from autograph_rewrite.ir.graph import ORIGIN_ATTR, Graph, Node
from autograph_rewrite.ir.mesh import EACH, Select, is_rarer
from autograph_rewrite.ir.traversal import (
    ancestors,
    dependencies,
    grouped,
    last_iteration,
    marks_before,
    topological_order,
)
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, READS, has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite

REPORT = "report this, with the graph and the plan (`autograph-rewrite plan GRAPH --config CONFIG -o plan.yaml`)"


@dataclass(frozen=True)
class AccessOrder:
    """The order of the accesses of one step in the original graph.

    Attributes:
        bits: one bit per access.
        names: the accesses by their original names.
        before: for each access, the bits of those that run before it.
    """

    bits: Mapping[Node, int]
    names: Mapping[str, Node]
    before: Mapping[Node, int]

    def is_before(self, one: Node, other: Node) -> bool:
        """Return whether one access runs before another."""
        return bool(self.before[other] & self.bits[one])


def access_order(graph: Graph, targets: Iterable[Node]) -> AccessOrder:
    """Record the order of all accesses.

    Args:
        graph: before any pass has changed it.
        targets: the nodes that one step runs.
    """
    step, order = ancestors(targets), topological_order(graph)
    bits = {node: 1 << i for i, node in enumerate(n for n in order if n in step and _is_access(n))}
    before = marks_before(order, bits)
    return AccessOrder(bits, {node.name: node for node in bits}, {node: before[node] for node in bits})


def order_accesses(graph: Graph, recorded: AccessOrder, repeated: Iterable[Node] = ()) -> int:
    """Add the edges that passes have lost; return how many.

    Args:
        graph: the complete folded graph.
        recorded: the order in the original graph.
        repeated: reads and updates of each micro-batch, one micro-batch after another; pairs of them are not ordered
            here.

    Raises:
        VerifyError: two accesses are now in reversed order.
    """
    order = topological_order(graph)
    unconditional = unconditional_nodes(order)
    found = {node: original for node in order if _is_access(node) and (original := _original(graph, node, recorded))}
    alone = {_original(graph, node, recorded) for node in repeated if _is_access(node)}
    ends = completions(order, unconditional, found)
    ordered = [pair for pair in _pairs(found, recorded) if not alone.issuperset(found[node] for node in pair)]
    frames = frames_of(order)
    guards = guards_of(order, frames)
    waiting = [
        (one, other)
        for one, other in ordered
        if other in unconditional or (other not in frames and one not in guards)  # between branches, edges are kept
    ]
    pairs = [(end, other) for one, other in waiting for end in ends[one]]
    marks = {node: 1 << i for i, node in enumerate(dict.fromkeys(node for pair in pairs for node in pair))}
    sound = _before_on_every_replica(order, marks)
    lost = [(one, other) for one, other in pairs if not sound[other] & marks[one]]
    if not lost:
        return 0
    before = marks_before(order, marks)
    for one, other in lost:
        if not before[one] & marks[other]:
            other.add_control(one)
        elif one in found:
            raise VerifyError(_turned(one, other), node=other, hint=REPORT)
    try:
        topological_order(graph)
    except GraphError as error:
        raise VerifyError(f"{_turned(*lost[0])}: {error.problem}", node=lost[0][1], hint=REPORT) from None
    return len(lost)


def _turned(one: Node, other: Node) -> str:
    return f"'{other.name}' would come before '{one.name}', but follows it in the original graph"


def _is_access(node: Node) -> bool:
    return node.op in READS or is_update(node)


def _original(graph: Graph, node: Node, recorded: AccessOrder) -> Node | None:
    """Return the access of the original graph that an access is, or was made for."""
    current: Node | None = node
    for _ in range(len(graph)):
        if current is None or current in recorded.bits:
            return current
        origin = (current.attr(ORIGIN_ATTR) or b"").decode()
        if origin in recorded.names:
            return recorded.names[origin]
        following = graph.nodes.get(origin)
        current = following if following is not current else None
    return None


def _pairs(found: Mapping[Node, Node], recorded: AccessOrder) -> Iterator[tuple[Node, Node]]:
    """Yield the pairs of accesses of one variable that the original graph orders, the earlier one first."""
    by_handle = grouped((handle, node) for node in found for handle in _handles(node))
    for accesses in by_handle.values():
        updates = [node for node in accesses if is_update(node)]
        for update in updates:
            for node in accesses:
                if recorded.is_before(found[node], found[update]):
                    yield node, update
                elif not is_update(node) and recorded.is_before(found[update], found[node]):
                    yield update, node


def _before_on_every_replica(order: Iterable[Node], marks: Mapping[Node, int]) -> dict[Node, int]:
    """Return, for each node, its marks and those of the nodes all of whose instances run before any instance of it."""
    found: dict[Node, int] = {}
    for node in order:
        mask = 0
        for producer in _awaited_on_every_replica(node):
            mask |= found[producer]
        found[node] = mask | marks.get(node, 0)
    return found


def _awaited_on_every_replica(node: Node) -> Iterable[Node]:
    """Return the nodes that a node waits for, without those that it reads from one replica only."""
    span = node.span
    if span == EACH:
        return dependencies(node)
    found = [
        value.node
        for index, value in enumerate(node._inputs)
        if value.node.op not in BACK_EDGES
        and (node.selects.get(index) is Select.ALL or not is_rarer(span, value.node.span))
    ]
    if node.op in EXITS:
        found += last_iteration(node)
    return [*found, *node._controls]


@dataclass(frozen=True)
class Repeated:
    """Reads and updates of each micro-batch, one micro-batch after another."""

    nodes: frozenset[Node]


# Order every read of a variable before the step's update, where the graph leaves it open.
#
#     before   ResourceGather(table)   ResourceScatterAdd(table)     one device happens to read first
#     after    ResourceGather(table) ──^──► ResourceScatterAdd(table)
#
# On one device the read usually wins this race; on several replicas it does not. A read that follows the update by any
# path stays after it, and reads in loops and branches are left alone. So is a read that follows other updates, if an
# output or target runs this update without them: fetched alone, it would then run them, too. Reachability is propagated
# as bit masks, one bit per read or update.


class Runs:
    """The updates that run when an output or target is fetched alone.

    Args:
        order: the nodes of the graph, producers first.
        roots: the outputs and targets.
        waiting: further nodes whose order is asked for.
    """

    def __init__(self, order: Sequence[Node], roots: Iterable[Node], waiting: Iterable[Node] = ()) -> None:
        self._updates = _number(node for node in order if is_update(node))
        self._bits = _number([*self._updates, *waiting])
        self._before = marks_before(order, self._bits)
        self._runs = {self._before[root] | self._bits.get(root, 0) for root in roots}

    def is_before(self, one: Node, node: Node) -> bool:
        """Return whether an update, or a node of `waiting`, runs before a node."""
        return bool(self._before[node] & self._bits[one])

    def may_wait(self, node: Node, read: Node) -> bool:
        """Return whether a node can wait for a read: every run of it already does all writes that the read follows."""
        writes = self._before[read] & ((1 << len(self._updates)) - 1)
        return all(run & writes == writes for run in self._runs if run & self._bits[node])


def read_before_update(graph: Graph, targets: Sequence[Node], outputs: Sequence[Node] = ()) -> int:
    """Add the missing edges; return how many.

    Args:
        graph: the complete folded graph.
        targets: the nodes that one step runs.
        outputs: nodes that may be fetched in addition.
    """
    step = ancestors(targets)
    order = topological_order(graph)
    unconditional = unconditional_nodes(order)
    updates = [node for node in graph if node in step and node in unconditional and is_update(node)]
    reads = [node for node in graph if node.op in READS and node in unconditional]
    if not updates or not reads:
        return 0
    by_handle = grouped((handle_node(read.inputs[0]), read) for read in reads)
    pairs = [(update, read) for update in updates for handle in _handles(update) for read in by_handle.get(handle, ())]
    runs = Runs(order, [*targets, *outputs], reads)
    pairs = [(u, r) for u, r in pairs if not (runs.is_before(r, u) or runs.is_before(u, r)) and _needs_no_more(r, step)]
    pairs = [(u, read) for u, read in pairs if runs.may_wait(u, read)]
    written = {update for update, _ in pairs}
    for update, read in pairs:
        update.add_control(read)
    if any(runs.is_before(update, read) for _, read in pairs for update in written) and _has_cycle(graph):
        for update, read in pairs:  # reads of several variables would wait for each other's updates
            update.remove_control(read)
        return 0
    return len(pairs)


def _handles(access: Node) -> Iterable[Node]:
    """Return the handles of the variables that a node accesses: an update writes a variable and its slots."""
    return dict.fromkeys(handle_node(value) for value in access.inputs if value.dtype == dtypes.RESOURCE)


def _number(nodes: Iterable[Node]) -> dict[Node, int]:
    """Return a bit for each node."""
    return {node: 1 << i for i, node in enumerate(dict.fromkeys(nodes))}


def _needs_no_more(read: Node, step: set[Node]) -> bool:
    """Return whether the step runs the read, or could run it without further feeds or updates."""
    more = (node for node in ancestors([read]) if node not in step)
    return read in step or not any(node.op.startswith("Placeholder") or is_update(node) for node in more)


def _has_cycle(graph: Graph) -> bool:
    try:
        topological_order(graph)
    except GraphError:
        return True
    return False


def _order(rewrite: Rewrite) -> None:
    """Restore the original's order of reads and updates wherever conversions have lost it."""
    repeated = rewrite.get(Repeated).nodes if rewrite.has(Repeated) else ()
    order_accesses(rewrite.graph, rewrite.get(AccessOrder), repeated)
    read_before_update(rewrite.graph, rewrite.targets, [value.node for value in rewrite.outputs])


ORDER_ACCESSES = Pass("order-accesses", _order, needs=(AccessOrder,))


# Let every write of a step wait for the elements that the step draws from iterators (`steps_per_run`).
#
#     IteratorGetNext ──► ... ──► gradient ──► AssignSub         waits for the element as it is
#     IteratorGetNext - - - - - - - - - - ──► AssignAdd(step, 1)  waits now: where the data end, the step does nothing
#
# In a loop of steps, the data end in the last iteration. A write that does not depend on the element would still happen
# in that iteration: eight updates for seven elements.


def _draw_first(rewrite: Rewrite) -> None:
    """Let every write wait for the step's draws: the step in which the data end writes nothing (`steps_per_run`)."""
    step, order = ancestors(rewrite.targets), topological_order(rewrite.graph)
    always, frames = unconditional_nodes(order), frames_of(order)
    # Draws after a write, or in a branch, are not waited for.
    draws = [node for node in order if node in step and node in always and has(node.op, "draws_element")]
    if not draws:
        return
    before = ancestors(draws)
    for node in order:
        if node not in step or node in before:
            continue
        enters = node.op in ENTERS and not any(value.node in frames for value in node.inputs)
        if enters or (has(node.op, "writes") and node not in frames):
            for draw in draws:
                node.add_control(draw)


DRAW_BEFORE_WRITES = Pass("draw-before-writes", _draw_first, lambda rewrite: rewrite.plan.steps_per_run > 1)
