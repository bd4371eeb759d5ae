"""Prints a graph as text: one line per node, stable, and as diffable as source code.

    %layer/MatMul: float32[?,16] @ split(0) = MatMul(%x, %w) {transpose_b=true} ^assert @CPU:0 each  # reshard for loss

Nodes are in topological order, attributes sorted by name. Default attributes, attributes that the types imply, and
replicated placements are left out. A large constant is shown as its first values and a checksum. The full form has
everything; `ir.format.parser` reads both.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format import literals
from autograph_rewrite.ir.format.annotations import Annotation, Annotations
from autograph_rewrite.ir.format.literals import shape_text
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE, PerInstance, word
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import device_specs, dtypes, wire
from autograph_rewrite.ir.types.attrs import FunctionName, Shape, decode, decode_shape, decode_tensor
from autograph_rewrite.ir.types.opdefs import OWN, find_op
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.ops.traits import has

SHOWN_ELEMENTS = 8  # of a constant; a longer constant shows three and a checksum
SHOWN_TEXT = 60
SMALL = 256  # bytes of the largest attribute whose text is cached
NO_PLACEMENTS: Annotations = MappingProxyType({})
NO_REMARKS: Mapping[str, str] = MappingProxyType({})
_LEGAL = re.compile(r"[\w.\-/>\\]+", re.ASCII)
Shapes = Callable[[Value], Shape | None]
"""Returns the static shape of a value; None for an unknown rank."""

# The first byte of an AttrValue tells the kind of its value; types in a list are packed.
_LIST, _TYPE, _SHAPE, _TENSOR, _TYPES = b"\n", b"0", b":", b"B", b"2"
# Shown elsewhere in the line, or added to nearly every node by TensorFlow's Python layer.
_UNSHOWN = frozenset((PASS_ATTR, ORIGIN_ATTR, "_output_shapes", "_has_manual_control_dependencies", "debug_name"))


def render(
    graph: Graph,
    *,
    nodes: Collection[Node] | None = None,
    shapes: Shapes | None = None,
    full: bool = False,
    placements: Annotations = NO_PLACEMENTS,
    remarks: Mapping[str, str] = NO_REMARKS,
    places: bool = False,
) -> str:
    """Return the text of a graph, or of some of its nodes; a broken graph prints too, in insertion order.

    Args:
        nodes: which of its nodes; None for all.
        shapes: gives the static shapes of values; None for the shapes that nodes state.
        full: with every attribute, constant and function, so that `ir.format.parser.parse` gives the same graph.
        placements: known annotations by value name.
        remarks: comments after the lines of nodes, by node name; the full form has none.
        places: with the coordinates of nodes on axes along which they have no instances, as the full form always has.
    """
    try:
        order = topological_order(graph)
    except (GraphError, KeyError):
        order = list(graph)
    shown = order if nodes is None else [node for node in order if node in nodes]
    if full:
        lines = [full_line(node, shapes, placements) for node in shown]
    else:
        lines = [line(node, shapes, placements, remarks.get(node.name, ""), places) for node in shown]
    if nodes is None:
        lines += [f"anchor {name} = %{_value(value)}" for name, value in sorted(graph.anchors.items())]
        lines += _binaries(graph) if full else functions(graph)
    return "\n".join(lines) + "\n" if lines else ""


def line(
    node: Node,
    shapes: Shapes | None = None,
    placements: Annotations = NO_PLACEMENTS,
    remark: str = "",
    places: bool = False,
) -> str:
    """Return the line of one node.

    Args:
        placements: as for `render`; those of replicated values are left out.
        remark: text of the comment, after the provenance.
    """
    stated = {i: one for i, one in _of_results(node, placements).items() if not one.is_plain}
    parts = [f"%{node.name}{_result(node, shapes, stated)} = {node.op}({_inputs(node)})"]
    if attrs := shown_attrs(node):
        parts.append("{" + ", ".join(f"{key}={value}" for key, value in attrs.items()) + "}")
    parts += [f"^{control.name}" for control in node.controls]
    if node.device:
        parts.append(f"@{device_specs.short(node.device)}")
    parts += _where(node, places)
    if comment := "; ".join(filter(None, (provenance(node), remark))):
        parts.append(f" # {comment}")
    return " ".join(parts)


def full_line(node: Node, shapes: Shapes | None = None, placements: Annotations = NO_PLACEMENTS) -> str:
    """Return the line of one node in the full form."""
    result = _result(node, shapes, _of_results(node, placements))
    parts = [f"%{quoted(node.name)}{result} = {node.op}({_inputs(node)})"]
    if node.attrs:
        parts.append("{" + ", ".join(f"{key}={literals.write(node.attrs[key])}" for key in sorted(node.attrs)) + "}")
    parts += [f"^{quoted(control.name)}" for control in node.controls]
    if node.device:
        parts.append(f"@{json.dumps(node.device)}")
    parts += _where(node, True)
    if node.rest:
        parts.append(f"fields {_coded(node.rest)}")
    return " ".join(parts)


def _where(node: Node, places: bool) -> Iterator[str]:
    """Yield the span of a node and its coordinates on other axes."""
    if node.span != ONCE:
        yield word(node.span)
    for axis, at in sorted(node.place.items()) if places else ():
        yield f"{axis}={at}" if isinstance(at, int) else f"{axis}=each({' | '.join(map(str, at))})"


def _binaries(graph: Graph) -> list[str]:
    parts = (("library", graph.library), ("versions", graph.versions), ("fields", graph.rest))
    return [f"{name} = b64{_coded(data)}" for name, data in parts if data]


def _coded(data: bytes) -> str:
    return f'"{base64.b64encode(data).decode()}"'


@lru_cache(maxsize=1 << 17)
def quoted(name: str) -> str:
    """Return a node's name unchanged, or as a string where it has characters that TensorFlow refuses."""
    return name if _LEGAL.fullmatch(name) else json.dumps(name)


