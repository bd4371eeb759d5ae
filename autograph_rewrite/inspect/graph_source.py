"""Read the inputs of the inspection verbs: an item, a graph, encoded bytes, or a path that `GraphItem.load` reads."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.training_graph import EncodedGraph, TrainingGraph

Source = TrainingGraph | Graph | bytes | str | Path


def as_item(source: Source) -> TrainingGraph:
    """Return an item; graphs and bytes become items without inputs and outputs."""
    if isinstance(source, TrainingGraph):
        return source
    if isinstance(source, (str, Path)):
        from autograph_rewrite.load import files  # only a path needs the loaders

        return files.load(Path(source))
    return TrainingGraph(source if isinstance(source, Graph) else EncodedGraph(source))


def as_graph(source: Source) -> Graph:
    """Return the graph of a source."""
    return source if isinstance(source, Graph) else as_item(source).graph


def chosen(graph: Graph, filters: Mapping[str, str | None], around: str | None, depth: int) -> list[Node]:
    """Return the nodes that match all filters, in graph order.

    Args:
        filters: regular expressions that are searched in the `op`, `name` or `device` of a node.
        around: name of a node; only nodes at most `depth` edges away, in either direction, match.

    Raises:
        GraphError: a regular expression is malformed, or there is no node `around`.
    """
    patterns = {what: _compiled(what, pattern) for what, pattern in filters.items() if pattern is not None}
    nodes = list(graph) if around is None else _near(graph, graph.node(around.partition(":")[0]), depth)
    for what, pattern in patterns.items():
        nodes = [node for node in nodes if pattern.search(getattr(node, what))]
    return nodes


def _compiled(what: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise GraphError(f"'{pattern}' is no regular expression ({error})", where=f"the filter by {what}") from None


def neighbours(node: Node) -> list[Node]:
    """Return all neighbours of a node along data and control edges, in both directions."""
    found = [value.node for value in node.inputs]
    found += node.controls
    found += [use.node for value in node.read_outputs for use in value.uses]
    found += node.control_users
    return found


def _near(graph: Graph, start: Node, depth: int) -> list[Node]:
    distance = {start: 0}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if distance[node] == depth:
            continue
        for other in neighbours(node):
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return [node for node in graph if node in distance]
