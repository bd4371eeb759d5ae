"""The normal form that analysis and passes work on: one flat graph, resource variables, folded shape constants.

    clone ─► flatten (calls, branches, loops) ─► resource variables ─► one handle per variable ─► folded constants

Names of outputs, targets and variables resolve in it as they did before.
"""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.flatten import flatten

PASS = "normalise"


def normalise(item: GraphItem) -> GraphItem:
    """Return the item in normal form, with a graph of its own; names of outputs, targets and variables still resolve.

    Raises:
        GraphError: a missing or recursive function, or a legacy op that has no resource form.
    """
    graph = item.graph.clone()
    graph.current_pass = PASS
    flatten(graph, roots(item, graph))
    graph.current_pass = ""
    return item.with_(graph=graph)


def roots(item: GraphItem, graph: Graph) -> Iterable[Node]:
    """Return the nodes that a step of the item is run for; every node, when nothing is declared."""
    names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    return [graph.node(name) for name in dict.fromkeys(names)] if names else list(graph)
