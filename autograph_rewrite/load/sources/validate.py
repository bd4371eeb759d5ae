"""Reject a graph that TensorFlow could not load: unknown ops, calls of missing functions, operands that do not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from autograph_rewrite.diagnostics.limits import VARIABLE, limit
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import OWN_FUNCTIONS
from autograph_rewrite.ir.format.function_library import Library, called
from autograph_rewrite.ir.graph import Graph, Node, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import find_op, get_op
from autograph_rewrite.ir.types.protos import proto

_FIELDS = {"string": "s", "int": "i", "float": "f", "bool": "b"}
_KNOWN_EVERYWHERE = {"_output_shapes": "list(shape)", "_class": "list(string)"}


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
        GraphError: it has too many nodes, a part of it is no protobuf, or operands do not fit their op.
    """
    functions = _functions(graph)
    count = len(graph) + sum(len(function.node_def) for function in functions)
    if count > limit("nodes"):
        raise GraphError(f"the graph has {count:,} nodes, more than {limit('nodes'):,} ({VARIABLE}: nodes)")
    for function in functions:
        missing = [arg.name for arg in function.signature.output_arg if arg.name not in function.ret]
        if missing:
            raise GraphError(f"the function '{function.signature.name}' does not say what its result '{missing[0]}' is")
    called_names = {function.signature.name for function in functions}
    for function in functions:
        _check_body(function, called_names)
    is_folded = any(node.span is not Span.ONCE for node in graph)  # printed: an operand may stand for many
    kinds: dict[bytes, str] = {}
    for node in graph:
        for key, raw in node.attrs.items():
            if isinstance(raw, bytes) and raw not in kinds:
                kinds[raw] = _kind(node, key, raw)
        if node.op not in called_names:
            _check_attrs(node, kinds)
            if not is_folded:
                _check_operands(node)


def _functions(graph: Graph) -> list[Any]:
    try:
        library = Library(graph.library)
        for name in library:
            library.get(name)
        return list(proto("FunctionDefLibrary").FromString(graph.library).function)
    except (DecodeError, ValueError, IndexError) as error:
        raise GraphError(f"the function library is corrupt ({error})") from None


def _check_body(function: Any, called_names: Collection[str]) -> None:
    """Check the attributes of a function's nodes, which TensorFlow itself looks at only when the function is called."""
    for node in function.node_def:
        op = find_op(node.op) if node.op not in called_names else None
        if op is None:
            continue
        where = f"'{node.name}' of the function '{function.signature.name}'"
        for key, one in op.attrs.items():
            if key not in node.attr:
                if one.default is None:
                    raise GraphError(f"{where} has no attribute '{key}', which a {node.op} needs")
                continue
            found = node.attr[key].WhichOneof("value")
            if found not in (_field(one.kind), "placeholder"):  # the function's caller says what that is
                raise GraphError(f"attribute '{key}' of {where} is no {one.kind}")


def _kind(node: Node, key: str, raw: bytes) -> str:
    """Return which field of AttrValue an attribute has."""
    try:
        return str(proto("AttrValue").FromString(raw).WhichOneof("value"))
    except DecodeError as error:
        raise GraphError(f"attribute '{key}' of '{node.name}' is corrupt ({error})", node=node) from None


def _check_attrs(node: Node, kinds: Mapping[bytes, str]) -> None:
    declared = {name: one.kind for name, one in get_op(node.op).attrs.items()} | _KNOWN_EVERYWHERE
    for key, raw in node.attrs.items():
        kind = declared.get(key, "")
        field = _field(kind)
        if field and isinstance(raw, bytes) and kinds[raw] != field:
            raise GraphError(f"attribute '{key}' of '{node.name}' is no {kind}", node=node)
    missing = [name for name, one in get_op(node.op).attrs.items() if one.default is None and name not in node.attrs]
    if missing:
        raise GraphError(f"'{node.name}' has no attribute '{missing[0]}', which a {node.op} needs", node=node)


def _field(kind: str) -> str:
    """Return the field of AttrValue that holds a kind of attribute."""
    return "list" if kind.startswith("list") else _FIELDS.get(kind, kind)


def _check_operands(node: Node) -> None:
    wanted = node.input_dtypes
    if len(wanted) != len(node.inputs):
        raise GraphError(f"'{node.name}' reads {len(node.inputs)} values, a {node.op} takes {len(wanted)}", node=node)
    for index, (value, dtype) in enumerate(zip(node.inputs, wanted, strict=True)):
        given = value.node.output_dtypes
        if value.index >= len(given):
            raise GraphError(f"'{node.name}' reads '{value.name}', which there is not", node=node)
        if given[value.index] % dtypes.REF_OFFSET != dtype % dtypes.REF_OFFSET:
            names = dtypes.dtype_name(given[value.index]), dtypes.dtype_name(dtype)
            problem = f"operand {index} of '{node.name}', '{value.name}', is {names[0]} instead of {names[1]}"
            raise GraphError(problem, node=node)


def _check_op(node: Node) -> None:
    try:
        get_op(node.op)
    except GraphError as error:
        raise GraphError(error.problem, node=node, hint=error.hint) from None
