"""All-gather a variable's shards before each use, and again before a later one, so that the full value can be freed.

    before   read ──► ConcatV2 ──► MatMul(x, .) ──► ... ──► dy ──► MatMul(dy, ConcatV2)      alive all the time
    after    x ─^─► read ──► ConcatV2 ──► MatMul ──► ... ──► dy ───────────► MatMul
                                                              └─^─► read ──► ConcatV2 ──┘

A reader is later if it depends on another reader of the same whole: in training, the backward pass. What is gathered
for one reader waits for the reader's other operands, unless an update of the variable may have come before them: it
is what the reads saw that is wanted, and never what is there later. Micro-batches gather each for itself: of one gather
for all of them, all would have to wait for the last, with all that they have made so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.traversal import marks_before, topological_order
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses
from autograph_rewrite.ops.traits import has


@dataclass(frozen=True)
class GatheredOnUse:
    """The variables whose shards are joined where they are used.

    Attributes:
        handles: the names of those of their first shards.
    """

    handles: tuple[str, ...] = ()


def gather_on_use(graph: Graph, handles: Iterable[Node]) -> int:
    """Delay the gathers of variables until they are used, and give later readers their own; return how many these are.

    Args:
        handles: those of the first shard of each variable.
    """
    wholes = [whole for handle in handles for whole in _wholes(handle)]
    gathers = set(wholes)
    readers = {reader: None for whole in wholes for reader, _ in whole.output().uses}
    updates = {update: None for whole in wholes for update in _updates(whole)}
    marks = {node: 1 << i for i, node in enumerate({**readers, **updates})}
    before = marks_before(topological_order(graph), marks)
    count = 0
    for whole in wholes:
        reads = [value.node for value in whole.inputs[:-1]]
        uses = whole.output().uses
        mine = sum({marks[reader] for reader, _ in uses})
        new = sum({marks[update] for update in _updates(whole) if not any(before[n] & marks[update] for n in reads)})

        def seen(reader: Node) -> int:
            return reduce(or_, (before[n] | marks.get(n, 0) for n in _operands(reader, gathers)), 0)

        later = [use for use in uses if seen(use.node) & mine and not seen(use.node) & new]
        for reader, index in later:
            copy = _copied(graph, whole, _operands(reader, gathers))
            gathers.add(copy.node)
            reader.set_input(index, copy)
            count += 1
        first = {reader for reader, _ in uses} - {reader for reader, _ in later}
        alone = all(len(value.uses) == 1 for value in whole.inputs[:-1])  # no lookup reads the shards
        if len(first) == 1 and alone and not _is_anchored(graph, whole):  # with one reader, no cycle can come of it
            reader = first.pop()
            _delay(reads, _operands(reader, gathers) if not seen(reader) & new else ())
    return count


def gather_for_each(graph: Graph, gathered: GatheredOnUse) -> None:
    """Let each micro-batch gather what it alone uses; what runs rarer uses too is gathered once.

    Args:
        graph: folded, with the spans of its nodes.
        gathered: of whose shards.
    """
    for whole in [whole for handle in gathered.handles for whole in _wholes(graph.nodes[handle])]:
        readers = [*(use.node for use in whole.output().uses), *whole.control_users]
        if all(reader.span == EACH for reader in readers):
            whole.set_span(EACH)
            for read in [value.node for value in whole.inputs[:-1]]:
                if all(use.node is whole for use in read.output().uses):
                    read.set_span(EACH)


def _updates(whole: Node) -> list[Node]:
    """Return the updates of the variable whose shards a node joins, of each shard."""
    handles = (handle_node(value.node.inputs[0]) for value in whole.inputs[:-1])
    uses = (use.node for handle in handles for use in handle_uses(handle))  # those in branches, too
    return [node for node in dict.fromkeys(uses) if has(node.op, "writes")]


def _operands(reader: Node, gathers: Collection[Node]) -> list[Node]:
    """Return the nodes that a gather for a reader waits for: operands that are neither always there nor gathered.

    Two variables of which one reader needs the wholes would wait for each other.
    """
    nodes = dict.fromkeys(value.node for value in reader.inputs)
    return [node for node in nodes if node not in gathers and not has(node.op, "constants")]


def _is_anchored(graph: Graph, node: Node) -> bool:
    return any(value.node is node for value in graph.anchors.values())


def _delay(reads: Iterable[Node], awaited: Iterable[Node]) -> None:
    for read in reads:
        for node in awaited:
            read.add_control(node)


def _wholes(handle: Node) -> Iterator[Node]:
    """Yield the nodes that join what is read from the shards of a variable."""
    for read, _ in handle.output().uses:
        if read.op == "ReadVariableOp":
            yield from (node for node, index in read.output().uses if node.op == "ConcatV2" and index == 0)


def _copied(graph: Graph, whole: Node, awaited: Iterable[Node]) -> Value:
    """Return the same whole, gathered after other nodes have run."""
    reads = [_copy(graph, value.node, value.node.inputs) for value in whole.inputs[:-1]]
    for read, value in zip(reads, whole.inputs, strict=False):
        _delay([read], (*value.node.controls, *awaited))
    return _copy(graph, whole, [*(read.output() for read in reads), whole.inputs[-1]]).output()


def _copy(graph: Graph, node: Node, inputs: Iterable[Value]) -> Node:
    return copy_node(graph, node, inputs, name=f"{node.name}/again")
