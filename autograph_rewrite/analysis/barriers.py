"""Find the barriers between micro-batches: nodes that need a result of all of them, and results that need no variable.

%x each ──► Sum ──► AddN(all) ──► %x - mean       level 1: no micro-batch gets there before all have come so far
%mask each ──► Sum ──► AddN(all) ──► divisor      level 0: no variable is needed, so it is counted beforehand
%ids each ──► Shape ──► [1] of the first          level 0: the same, of any of them
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR
from autograph_rewrite.ir.control_flow import frames_of, shared_frames_of
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH, Select
from autograph_rewrite.ir.traversal import ancestors, descendants
from autograph_rewrite.ir.variable_ops import touching_nodes
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, READS, has


def predecessors(node: Node) -> list[Node]:
    """Return the nodes that a node reads or waits for."""
    return [*[value.node for value in node.inputs], *node.controls]


def successors(node: Node) -> list[Node]:
    """Return the nodes that read a node or wait for it."""
    return [*[use.node for value in node.read_outputs for use in value.uses], *node.control_users]


def parameter_free_nodes(order: Iterable[Node]) -> set[Node]:
    """Return the nodes that compute values shared by all micro-batches, and that can run before any micro-batch.

    Examples: the number of examples that a mask keeps, to which all contribute; the length of the sentences, which is
    taken from one. A node that waits for a variable is left out, even if it reads none: the graph fixes when it runs.
    """
    nodes = list(order)
    late = late_nodes(nodes)
    return ancestors(node for node in shared_by_all(nodes) if node not in late)


def shared_by_all(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that read all micro-batches, or that read the first one for a value that every one needs."""
    needed = ancestors(node for node in nodes if node.span == EACH)
    return [
        node
        for node in nodes
        if Select.ALL in node.selects.values() or (Select.FIRST in node.selects.values() and node in needed)
    ]


def late_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that touch a variable, and all nodes that read them or wait for them."""
    return descendants(touching_nodes(nodes))


def barrier_depths(order: Sequence[Node], early: Collection[Node]) -> dict[Node, int]:
    """Return how many barriers precede each node: nodes that read all instances, and loops that instances share.

    All nodes of a loop are as deep as its deepest, also where each instance runs the loop by itself.

    Args:
        order: all nodes of a folded graph, in topological order except for loops' back edges.
        early: nodes that need no variable: they run before all micro-batches.
    """
    levels: dict[Node, int] = dict.fromkeys(order, 0)
    depths: dict[str, int] = {}
    loops = {node: frame[0] for node, frame in frames_of(order).items()}
    shared = shared_frames_of(order)
    for _ in range(len(set(loops.values())) + 1):
        changed = False
        for node in order:
            if node in early:
                continue
            loop = loops.get(node)
            level = max(_depths_before(node, levels, loops), default=0)
            if loop is not None:
                meets = node.op in ENTERS and node in shared
                level = depths[loop] = max(level + meets, depths.get(loop, 0))
            changed |= level != levels[node]
            levels[node] = level
        if not changed:
            break
    return levels


def _depths_before(node: Node, levels: Mapping[Node, int], loops: Mapping[Node, str]) -> Iterator[int]:
    """Yield the depth that each predecessor outside of a node's loop gives it."""
    loop = loops.get(node)
    for index, value in enumerate(node.inputs):
        producer = value.node
        if producer.op not in BACK_EDGES and (loop is None or loops.get(producer) != loop):
            yield levels[producer] + (node.selects.get(index) is Select.ALL and producer.span == EACH)
    for control in node.controls:
        if loop is None or loops.get(control) != loop:
            yield levels[control] + (node.span != EACH and control.span == EACH)


def needed_of_all(node: Node, levels: Mapping[Node, int]) -> str:
    """Say what a node needs of all micro-batches: a value, or a node that it waits for, by its original name."""
    met = next((producer for producer in predecessors(node) if levels.get(producer, 0)), None)
    if met is None:  # all nodes of a loop are as deep as its deepest
        return "is in a loop that needs something of the whole batch"
    read = met.inputs[0].node if met.op == "Identity" else met
    if read.op in READS:
        return f"needs '{_original_name(read)}', the variable as it is after all micro-batches"
    parts = [value.node for value in met.inputs if not has(value.node.op, "constant")]
    if parts and all(part.op in READS for part in parts):
        return f"needs '{_original_name(met)}', a variable that is joined from its shards once for all micro-batches"
    if any(value.node is met for value in node.inputs):
        return f"needs '{_original_name(met)}' of the whole batch"
    return f"waits for '{_original_name(met)}', which comes after all micro-batches"


def _original_name(node: Node) -> str:
    origin = node.attr(ORIGIN_ATTR, b"")
    return origin.decode() if origin else node.name
