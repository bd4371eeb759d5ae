"""Reads the printed form of a graph, which `ir.format.printer` or a person wrote.

    %x: float32[?,16] @ replicated -> split(0) = Placeholder()
    %y: float32 @ split(0) = MatMul(%x, %w) {transpose_b=true} ^ready @CPU:0 each        # a comment
    %z: float32 @ {replica: split(0), model: split(1)} = MatMul(%y, %v) {model, replica} stage=1

Types and counts that are not stated are inferred from operands and results. A line may read results of later lines.
Annotations (`ir.format.annotations`) are returned next to the graph, by the names of values.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import closest, infer
from autograph_rewrite.ir.format.annotations import (
    SPAN_OF_AXES,
    SPANS,
    Annotation,
    MisreadError,
    read_annotation,
    span_of,
)
from autograph_rewrite.ir.format.literals import Literals, dtype_number
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import AXES, ONCE, PerInstance, Select, Span, is_axis
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.attrs import Shape, encode
from autograph_rewrite.ir.types.dtypes import base
from autograph_rewrite.ir.types.opdefs import OpDef, find_op, signature
from autograph_rewrite.ops.traits import has

_SHAPES = "_output_shapes"

_NAME = r'(?:"(?:[^"\\]|\\.){0,1000000}"|[\w.\-/>\\]+)'
_HEAD = re.compile(rf"\s*%(?P<name>{_NAME})\s*(?::(?P<types>[^=]*))?=\s*(?P<op>[\w.\-/>]+)\s*\(")
_OPERAND = re.compile(
    rf"\s*(?:(?P<select>all|first)\(%(?P<selected>{_NAME})(?::(?P<at>\d+))?\)|%(?P<name>{_NAME})(?::(?P<index>\d+))?)\s*"
)
_TYPE = re.compile(r"\s*(?P<dtype>\w+|\?)(?:\[(?P<shape>[^\]]*)\])?\s*(?P<placed>@)?")
_NEXT = re.compile(r"\s*(?:,|$)")
_TAIL = re.compile(
    rf'\s*(?:\^(?P<control>{_NAME})|@(?P<device>"[^"]*"|[^\s#]+)|(?P<span>each|replica)\b(?!\s*=)'
    rf'|(?P<axis>[A-Za-z_]\w*)\s*=\s*(?:(?P<at>\d{{1,9}})\b|each\((?P<each>[\d\s|]*)\))|fields\s+(?P<fields>"[^"]*"))'
)
_ANCHOR = re.compile(rf"anchor\s+(?P<anchor>.+?)\s*=\s*%(?P<name>{_NAME})(?::(?P<index>\d+))?\s*$")
_BINARY = re.compile(r'(?P<what>library|versions|fields)\s*=\s*b64(?P<data>"[^"]*")\s*$')


class Text(NamedTuple):
    """The graph and the annotations that a text describes.

    Attributes:
        placements: annotations by value name.
    """

    graph: Graph
    placements: dict[str, Annotation]


class _Typed(NamedTuple):
    """An operand whose node may not exist yet, as `infer` needs it."""

    dtype: int


class _Read(NamedTuple):
    """One operand of a line."""

    name: str
    output: int
    select: Select | None


@dataclass
class _Line:
    """One node as its line states it."""

    number: int
    name: str
    op: str
    types: list[tuple[int | None, Shape | None]] = field(default_factory=list)
    placements: dict[int, Annotation] = field(default_factory=dict)
    reads: list[_Read] = field(default_factory=list)
    attrs: dict[str, bytes | PerInstance] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    device: str = ""
    span: Span = ONCE
    place: dict[str, int | tuple[int, ...]] = field(default_factory=dict)
    rest: bytes = b""


def parse(text: str, *, replicas: int = 0, name: str = "text") -> Graph:
    """Return the graph that a text describes; see `read`."""
    return read(text, replicas=replicas, name=name).graph


def read(text: str, *, replicas: int = 0, name: str = "text") -> Text:
    """Return the graph that a text describes, and the placements that it states.

    Args:
        text: lines as `ir.format.printer.render` prints them.
        replicas: for how many inputs `all(%x)` stands; 0 where the lines that read it state their counts.
        name: of the text in errors, usually a file name.

    Raises:
        GraphError: a line cannot be read, or reads a value that no line makes; it names the line, and the column of a
            word in an annotation.
    """
    graph, lines, anchors = Graph(), {}, []
    for number, written in enumerate(text.splitlines(), 1):
        content = written.strip()
        if not content or content.startswith("#"):
            continue
        with _Place(name, number, written.index(content)):
            if content.startswith("%"):
                one = _line(content, number)
                if one.name in lines:
                    raise GraphError(f"two lines make '%{one.name}'")
                lines[one.name] = one
            elif match := _ANCHOR.match(content):
                anchors.append((number, match))
            else:
                _add_binary(graph, content)
    _add_nodes(graph, lines, replicas, name)
    for number, match in anchors:
        with _Place(name, number):
            node = graph.node(_unquoted(match["name"]))
            graph.set_anchor(match["anchor"], node.output(int(match["index"] or 0)))
    graph.edits = 0
    return Text(graph, _placements(graph, lines.values(), name))


def _placements(graph: Graph, lines: Iterable[_Line], name: str) -> dict[str, Annotation]:
    """Return the annotations that lines state, by the names of values."""
    found = {}
    for line in lines:
        node, where = graph.nodes[line.name], f"{name}:{line.number}"
        results = len(node.output_dtypes) if line.placements and find_op(node.op) is not None else len(line.placements)
        for index, stated in line.placements.items():
            if index >= results:
                some = "1 result" if results == 1 else f"{results} results"
                raise GraphError(f"'{node.name}' has {some}, so nothing can be stated of another", where=where)
            found[node.output(index).name] = replace(stated, where=where)
    return found


class _Place:
    """Adds the line to every error, and the column where it is known."""

    def __init__(self, name: str, number: int, indent: int = 0) -> None:
        self._where = f"{name}:{number}"
        self._indent = indent

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MisreadError):
            where = f"{self._where}:{self._indent + error.at + 1}"
            raise GraphError(error.problem, where=where, hint=error.hint) from error
        if isinstance(error, GraphError) and error.where is None:
            raise GraphError(error.problem, where=self._where, hint=error.hint) from error
        if isinstance(error, (ValueError, TypeError, OverflowError)):
            raise GraphError(f"this line cannot be read ({error})", where=self._where) from error


def _add_binary(graph: Graph, content: str) -> None:
    found = _BINARY.match(content)
    if found is None:
        short = content.startswith("function ")
        raise GraphError(
            f"this is no line of a graph: '{content[:40]}'",
            hint="functions are read from what --full prints" if short else "a node's line begins with '%name'",
        )
    data = base64.b64decode(json.loads(found["data"]))
    setattr(graph, {"fields": "rest"}.get(found["what"], found["what"]), data)


def _line(content: str, number: int) -> _Line:
    head = _HEAD.match(content)
    if head is None:
        raise GraphError(f"this is no node: '{content[:40]}'", hint="write '%name: type = Op(%input, ...)'")
    line = _Line(number, _unquoted(head["name"]), head["op"])
    if head["types"]:
        _types(content, *head.span("types"), line)
    at = _operands(content, head.end(), line)
    literals = Literals(content, at)
    if literals.peek() == "{" and not _names_axes(content, at):
        op = find_op(line.op)
        dtype, shape = line.types[0] if line.types else (None, None)
        literals.constant = None if dtype is None or (shape and None in shape) else (dtype, shape)
        line.attrs = literals.attrs({key: attr.kind for key, attr in op.attrs.items()} if op is not None else {})
        at = literals.at
    _tail(content, at, line)
    return line


def _names_axes(content: str, at: int) -> bool:
    """Return whether the braces at a position hold a span instead of attributes: words, one of which is an axis."""
    found = SPAN_OF_AXES.match(content, at)
    return found is not None and any(is_axis(word.strip()) for word in found["axes"].split(","))


def _types(content: str, at: int, end: int, line: _Line) -> None:
    """Read the types of results, each with an optional annotation after it."""
    text = content[:end].rstrip()
    at += len(text[at:]) - len(text[at:].lstrip())
    if text.startswith("(", at):
        text, at = text.removesuffix(")"), at + 1
    position = 0
    while at < len(text):
        found = _TYPE.match(text, at)
        if found is None:
            raise GraphError(f"'{text[at:].strip()}' is no type")
        at = found.end()
        if found["placed"]:
            line.placements[position], at = read_annotation(text, at)
        behind = _NEXT.match(text, at)
        if behind is None:
            word = text[at:].split(",")[0]
            problem, start = f"'{word.strip()}' is not understood after a type", at + len(word) - len(word.lstrip())
            raise MisreadError(problem, start, "write 'float32[?,3] @ split(0)'")
        at, position = behind.end(), position + 1
        if found["dtype"] == "?":
            continue
        dtype = dtype_number(found["dtype"])
        if dtype is None:
            raise GraphError(f"'{found['dtype']}' is no element type")
        line.types.append((dtype, None if found["shape"] is None else Literals(f"{found['shape']}]").shape()))


def _operands(content: str, at: int, line: _Line) -> int:
    """Read operands up to the closing parenthesis; return the position after it."""
    while not content.startswith(")", at):
        found = _OPERAND.match(content, at)
        if found is None or content[found.end() : found.end() + 1] not in (",", ")"):
            raise GraphError(
                f"'{content[at : at + 20]}' is no operand", hint="write '%node', '%node:1' or 'all(%node)'"
            )
        select = Select(found["select"]) if found["select"] else None
        name, index = found["selected"] or found["name"], found["at"] or found["index"]
        line.reads.append(_Read(_unquoted(name), int(index or 0), select))
        at = found.end() + content.startswith(",", found.end())
    return at + 1


def _tail(content: str, at: int, line: _Line) -> None:
    while found := SPAN_OF_AXES.match(content, at) or _TAIL.match(content, at):
        at = found.end()
        if found.re is SPAN_OF_AXES:
            line.span = span_of(found)
        elif found["control"]:
            line.controls.append(_unquoted(found["control"]))
        elif found["device"]:
            quoted = found["device"].startswith('"')
            line.device = json.loads(found["device"]) if quoted else device_specs.canonical(found["device"])
        elif found["span"]:
            line.span = SPANS[found["span"]]
        elif found["axis"]:
            _read_place(line, found)
        else:
            line.rest = base64.b64decode(json.loads(found["fields"]))
    left = content[at:].strip()
    if left and not left.startswith("#"):
        raise GraphError(
            f"'{left[:30]}' is not understood",
            hint="after the operands: {attributes} ^control @device each, replica or {axis, axis} axis=place",
        )


def _read_place(line: _Line, found: re.Match[str]) -> None:
    axis, several = found["axis"], found["each"]
    if not is_axis(axis):
        hint = f"write one of: {', '.join(AXES)}"
        raise MisreadError(f"'{axis}' is no axis of a mesh", found.start("axis"), hint)
    if axis in line.place:
        raise MisreadError(f"the place along '{axis}' is stated twice", found.start("axis"), "state it once")
    line.place[axis] = int(found["at"]) if several is None else tuple(int(one) for one in several.split("|"))


def _unquoted(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _add_nodes(graph: Graph, lines: Mapping[str, _Line], replicas: int, name: str) -> None:
    types: dict[str, Sequence[int | None]] = {line.name: [dtype for dtype, _ in line.types] for line in lines.values()}
    for line in lines.values():
        with _Place(name, line.number):
            raw = _attributes(line, types, replicas)
            node = Node(graph, line.name, line.op, line.device, raw, line.rest)
            node.span = line.span
            if line.place:
                node.place = line.place
            graph.insert(node)
            if find_op(line.op) is not None:
                types[line.name] = signature(line.op, raw)[1]
    for line in lines.values():
        with _Place(name, line.number):
            node = graph.nodes[line.name]
            selects = {i: read.select for i, read in enumerate(line.reads) if read.select is not None}
            node.set_inputs([_node(graph, read.name).output(read.output) for read in line.reads], selects)
            for control in line.controls:
                node.add_control(_node(graph, control))


def _node(graph: Graph, name: str) -> Node:
    found = graph.nodes.get(name)
    if found is None:
        raise GraphError(f"no line makes '%{name}'", hint=closest(name, graph.nodes))
    return found


def _attributes(line: _Line, types: Mapping[str, Sequence[int | None]], replicas: int) -> dict[str, Any]:
    """Return the encoded attributes of a line, including those that are inferred from its results and operands."""
    op = find_op(line.op)
    if op is None:
        return line.attrs
    raw: dict[str, Any] = {**line.attrs}
    if has(line.op, "states_shape") and "shape" not in raw and line.types and line.types[0][1] is not None:
        raw["shape"] = encode("shape", line.types[0][1])
    elif not has(line.op, "says_shape") and _SHAPES not in raw and any(shape is not None for _, shape in line.types):
        raw[_SHAPES] = encode("list(shape)", [shape for _, shape in line.types])
    _infer_from_results(op, line, raw)
    missing = [key for key in op.type_attrs if key not in raw]
    if not missing:
        return raw
    operands: list[Any] = []
    for read in line.reads:
        given = types.get(read.name)
        if given is None:
            raise GraphError(f"no line makes '%{read.name}'", hint=closest(read.name, types))
        dtype = given[read.output] if read.output < len(given) else None
        if dtype is None:
            raise GraphError(f"the type of '%{read.name}' is not known where it is read", hint="state it on its line")
        operands += [_Typed(dtype)] * (replicas or 1 if read.select is not None and read.select.is_of_many else 1)
    selects = {i: read.select for i, read in enumerate(line.reads) if read.select is not None and not replicas}
    infer(op, operands, raw, selects)
    return raw


def _infer_from_results(op: OpDef, line: _Line, raw: dict[str, Any]) -> None:
    """Fill in attributes that the stated results decide and no operand does, such as the type of a constant."""
    read = {name for arg in op.inputs for name in (arg.type_attr, arg.number_attr, arg.type_list_attr)}
    results = [dtype for dtype, _ in line.types]
    for at, arg in enumerate(op.outputs):
        if arg.type_list_attr or arg.number_attr:  # it takes all that the others leave: no op has two list results
            behind = len(op.outputs) - at - 1
            here = results[at : len(results) - behind]
            if arg.type_list_attr and arg.type_list_attr not in read:
                raw.setdefault(arg.type_list_attr, encode("list(type)", here))
            if arg.number_attr and arg.number_attr not in read:
                raw.setdefault(arg.number_attr, encode("int", len(here)))
            results = results[:at] + here[:1] + results[len(results) - behind :]
        dtype = results[at] if at < len(results) else None
        if arg.type_attr and arg.type_attr not in read and dtype is not None:
            raw.setdefault(arg.type_attr, encode("type", base(dtype)))
