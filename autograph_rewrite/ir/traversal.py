"""Computes topological orders and reachability, without editing the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping
from typing import TypeVar

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ops.traits import BACK_EDGES, EXITS, has

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


def reachable(starts: Iterable[Item], following: Callable[[Item], Iterable[Item]]) -> dict[Item, None]:
    """Return the starts and all items that follow from them, the nearest first."""
    found = dict.fromkeys(starts)
    pending = list(found)
    for item in pending:
        new = [one for one in dict.fromkeys(following(item)) if one not in found]
        found |= dict.fromkeys(new)
        pending += new
    return found


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Return the items of each key, in their order."""
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


def traced_back(value: Value, ops: Container[str]) -> Value:
    """Return the value that some ops hand on, followed back through their first operands."""
    while value.node.op in ops and value.node._inputs:
        value = value.node._inputs[0]
    return value


def dependencies(node: Node) -> list[Node]:
    """Return the nodes that must run before `node`.

    A loop's Merge does not depend on the back edge; a loop's Exit does.
    """
    producers = []
    for value in node._inputs:
        if value.node.op not in BACK_EDGES:
            producers.append(value.node)
    if node.op in EXITS:
        producers += last_iteration(node)
    producers += node._controls
    return producers


def users(node: Node) -> list[Node]:
    """Return the nodes that read a node or wait for it, once for each edge."""
    return [*node._control_users, *(use[0] for value in node._outputs for use in value._uses)]


def last_iteration(exit_: Node) -> list[Node]:
    """Return the back edge of the loop variable whose final value an Exit gives."""
    switch = exit_._inputs[0].node
    merge = switch._inputs[0].node if switch._inputs else switch
    return [value.node for value in merge._inputs if value.node.op in BACK_EDGES]


def topological_order(graph: Graph) -> list[Node]:
    """Return the nodes with every producer before its readers; back edges of loops do not count.

    The order is deterministic (depth first in insertion order) and cached until the graph is edited.

    Raises:
        GraphError: a cycle outside a loop; the message lists it.
    """
    return list(graph.remembered("order", lambda: _in_order(graph)))


def _in_order(graph: Graph) -> list[Node]:
    order: dict[Node, None] = {}
    opened: set[Node] = set()
    for root in graph:
        for value in root._inputs:
            if value.node not in order:
                break
        else:
            if root.op not in EXITS and (not root._controls or order.keys() >= root._controls.keys()):
                order[root] = None  # as most are at once: loaders and builders add producers first
                continue
        stack: list[Node | None] = [root]
        path: list[Node] = []
        while stack:
            node = stack.pop()
            if node is None:  # all that the end of the path waits for is in order
                order[path.pop()] = None
                continue
            if node in order:
                continue
            if node in opened:
                raise GraphError(f"the graph has a cycle: {_cycle(node, order)}", node=node)
            waiting = [producer for producer in dependencies(node) if producer not in order]
            if not waiting:
                order[node] = None
                continue
            opened.add(node)
            path.append(node)
            stack.append(None)
            stack += reversed(waiting)
    return list(order)


def _cycle(node: Node, done: Collection[Node]) -> str:
    """Describe a cycle: follow producers that are not ordered yet until a node repeats."""
    path: list[Node] = []
    while node not in path:
        path.append(node)
        node = next(p for p in dependencies(node) if p not in done)
    names = [n.name for n in path[path.index(node) :]]
    return " -> ".join([names[0], *reversed(names)])


def levels(order: Iterable[Node]) -> dict[Node, int]:
    """Return the length of the longest chain of nodes before each node; `order` has producers first."""
    found: dict[Node, int] = {}
    for node in order:
        level = 0
        for producer in dependencies(node):
            if found[producer] >= level:
                level = found[producer] + 1
        found[node] = level
    return found


def marks_before(order: Iterable[Node], marks: Mapping[Node, int]) -> dict[Node, int]:
    """Return, for each node, the union of the marks (bit masks) of all nodes that run before it.

    Args:
        order: producers first; a node that is left out passes on its own marks only.
        marks: of the nodes whose descendants are sought.
    """
    before: dict[Node, int] = {}
    for node in order:
        mask = 0
        for producer in dependencies(node):
            mask |= before.get(producer, 0) | marks.get(producer, 0)
        before[node] = mask
    return before


def ancestors(roots: Iterable[Node], *, controls: bool = True) -> set[Node]:
    """Return the roots and all nodes that they depend on, back edges included."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        for value in node._inputs:
            if (producer := value.node) not in seen:
                seen.add(producer)
                stack.append(producer)
        for producer in node._controls if controls else ():
            if producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return seen


def descendants(roots: Iterable[Node], *, controls: bool = True, unless: str = "") -> set[Node]:
    """Return the roots and all nodes that depend on them.

    Args:
        unless: a trait of ops; readers that have it, and what only they lead to, are left out.
    """
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        readers = [use[0] for value in node._outputs for use in value._uses]
        if controls:
            readers += node._control_users
        for reader in readers:
            if reader not in seen and not (unless and has(reader.op, unless)):
                seen.add(reader)
                stack.append(reader)
    return seen