def provenance(node: Node) -> str:
    """Return which pass made a node, and for which original node; empty for an original node."""
    if PASS_ATTR not in node._attrs:
        return ""
    made_by, origin = node.attr(PASS_ATTR), node.attr(ORIGIN_ATTR)
    text = made_by.decode() if made_by is not None else ""
    return f"{text} for {origin.decode()}" if origin is not None else text


def static_shape(value: Value) -> Shape | None:
    """Return the shape that the value's node states; shapes that need inference are None."""
    return _stated_shape(value.node, value.index)


def _stated_shape(node: Node, index: int) -> Shape | None:
    shapes = node.attr("_output_shapes") if "_output_shapes" in node._attrs else None
    if shapes is not None and index < len(shapes):
        shape: Shape | None = shapes[index]
        return shape
    if has(node.op, "constant") and isinstance(raw := node.attrs.get("value"), bytes):
        return _small_shape(raw) if len(raw) <= SMALL else _constant_shape(raw)
    return node.attr("shape") if has(node.op, "states_shape") else None


def _constant_shape(raw: bytes) -> Shape | None:
    return decode_shape(proto("AttrValue").FromString(raw).tensor.tensor_shape)


_small_shape = lru_cache(maxsize=65536)(_constant_shape)


@lru_cache(maxsize=4096)
def type_text(dtype: int, shape: Shape | None) -> str:
    """Return `float32[?,16]`, or `float32` for an unknown rank."""
    return dtypes.dtype_name(dtype) + (shape_text(shape) if shape is not None else "")


def _of_results(node: Node, placements: Annotations) -> dict[int, Annotation]:
    """Return the known annotations of the results of a node, by their positions."""
    if not placements:
        return {}
    name = node.name
    try:
        count = len(node.output_dtypes)
    except GraphError:
        return {}
    found = {i: placements.get(f"{name}:{i}" if i else name) for i in range(count)}
    return {i: one for i, one in found.items() if one is not None}


def _result(node: Node, shapes: Shapes | None, stated: Mapping[int, Annotation]) -> str:
    try:
        types = [
            type_text(dtype, _stated_shape(node, i) if shapes is None else shapes(node.output(i)))
            for i, dtype in enumerate(node.output_dtypes)
        ]
    except GraphError:
        return ": ?"
    types = [f"{text} @ {stated[i]}" if i in stated else text for i, text in enumerate(types)]
    if not types:
        return ""
    return f": {types[0]}" if len(types) == 1 else f": ({', '.join(types)})"


def _inputs(node: Node) -> str:
    names, selects = (f"%{_value(value)}" for value in node._inputs), node.selects
    return ", ".join(f"{selects[i].value}({name})" if i in selects else name for i, name in enumerate(names))


def _value(value: Value) -> str:
    return quoted(value.node.name) + (f":{value.index}" if value.index else "")


def shown_attrs(node: Node) -> dict[str, str]:
    """Return the attributes worth reading, as text, by name."""
    op, attrs = node.op, node._attrs
    text = literals.write if op in OWN else attr_text  # attributes of the package's ops are never shortened
    return {
        key: text(attrs[key])
        for key in sorted(attrs)
        if not (key in _UNSHOWN or _goes_without_saying(op, key, attrs[key]))
    }


