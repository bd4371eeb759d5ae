"""Reject graphs that TensorFlow cannot load: unknown ops, calls of missing functions, operands that do not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from google.protobuf.message import DecodeError

from autograph_rewrite.diagnostics.limits import VARIABLE, limit
from autograph_rewrite.diagnostics.progress_line import printable
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import OWN_FUNCTIONS
from autograph_rewrite.ir.format.function_library import Function, Library, called
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import OWN, Arg, OpDef, dtypes_of, find_op, get_op, places_of, signature
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.ir.types.wire import RawNode

SHOWN = 40
"""The letters of a too long name that a message shows."""


def check(graph: Graph) -> None:
    """Check that every op and every called function is known.

    Raises:
        GraphError: one is not, or the graph is empty, or it calls a function that is distributed already.
    """
    if not len(graph):
        raise GraphError("the graph is empty: it has no nodes")
    library = Library(graph.library)
    known: set[str] = set()
    for node in graph:
        if node.op not in known and node.op not in library:
            _check_op(node)
            known.add(node.op)
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
    """Check a graph from a file as TensorFlow's import does.

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
        _CheckedBody(function, library, node_check).check()
    is_folded = any(node.span != ONCE for node in graph)  # in its text form; an operand may select several instances
    given: dict[Node, Types] = {}
    for node in graph:
        operands = None if is_folded else [(value.name, _type(value, node, node_check, given)) for value in node.inputs]
        node_check.check(_stated(node, operands))


def _check_names(graph: Graph, functions: Sequence[Function]) -> None:
    """Refuse names that are too long, before a message or a table repeats one."""
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
        proto("FunctionDefLibrary").FromString(graph.library)  # all fields, also those that only TensorFlow reads
        library = Library(graph.library)
        return library, [library.get(name) for name in library]
    except (DecodeError, ValueError, IndexError) as error:
        raise GraphError(f"the function library is corrupt ({error})") from None


def _stated(node: Node, operands: Sequence[tuple[str, int | None]] | None = None) -> StatedNode:
    return StatedNode(f"'{node.name}'", node.op, node.attrs, operands, node)


def _type(value: Value, reader: Node, node_check: NodeCheck, given: dict[Node, Types]) -> int | None:
    """Return the element type of a value.

    Args:
        given: the known output types of nodes; it is extended.

    Raises:
        GraphError: the value does not exist.
    """
    if value.node not in given:
        given[value.node] = node_check.types(_stated(value.node))[1]
    types = given[value.node]
    if types is None:
        return None
    if value.index >= len(types):
        raise GraphError(f"'{reader.name}' reads '{value.name}', which there is not", node=reader)
    return types[value.index]


def _check_op(node: Node) -> None:
    _check_name(node.op, limit("name"))
    _refuse_own(f"'{node.name}'", node.op, node)
    try:
        get_op(node.op)
    except GraphError as error:
        raise GraphError(error.problem, node=node, hint=error.hint) from None


def _refuse_own(who: str, op: str, node: Node | None = None) -> None:
    """Refuse an op of this package, which only exists between two passes."""
    if op in OWN:
        raise GraphError(
            f"{who} is an {op}, which stands in a graph between two passes only",
            node=node,
            hint="give the graph that was not distributed yet",
        )


# Check the body of a function as a graph: its names, and each node by `NodeCheck`.


_INDEX = re.compile("[0-9]{1,5}")


