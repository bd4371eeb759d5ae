"""Refuse a graph that TensorFlow could not load: unknown ops, calls of functions that are not there."""

from __future__ import annotations

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attrs import FunctionName
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.opdefs import find_op, get_op
from autograph_rewrite.load.library import Library


def check(graph: Graph) -> None:
    """Check that every op and every called function is known.

    Raises:
        GraphError: one is not; or the graph is empty.
    """
    if not len(graph):
        raise GraphError("the graph is empty: it has no nodes")
    library = Library(graph.library)
    calls: dict[str, tuple[str, ...]] = {}
    for node in graph:
        op = find_op(node.op)
        if op is None:
            if node.op not in library:
                try:
                    get_op(node.op)
                except GraphError as error:
                    raise GraphError(error.problem, node=node, hint=error.hint) from None
            continue
        kinds = calls.get(node.op)
        if kinds is None:
            kinds = tuple(name for name, attr in op.attrs.items() if attr.kind in ("func", "list(func)"))
            calls[node.op] = kinds
        for key in kinds:
            functions = node.attr(key)
            for function in functions if isinstance(functions, tuple) else (functions,):
                if isinstance(function, FunctionName) and function.name and function.name not in library:
                    raise GraphError(
                        f"'{node.name}' calls '{function.name}', which the function library does not have",
                        node=node,
                        hint="save the graph with its function library (GraphDef.library)",
                    )
