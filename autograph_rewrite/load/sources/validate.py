"""Reject a graph that TensorFlow could not load: unknown ops, calls of missing functions, operands that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from google.protobuf.message import DecodeError

from autograph_rewrite.diagnostics.limits import VARIABLE, limit
from autograph_rewrite.diagnostics.progress_line import printable
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import OWN_FUNCTIONS
from autograph_rewrite.ir.format.function_library import Function, Library, called
from autograph_rewrite.ir.graph import Graph, Node, Span, Value
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.ir.types.wire import RawNode
from autograph_rewrite.load.sources.body_check import check_body
from autograph_rewrite.load.sources.node_check import NodeCheck, Stated

SHOWN = 40
"""Letters that a message shows of a name that is too long."""


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


def check_file(graph: Graph) -> None:
    """Check what TensorFlow would check of a graph that nobody has imported yet.

    Raises:
        GraphError: it has too many nodes, a name is too long, a part is no protobuf, or a node does not fit its op.
    """
    library, functions = _functions(graph)
    count = len(graph) + sum(len(function.nodes) for function in functions)
    if count > limit("nodes"):
        raise GraphError(f"the graph has {count:,} nodes, more than {limit('nodes'):,} ({VARIABLE}: nodes)")
    _check_names(graph, functions)
    node_check = NodeCheck(library)
    for function in functions:
        check_body(function, library, node_check)
    is_folded = any(node.span is not Span.ONCE for node in graph)  # printed: an operand may stand for many
    for node in graph:
        operands = None if is_folded else [(value.name, _type(value, node, node_check)) for value in node.inputs]
        node_check.check(_stated(node, operands))


def _check_names(graph: Graph, functions: Sequence[Function]) -> None:
    """Refuse names that nobody has written, before a message or a table repeats one."""
    longest = limit("name")
    nodes: Iterable[Node | RawNode] = chain(graph, *(function.nodes for function in functions))
    places = chain.from_iterable((node.name, node.device) for node in nodes)
    for name in chain(places, (function.name for function in functions)):
        _check_name(name, longest)


def _check_name(name: str, longest: int) -> None:
    if len(name) > longest:
        problem = f"the name '{printable(name[:SHOWN])}...' has {len(name):,} letters, more than {longest:,}"
        raise GraphError(f"{problem} ({VARIABLE}: name)", hint=f'{VARIABLE}="name={len(name)}" reads it all the same')


def _functions(graph: Graph) -> tuple[Library, list[Function]]:
    try:
        proto("FunctionDefLibrary").FromString(graph.library)  # all of it, also what only TensorFlow reads
        library = Library(graph.library)
        return library, [library.get(name) for name in library]
    except (DecodeError, ValueError, IndexError) as error:
        raise GraphError(f"the function library is corrupt ({error})") from None


def _stated(node: Node, operands: Sequence[tuple[str, int | None]] | None = None) -> Stated:
    return Stated(f"'{node.name}'", node.op, node.attrs, operands, node)


def _type(value: Value, reader: Node, node_check: NodeCheck) -> int | None:
    """Return the element type of a value.

    Raises:
        GraphError: its node does not give it.
    """
    given = node_check.types(_stated(value.node))[1]
    if given is None:
        return None
    if value.index >= len(given):
        raise GraphError(f"'{reader.name}' reads '{value.name}', which there is not", node=reader)
    return given[value.index]


def _check_op(node: Node) -> None:
    _check_name(node.op, limit("name"))
    try:
        get_op(node.op)
    except GraphError as error:
        raise GraphError(error.problem, node=node, hint=error.hint) from None