class _CheckedBody:
    def __init__(self, function: Function, library: Library, check: NodeCheck) -> None:
        self._function, self._library, self._check = function, library, check
        self._of = f" of the function '{function.name}'"
        self._nodes: dict[str, RawNode] = {}
        self._arguments: dict[str, tuple[int | None, ...] | None] = {}

    def check(self) -> None:
        """Check the whole body.

        Raises:
            GraphError: a name is missing or repeated, a node does not fit its op, or a result has another type.
        """
        for arg in self._function.inputs:
            self._arguments[arg.name] = self._types(arg)
        for node in self._function.nodes:
            if not node.name or not node.op:
                raise GraphError(f"a node{self._of} has no name or no op")
            if node.name in self._nodes or node.name in self._arguments:
                raise GraphError(f"two nodes or arguments{self._of} are named '{node.name}'")
            self._nodes[node.name] = node
        for node in self._function.nodes:
            _refuse_own(f"'{node.name}'{self._of}", node.op)
            read = [(text, self._read(text, node)) for text in node.inputs if not text.startswith("^")]
            self._check.check(self._stated(node, read))
            for text in node.inputs:
                if text.startswith("^") and text[1:] not in self._nodes and text[1:] not in self._arguments:
                    raise GraphError(f"'{node.name}'{self._of} waits for '{text[1:]}', which its body does not have")
        for arg in self._function.outputs:
            self._check_result(arg)

    def _check_result(self, arg: Arg) -> None:
        text = self._function.returns.get(arg.name)
        if text is None:
            raise GraphError(f"the function '{self._function.name}' does not say what its result '{arg.name}' is")
        given, declared = self._read(text, None), self._types(arg)
        if given is not None and declared is not None and len(declared) == 1 and declared[0] is not None:
            wanted = declared[0]
            if given % dtypes.REF_OFFSET != wanted % dtypes.REF_OFFSET:
                names = dtypes.dtype_name(given), dtypes.dtype_name(wanted)
                raise GraphError(f"result '{arg.name}'{self._of}, '{text}', is {names[0]} instead of {names[1]}")

    def _types(self, arg: Arg) -> tuple[int, ...] | None:
        """Return the element types of a declared argument or result; None: the caller's attributes decide."""
        return None if arg.type_attr or arg.number_attr or arg.type_list_attr else dtypes_of((arg,), {})

    def _stated(self, node: RawNode, operands: Sequence[tuple[str, int | None]]) -> StatedNode:
        return StatedNode(f"'{node.name}'{self._of}", node.op, node.attrs, operands)

    def _read(self, text: str, reader: RawNode | None) -> int | None:
        """Return the element type of `arg`, `arg:1`, `node:out` or `node:out:1`; None: the caller's attributes decide.

        Raises:
            GraphError: the body has no such value.
        """
        name, _, rest = text.partition(":")
        if name in self._arguments:
            types, index = self._arguments[name], rest
        elif name in self._nodes:
            output, _, index = rest.partition(":")
            types = self._outputs(self._nodes[name], output)
        else:
            types, index = (), ""
        if types is None:
            return None
        if not _INDEX.fullmatch(index or "0") or int(index or 0) >= len(types):
            who = f"'{reader.name}'{self._of}" if reader is not None else f"the function '{self._function.name}'"
            raise GraphError(f"{who} reads '{text}', which its body does not have")
        return types[int(index or 0)]

    def _outputs(self, node: RawNode, output: str) -> tuple[int, ...] | None:
        """Return the element types of one named output of a node; of all outputs if `output` is empty."""
        given = self._check.types(self._stated(node, ()))[1]
        if given is None or not output:
            return given
        op = find_op(node.op) if node.op not in self._library else None
        declared = op.outputs if op is not None else self._library.get(node.op).outputs
        place = places_of(declared, {**(op.defaults if op is not None else {}), **node.attrs}).get(output, range(0))
        return given[place.start : place.stop]


# Check a node of a file, in a graph or in the body of a function: its attributes, operands and their types.
#
#     'y' of the function 'f'     MatMul(x, w:output:0)     T = float
#     └─ where                    │  └─ operands: two, and float, as T says
#                                 └─ known; it has what it needs: T, or a default
#
# Attributes that only the caller of a function knows (`placeholder`) are checked when calls are inlined.


Types = tuple[int, ...] | None
"""Element types of a node's operands or outputs; None: only the caller of the function knows them."""

_FIELDS = {"string": "s", "int": "i", "float": "f", "bool": "b"}
_KNOWN_EVERYWHERE = {"_output_shapes": "list(shape)", "_class": "list(string)"}
_PLACEHOLDER = "placeholder"


class StatedNode(NamedTuple):
    """A node as a file states it.

    Attributes:
        where: `'y'`, or `'y' of the function 'f'`.
        attrs: encoded.
        operands: the name and element type of each operand; None: they are not checked.
        node: of a graph; None in a body.
    """

    where: str
    op: str
    attrs: Mapping[str, object]
    operands: Sequence[tuple[str, int | None]] | None
    node: Node | None = None


