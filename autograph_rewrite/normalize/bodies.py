"""Copy a function body into a graph: arguments become values, `node:out:0` becomes a value of the copied node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.function_library import Function, Library
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types.attrs import FunctionName, decode, encode
from autograph_rewrite.ir.types.opdefs import RESULT_TYPES, Arg, find_op
from autograph_rewrite.ir.types.wire import RawNode, read_varint
from autograph_rewrite.ops.traits import ENTERS, has

DATASET_LOOP = "ReduceDataset"

_PLACEHOLDER_TAG = 0x4A  # AttrValue.placeholder: "take the caller's attribute of this name"


@dataclass(frozen=True)
class Entry:
    """What the nodes that start a body wait for.

    Attributes:
        starts: all of them wait for these (the control inputs of a call).
        pivot: those without a data input of their own iteration or branch wait for this one: it is alive exactly
            when the loop iteration or the branch is, and in the same frame.
    """

    starts: tuple[Node, ...] = ()
    pivot: Node | None = None


@dataclass(frozen=True)
class Body:
    """A body that was copied into a graph.

    Attributes:
        returns: its results.
        effects: nodes that must run whenever it does.
        nodes: all copied nodes.
    """

    returns: tuple[Value, ...]
    effects: tuple[Node, ...]
    nodes: tuple[Node, ...]


def is_invariant(value: Value) -> bool:
    """Whether a value enters a loop as a constant: it is alive in every iteration, also in the one not taken."""
    return value.node.op == "Enter" and bool(value.node.attr("is_constant"))


def state_results(node: Node, library: Library) -> None:
    """State the element types that a call by function name gives: whoever reads it may ask before it is lowered."""
    attrs = {key: raw for key, raw in node.attrs.items() if isinstance(raw, bytes)}
    types = [dtype for arg in library.get(node.op).outputs for dtype in _arg_dtypes(arg, attrs)]
    node.set_raw_attr(RESULT_TYPES, encode("list(type)", types))


@dataclass(frozen=True)
class CallSite:
    """Where a body is copied to.

    Attributes:
        arguments: one value per parameter.
        prefix: of the copies' names.
        attrs: encoded values of the function's attribute parameters.
        entry: what the body's first nodes wait for.
        device: of nodes that name none.
    """

    arguments: Sequence[Value]
    prefix: str
    attrs: Mapping[str, bytes]
    entry: Entry
    device: str


def instantiate(graph: Graph, library: Library, function: Function, site: CallSite) -> Body:
    """Copy the body of a function to where it is called.

    Args:
        graph: where the copies go.

    Raises:
        GraphError: the body does not fit its arguments, or names something that it does not have.
    """
    attrs = site.attrs
    given = _bind(function, site.arguments, attrs)
    copies: dict[str, Node] = {}
    for raw in function.nodes:
        node = Node(
            graph,
            graph.unique_name(f"{site.prefix}/{raw.name}"),
            raw.op,
            raw.device or site.device,
            _instance_attrs(raw, function, attrs, site.prefix),
            raw.rest,
        )
        copies[raw.name] = graph.insert(node)
        if raw.op in library:
            state_results(node, library)
    scope = _Scope(function, library, given, copies)
    for raw in function.nodes:
        _connect(copies[raw.name], raw, scope, site.entry)
    returns = tuple(
        value for arg in function.outputs for value in scope.results(function.returns[arg.name], arg, attrs)
    )
    effects = tuple(copies[name] for name in function.control_returns if name in copies)
    return Body(returns, effects or tuple(_loose_effects(copies.values())), tuple(copies.values()))


@dataclass(frozen=True)
class _Scope:
    """What the names in a body mean."""

    function: Function
    library: Library
    arguments: Mapping[str, tuple[Value, ...]]
    copies: Mapping[str, Node]

    def is_functional(self, node: Node) -> bool:
        """Whether a node will be replaced by a body itself."""
        return has(node.op, "functional") or node.op in self.library

    def value(self, reference: str) -> Value:
        """Return what `arg`, `arg:1`, `node:out` or `node:out:1` stands for."""
        name, _, rest = reference.partition(":")
        if name in self.arguments:
            return self.arguments[name][int(rest) if rest else 0]
        node = self.node(name)
        output, _, index = rest.partition(":")
        return node.output(_offset(node, output, self.library) + (int(index) if index else 0))

    def node(self, name: str) -> Node:
        """Return the copy of a body node."""
        if name not in self.copies:
            raise GraphError(f"the function '{self.function.name}' reads '{name}', which its body does not have")
        return self.copies[name]

    def results(self, reference: str, arg: Arg, attrs: Mapping[str, bytes]) -> tuple[Value, ...]:
        """Return the values of one declared result, which may be a list."""
        first = self.value(reference)
        count = len(_arg_dtypes(arg, attrs))
        if count == 1:
            return (first,)
        if reference in self.arguments:
            return self.arguments[reference]
        return tuple(first.node.output(first.index + i) for i in range(count))


def _connect(node: Node, raw: RawNode, scope: _Scope, entry: Entry) -> None:
    values = [scope.value(text) for text in raw.inputs if text[0] != "^"]
    controls = [text[1:] for text in raw.inputs if text[0] == "^"]
    node.set_inputs(values)
    for name in controls:
        if name not in scope.arguments:  # an argument is there before the body starts
            node.add_control(scope.node(name))
    is_inner = bool(node.controls) or any(text.partition(":")[0] in scope.copies for text in raw.inputs)
    # A call that waits for one of its arguments only does not hold back what its body does with the others.
    if not is_inner or scope.is_functional(node):
        for start in entry.starts:
            node.add_control(start)
    if is_inner:
        return
    if entry.pivot is not None and all(map(is_invariant, values)):
        node.add_control(entry.pivot)


def _bind(function: Function, arguments: Sequence[Value], attrs: Mapping[str, bytes]) -> dict[str, tuple[Value, ...]]:
    bound = {}
    at = 0
    for arg in function.inputs:
        count = len(_arg_dtypes(arg, attrs))
        bound[arg.name] = tuple(arguments[at : at + count])
        at += count
    if at != len(arguments):
        raise GraphError(f"the function '{function.name}' takes {at} tensors, but is given {len(arguments)}")
    return bound


def _arg_dtypes(arg: Arg, attrs: Mapping[str, bytes]) -> tuple[int, ...]:
    if arg.type_list_attr:
        return tuple(decode(attrs[arg.type_list_attr]))
    dtype: int = arg.dtype or decode(attrs[arg.type_attr])
    return (dtype,) * (decode(attrs[arg.number_attr]) if arg.number_attr else 1)


@cache
def _plain_offsets(op_name: str) -> dict[str, int] | None:
    """Return position by output name, for an op type whose outputs are single tensors."""
    op = find_op(op_name)
    if op is None or any(arg.number_attr or arg.type_list_attr for arg in op.outputs):
        return None
    return {arg.name: index for index, arg in enumerate(op.outputs)}


def _offset(node: Node, output: str, library: Library) -> int:
    """Return the index of the first tensor of a named output."""
    if not output:
        return 0
    plain = _plain_offsets(node.op)
    if plain is not None and output in plain:
        return plain[output]
    op = find_op(node.op)
    at = 0
    for arg in op.outputs if op is not None else library.get(node.op).outputs:
        if arg.name == output:
            return at
        at += len(_arg_dtypes(arg, {**_defaults(node.op), **node.attrs}))
    raise GraphError(f"a function body reads the output '{output}' of '{node.name}', which has none", node=node)


def _defaults(op_name: str) -> dict[str, bytes]:
    op = find_op(op_name)
    attrs = op.attrs if op is not None else {}
    return {name: attr.default for name, attr in attrs.items() if attr.default is not None}


def _instance_attrs(raw: RawNode, function: Function, attrs: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    if function.polymorphic:
        return {key: _substituted(value, attrs) for key, value in raw.attrs.items()}
    if raw.op in ENTERS:  # every copy of a loop is a loop of its own
        frame = f"{prefix}/{decode(raw.attrs['frame_name']).decode()}"
        return {**raw.attrs, "frame_name": encode("string", frame)}
    return raw.attrs


def _substituted(raw: bytes, attrs: Mapping[str, bytes]) -> bytes:
    """Replace "the caller's attribute X" by its value, also inside a function-valued attribute."""
    if raw and raw[0] == _PLACEHOLDER_TAG:
        size, at = read_varint(raw, 1)
        return attrs[str(raw[at : at + size], "utf-8")]
    value = decode(raw) if raw and raw[0] == 0x52 else None  # AttrValue.func
    if isinstance(value, FunctionName) and value.attrs:
        inner = tuple((key, _substituted(item, attrs)) for key, item in value.attrs)
        return encode("func", FunctionName(value.name, inner))
    return raw


def _loose_effects(nodes: Iterable[Node]) -> Iterable[Node]:
    """Yield stateful nodes whose results nobody reads: what an old function, without control results, runs for."""
    for node in nodes:
        op = find_op(node.op)
        if op is None or not op.is_stateful or has(node.op, "kept") or node.op == "VarIsInitializedOp":
            continue
        if not any(value.uses for value in node.read_outputs):
            yield node
