"""Converts GraphDef bytes to a Graph and back, exactly; only this file knows the syntax `^name` and `name:1`."""

from __future__ import annotations

import re

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE, PerInstance
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.opdefs import OWN

TWO_GIB = 2**31 - 1
_INDEX = re.compile("[0-9]{1,5}")  # a longer number is corrupt, and would allocate that many outputs
_FEW = 64
"""Outputs that are made without a check against the op's signature, which takes longer than making them."""


def from_bytes(data: bytes) -> Graph:
    """Build a graph from an encoded GraphDef.

    Raises:
        GraphError: the bytes are not a GraphDef, a name occurs twice, or an input does not exist.
    """
    graph = Graph()
    pending: list[tuple[Node, list[str]]] = []
    rest: list[bytes] = []
    entries: dict[bytes, tuple[str, bytes]] = {}
    try:
        for field, _, tag_at, start, stop in wire.fields(data):
            if field == wire.NODE:
                raw = wire.read_node(data, start, stop, entries)
                node = Node(graph, raw.name, raw.op, raw.device, raw.attrs, raw.rest)
                if not raw.name or not raw.op:
                    raise GraphError("a node has no name or no op: the data is not a valid GraphDef")
                if raw.name in graph.nodes:
                    raise GraphError(f"two nodes are named '{raw.name}'", node=node)
                graph.nodes[raw.name] = node
                pending.append((node, raw.inputs))
            elif field == wire.LIBRARY:
                graph.library += data[start:stop]  # joined encodings are merged messages
            elif field == wire.VERSIONS:
                graph.versions += data[start:stop]
            else:
                rest.append(data[tag_at:stop])
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise GraphError(f"this is not a GraphDef, or it is truncated ({error})") from None
    graph.rest = b"".join(rest)
    for node, inputs in pending:
        _connect(graph, node, inputs)
    graph.edits = 0
    return graph


def _connect(graph: Graph, node: Node, inputs: list[str]) -> None:
    nodes = graph.nodes
    values: list[Value] = []
    for text in inputs:
        producer = nodes.get(text)
        index = 0
        if producer is None:
            if text.startswith("^"):
                control = nodes.get(text[1:])
                if control is None:
                    raise GraphError(f"'{node.name}' waits for '{text[1:]}', which the graph does not have", node=node)
                node._controls[control] = None
                control._control_users[node] = None
                continue
            name, _, number = text.rpartition(":")
            producer = nodes.get(name)
            if producer is None or not _INDEX.fullmatch(number):
                raise GraphError(f"'{node.name}' reads '{text}', which the graph does not have", node=node)
            index = int(number)
        outputs = producer._outputs
        if index >= len(outputs) + _FEW and index >= len(producer.output_dtypes):
            raise GraphError(f"'{node.name}' reads '{text}', which '{name}' does not give", node=node)
        value = outputs[index] if index < len(outputs) else producer.output(index)
        value._uses[node, len(values)] = None
        values.append(value)
    node._inputs = tuple(values)


def input_names(node: Node) -> list[str]:
    """Return the inputs of a node in GraphDef syntax, data first, then `^control`."""
    return [value.name for value in node.inputs] + [f"^{control.name}" for control in node.controls]


def tail_bytes(node: Node) -> bytes:
    """Return the encoded attributes and uninterpreted fields of a node."""
    return wire.write_attrs(node._attrs) + node.rest


def frame(nodes: list[bytes], graph: Graph) -> bytes:
    """Join encoded nodes and the graph-wide fields of `graph` into one GraphDef.

    Raises:
        GraphError: the result is over 2 GiB, which TensorFlow cannot read.
    """
    parts = list(nodes)
    if graph.library:
        parts.append(wire.delimited(wire.LIBRARY, graph.library))
    if graph.versions:
        parts.append(wire.delimited(wire.VERSIONS, graph.versions))
    parts.append(graph.rest)
    size = sum(map(len, parts))
    if size > TWO_GIB:
        raise GraphError(
            f"the GraphDef has {size:,} bytes; TensorFlow cannot read more than 2 GiB",
            hint="keep large constants in variables or files instead of in the graph",
        )
    return b"".join(parts)


def to_bytes(graph: Graph) -> bytes:
    """Encode a graph without EACH nodes as a GraphDef.

    Raises:
        GraphError: the graph is over 2 GiB, is still folded, or has ops of the package or places.
    """
    nodes = []
    for node in graph:
        if node.span != ONCE or PerInstance in map(type, node._attrs.values()):
            raise GraphError(
                f"'{node.name}' runs on each replica: a folded graph is no GraphDef yet",
                node=node,
                hint="expand it first, or print it with ir.text",
            )
        if node.op in OWN or node.place:
            what = f"an {node.op}" if node.op in OWN else "placed along axes of a mesh"
            raise GraphError(
                f"'{node.name}' is {what}: no GraphDef can say that",
                node=node,
                hint="lower and expand it first, or print it with ir.text",
            )
        inputs = [text.encode() for text in input_names(node)]
        nodes.append(
            wire.write_node(node.name.encode(), node.op.encode(), inputs, node.device.encode(), tail_bytes(node))
        )
    return frame(nodes, graph)
