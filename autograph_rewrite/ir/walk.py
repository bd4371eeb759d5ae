"""Orders and reachability over the graph, as plain functions without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node

BACK_EDGES = frozenset(("NextIteration", "RefNextIteration"))


def dependencies(node: Node) -> Iterator[Node]:
    """Yield the nodes that must run before `node`; the back edge of a loop is left out."""
    for value in node.inputs:
        if value.node.op not in BACK_EDGES:
            yield value.node
    yield from node._controls


def topological_order(graph: Graph) -> list[Node]:
    """Return the nodes with every producer before its readers; back edges of loops do not count.

    The order is deterministic: depth first in insertion order.

    Raises:
        GraphError: a cycle outside a loop; the message lists it.
    """
    order: list[Node] = []
    state: dict[Node, bool] = {}  # False: being visited, True: done
    for root in graph:
        if root in state:
            continue
        state[root] = False
        stack = [(root, dependencies(root))]
        while stack:
            node, waiting = stack[-1]
            for producer in waiting:
                seen = state.get(producer)
                if seen is None:
                    state[producer] = False
                    stack.append((producer, dependencies(producer)))
                    break
                if seen is False:
                    names = [n.name for n, _ in stack]
                    cycle = [*names[names.index(producer.name) :], producer.name]
                    raise GraphError(f"the graph has a cycle: {' -> '.join(cycle)}", node=producer)
            else:
                state[node] = True
                order.append(node)
                stack.pop()
    return order


def ancestors(roots: Iterable[Node], *, controls: bool = True) -> set[Node]:
    """Return the roots and everything they need, back edges included."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        for value in node._inputs:
            if value.node not in seen:
                seen.add(value.node)
                stack.append(value.node)
        for producer in node._controls if controls else ():
            if producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return seen


def descendants(roots: Iterable[Node], *, controls: bool = True) -> set[Node]:
    """Return the roots and everything that depends on them."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        readers = [use[0] for value in node._outputs for use in value._uses]
        if controls:
            readers += node._control_users
        for reader in readers:
            if reader not in seen:
                seen.add(reader)
                stack.append(reader)
    return seen
