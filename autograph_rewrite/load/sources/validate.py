"""Reject a graph that TensorFlow could not load: unknown ops, calls of missing functions."""

from __future__ import annotations

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import OWN_FUNCTIONS
from autograph_rewrite.ir.format.function_library import Library, called
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.types.opdefs import get_op


def check(graph: Graph) -> None:
    """Check that every op and every called function is known.

    Raises:
        GraphError: one is not; the graph is empty, or calls what is distributed already.
    """
    if not len(graph):
        raise GraphError("the graph is empty: it has no nodes")
    library = Library(graph.library)
    for node in graph:
        if node.op not in library:
            _check_op(node)
        for name in called(node.op, node.attrs, library):
            if name.startswith(OWN_FUNCTIONS):
                raise GraphError(
                    f"the graph is already distributed: '{node.name}' calls a distributed function",
                    node=node,
                    hint="distribute the original function, or the outermost one only",
                )
            if name not in library:
                raise GraphError(
                    f"'{node.name}' calls '{name}', which the function library does not have",
                    node=node,
                    hint="save the graph with its function library (GraphDef.library)",
                )


def _check_op(node: Node) -> None:
    try:
        get_op(node.op)
    except GraphError as error:
        raise GraphError(error.problem, node=node, hint=error.hint) from None