class NodeCheck:
    """Checks nodes.

    Args:
        library: the functions, whose names are ops, too.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._fields: dict[bytes, str] = {}
        self._types: dict[tuple[object, ...], tuple[Types, Types]] = {}

    def types(self, stated: StatedNode) -> tuple[Types, Types]:
        """Return the element types of a node's operands and outputs.

        Raises:
            GraphError: its attributes do not determine them.
        """
        op = self._op(stated.op)
        if op is None and stated.op not in self._library:
            return None, None
        names = op.type_attrs if op is not None else tuple(stated.attrs)
        deciding = {name: raw for name in names if isinstance(raw := stated.attrs.get(name), bytes)}
        key = (stated.op, *deciding.items())
        if key not in self._types:
            is_open = any(self._field(stated, name, raw) == _PLACEHOLDER for name, raw in deciding.items())
            self._types[key] = (None, None) if is_open else self._stated_types(stated, deciding)
        return self._types[key]

    def _stated_types(self, stated: StatedNode, attrs: Mapping[str, bytes]) -> tuple[Types, Types]:
        try:
            if stated.op not in self._library:
                return signature(stated.op, attrs)
            function = self._library.get(stated.op)
            return dtypes_of(function.inputs, attrs), dtypes_of(function.outputs, attrs)
        except KeyError as error:
            raise _fault(stated, f"{stated.where} has no attribute {error}, which a {stated.op} needs") from None
        except (GraphError, TypeError) as error:
            raise _fault(stated, f"{stated.where}: {getattr(error, 'problem', error)}") from None

    def check(self, stated: StatedNode) -> None:
        """Check one node.

        Raises:
            GraphError: an attribute is missing, corrupt or of the wrong kind, or an operand does not fit.
        """
        fields = {key: self._field(stated, key, raw) for key, raw in stated.attrs.items() if isinstance(raw, bytes)}
        op = self._op(stated.op)
        if op is not None:
            _check_attrs(stated, op, fields)
        if stated.operands is not None:
            _check_operands(stated, self.types(stated)[0])

    def _op(self, name: str) -> OpDef | None:
        return find_op(name) if name not in self._library else None

    def _field(self, stated: StatedNode, key: str, raw: bytes) -> str:
        """Return the field of AttrValue that an attribute sets."""
        if raw not in self._fields:
            try:
                self._fields[raw] = str(proto("AttrValue").FromString(raw).WhichOneof("value"))
            except DecodeError as error:
                raise _fault(stated, f"attribute '{key}' of {stated.where} is corrupt ({error})") from None
        return self._fields[raw]


def _check_attrs(stated: StatedNode, op: OpDef, fields: Mapping[str, str]) -> None:
    is_body = stated.node is None
    for key, found in fields.items():
        kind = op.attrs[key].kind if key in op.attrs else _KNOWN_EVERYWHERE.get(key, "")
        wanted = "list" if kind.startswith("list") else _FIELDS.get(kind, kind)
        if wanted and found != wanted and not (is_body and found == _PLACEHOLDER):
            raise _fault(stated, f"attribute '{key}' of {stated.where} is no {kind}")
    for key, one in op.attrs.items():
        if one.default is None and key not in stated.attrs:
            raise _fault(stated, f"{stated.where} has no attribute '{key}', which a {stated.op} needs")


def _check_operands(stated: StatedNode, wanted: Types) -> None:
    assert stated.operands is not None
    if wanted is None:
        return
    if len(wanted) != len(stated.operands):
        problem = f"{stated.where} reads {len(stated.operands)} values, a {stated.op} takes {len(wanted)}"
        raise _fault(stated, problem)
    for index, ((name, given), dtype) in enumerate(zip(stated.operands, wanted, strict=True)):
        if given is not None and given % dtypes.REF_OFFSET != dtype % dtypes.REF_OFFSET:
            names = dtypes.dtype_name(given), dtypes.dtype_name(dtype)
            raise _fault(stated, f"operand {index} of {stated.where}, '{name}', is {names[0]} instead of {names[1]}")


def _fault(stated: StatedNode, problem: str) -> GraphError:
    return GraphError(problem, node=stated.node)