def _goes_without_saying(name: str, key: str, raw: bytes | PerInstance) -> bool:
    """Return whether an attribute has its default, or the type of the result implies it."""
    op = find_op(name)
    if op is None:
        return False
    declared = op.attrs.get(key)
    implied = key in op.type_attrs or (key == "shape" and has(name, "states_shape"))
    return implied or (declared is not None and raw == declared.default)


def attr_text(raw: bytes | PerInstance) -> str:
    """Return an attribute value as text."""
    if isinstance(raw, PerInstance):
        few = [attr_text(one) for one in raw.raws[:4]]
        return f"each({' | '.join(few)}{' | ...' if len(raw.raws) > 4 else ''})"
    return _small_text(raw) if len(raw) <= SMALL else _attr_text(raw)


def _attr_text(raw: bytes) -> str:
    if raw[:1] == _TENSOR:
        return _tensor_text(raw)
    try:
        value = decode(raw)
    except GraphError:
        return "<malformed>"
    if raw[:1] != _LIST:
        return _scalar_text(value, raw[:1])
    tag = raw[wire.read_varint(raw, 1)[1] :][:1]  # of the first item; all are alike
    return f"[{', '.join(_scalar_text(item, _TYPE if tag == _TYPES else tag) for item in value)}]"


_small_text = lru_cache(maxsize=65536)(_attr_text)
"""Cached: instances of one node, and nodes of one kind, share their attributes."""


def _scalar_text(value: Any, tag: bytes = b"") -> str:
    if tag == _TYPE:
        return dtypes.dtype_name(value)
    if tag == _SHAPE:
        return shape_text(value)
    match value:
        case bool() | np.bool_():
            return "true" if value else "false"
        case bytes():
            return _bytes_text(value)
        case FunctionName():
            return f"@{value.name}"
        case None:
            return "unset"
        case np.ndarray():
            return f"{value.tolist()}" if value.size <= SHOWN_ELEMENTS else f"array #{_checksum(value.tobytes())}"
        case float():
            return str(np.float32(value))  # attributes are single precision
        case int() | np.generic():
            return str(value)
        case _:
            return f"<{type(value).__name__}>"


def _bytes_text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = ""
    if len(value) <= SHOWN_TEXT and (text.isprintable() if text else not value):
        return json.dumps(text, ensure_ascii=False)
    return f"<{len(value)} bytes #{_checksum(value)}>"


def _tensor_text(raw: bytes) -> str:
    """Return the value of a constant without its shape, which the printed type has."""
    tensor = proto("AttrValue").FromString(raw).tensor
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    size = int(np.prod(shape, dtype=np.int64))
    strings = tensor.dtype == dtypes.STRING and len(tensor.string_val) in (1, size)
    if size > SHOWN_ELEMENTS:
        return f"[{_head(tensor, size)}#{_checksum(raw)}]"
    try:
        values = list(tensor.string_val) if strings else decode_tensor(tensor)
    except ValueError:
        return "<malformed>"
    if isinstance(values, np.ndarray):
        values = list(values.ravel())
    elif not strings:
        return f"<{dtypes.dtype_name(tensor.dtype)} #{_checksum(raw)}>"
    texts = [_scalar_text(value) for value in values]
    return f"[{', '.join(texts)}]" if shape else "".join(texts)


def _head(tensor: Any, size: int) -> str:
    """Return the first three values of a long tensor without decoding the rest; "" where that is not possible."""
    dtype = dtypes.numpy_dtype(tensor.dtype)
    if dtype is None or not tensor.tensor_content or len(tensor.tensor_content) != size * dtype.itemsize:
        return ""
    first = np.frombuffer(tensor.tensor_content, dtype=dtype, count=3)
    return "".join(f"{value}, " for value in first) + "... "


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def library(graph: Graph) -> Iterator[Any]:
    """Yield the FunctionDefs of a graph."""
    for field, _, _, start, stop in wire.fields(graph.library):
        if field == 1:
            yield proto("FunctionDef").FromString(graph.library[start:stop])


def functions(graph: Graph) -> list[str]:
    """Return one line per library function, by name."""
    lines = []
    for function in library(graph):
        checksum = _checksum(function.SerializeToString(deterministic=True))
        lines.append(f"function {function.signature.name}: {len(function.node_def)} nodes #{checksum}")
    return sorted(lines)
