"""Two digests of an encoded graph: its bytes, and its structure whatever the nodes that passes add are called.

The graph is read by a schema of its own, which keeps attributes as bytes: no name of the package's internals is needed
but those of two attributes that rewritten graphs carry, in files, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROVENANCE = frozenset(("_autograph_pass", "_autograph_origin"))
"""Which pass made a node, and for which original one: in no digest, for passes may be divided and renamed."""
MADE = "_autograph_pass"
"""The attribute that every node has that a pass has added."""
_FIELDS = descriptor_pb2.FieldDescriptorProto
_SCHEMA: Mapping[str, Sequence[tuple[str, int, str, bool]]] = {
    # name, number, type, whether it is repeated; what is not listed stays with the message as it is
    "Strings": (("s", 2, "bytes", True),),
    "Attr": (("list", 1, "Strings", False), ("s", 2, "bytes", False)),
    "Entry": (("key", 1, "string", False), ("value", 2, "bytes", False)),
    "Node": (
        ("name", 1, "string", False),
        ("op", 2, "string", False),
        ("input", 3, "string", True),
        ("device", 4, "string", False),
        ("attr", 5, "Entry", True),
    ),
    "Graph": (("node", 1, "Node", True),),
}
Edges = Sequence[tuple[str, int]]
"""How a node reads which others, by their places in the graph."""
_STRING, _LIST = b"\x12", b"\x0a"
"""What the bytes of an attribute begin with that is a string, or a list."""


@lru_cache(maxsize=1)
def _messages() -> Mapping[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="oracle.proto", package="oracle", syntax="proto3")
    plain = {"string": _FIELDS.TYPE_STRING, "bytes": _FIELDS.TYPE_BYTES}
    for message, fields in _SCHEMA.items():
        made = file.message_type.add(name=message)
        for name, number, kind, is_repeated in fields:
            field = made.field.add(name=name, number=number, type=plain.get(kind, _FIELDS.TYPE_MESSAGE))
            field.label = _FIELDS.LABEL_REPEATED if is_repeated else _FIELDS.LABEL_OPTIONAL
            if kind not in plain:
                field.type_name = f".oracle.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"oracle.{name}")) for name in _SCHEMA}


@dataclass(frozen=True)
class Node:
    """A node; `rest` are the fields that the schema does not name."""

    name: str
    op: str
    inputs: tuple[str, ...]
    device: str
    attrs: Mapping[str, bytes]
    is_added: bool
    rest: bytes = b""


@dataclass(frozen=True)
class Encoded:
    """A graph as it was read; `rest` are its functions and versions."""

    nodes: tuple[Node, ...]
    rest: bytes = b""


def read(data: bytes, ignored: Collection[str] = PROVENANCE) -> Encoded:
    """Read a GraphDef, without some attributes."""
    graph = _messages()["Graph"].FromString(data)
    nodes = []
    for node in graph.node:
        attrs = {entry.key: entry.value for entry in node.attr}
        kept = {key: attrs[key] for key in sorted(attrs) if key not in ignored}
        nodes.append(
            Node(node.name, node.op, tuple(node.input), node.device, kept, MADE in attrs, _rest(node, "attr", "input"))
        )
    return Encoded(tuple(nodes), _rest(graph, "node"))


def _rest(message: Any, *lists: str) -> bytes:
    """The unknown fields; of a copy, in which the known ones are empty."""
    if not message.ByteSize():
        return b""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in (*lists, "name", "op", "device"):
        if name in message.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return bytes(copy.SerializeToString(deterministic=True))


def exact(graph: Encoded) -> str:
    """The digest of all that the graph says, in its order."""
    digest = blake2b(digest_size=12)
    for node in graph.nodes:
        digest.update(_joined([node.name.encode(), *(one.encode() for one in node.inputs), _label(node, node.attrs)]))
    digest.update(graph.rest)
    return digest.hexdigest()


def lines(graph: Encoded) -> str:
    """A line for each node with all that `exact` digests, attributes by a digest of their own."""
    return "\n".join(
        f"{node.name} = {node.op}({', '.join(node.inputs)}) {node.device} "
        + " ".join(f"{key}={_short(value).hex()}" for key, value in node.attrs.items())
        for node in graph.nodes
    )


def modulo_names(graph: Encoded) -> str:
    """The digest of the graph up to the order of its nodes and the names of those that passes have added.

    Each node gets a colour from its op, attributes, device and the colours of its inputs; then from those of its
    readers; then from its inputs again, so that it depends on all that is before and behind it. Two graphs with the
    same colours, counted, are taken for the same.
    """
    nodes = graph.nodes
    places = {node.name: i for i, node in enumerate(nodes)}
    added = {node.name for node in nodes if node.is_added}
    labels: list[bytes] = []
    edges: list[Edges] = []
    for node in nodes:
        attrs, named = _without_names(node.attrs, added)
        label = _label(node, attrs) if node.is_added else _joined([node.name.encode(), _label(node, attrs)])
        labels.append(_short(label))
        edges.append(tuple(_edges(node, named, places)))
    order = _order(nodes, edges)
    colours = _coloured(order, labels, edges)
    readers: list[list[tuple[str, int]]] = [[] for _ in nodes]
    for i, one in enumerate(edges):
        for key, source in one:
            readers[source].append((key, i))
    colours = _coloured(order[::-1], colours, readers)
    colours = _coloured(order, colours, edges)
    return blake2b(_joined([*sorted(colours), graph.rest]), digest_size=12).hexdigest()


def plan_modulo_names(plan: str, added: Collection[str]) -> str:
    """The digest of a plan's text up to the names of nodes that passes have added."""
    hidden = re.sub(r"[^\s'\",{}\[\]]+", lambda found: "+" if _node_of(found[0]) in added else found[0], plan)
    # A longer or shorter name breaks the lines of the text elsewhere.
    return blake2b(" ".join(hidden.split()).encode(), digest_size=12).hexdigest()


def _node_of(value: str) -> str:
    return value.removesuffix(":").partition(":")[0]


def _label(node: Node, attrs: Mapping[str, bytes]) -> bytes:
    pairs = [part for key, value in attrs.items() for part in (key.encode(), value)]
    return _joined([node.op.encode(), node.device.encode(), node.rest, *pairs])


def _joined(parts: Iterable[bytes]) -> bytes:
    """Bytes from which each part could be read again."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _short(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


def _without_names(
    attrs: Mapping[str, bytes], added: Collection[str]
) -> tuple[dict[str, bytes], list[tuple[str, str]]]:
    """Attributes whose strings name no added node, and which nodes were named where (`loc:@name`, shared names)."""
    kept, named = dict(attrs), []
    for key, value in attrs.items():
        if value[:1] not in (_STRING, _LIST):
            continue
        attr = _messages()["Attr"].FromString(value)
        strings = attr.list.s if value[:1] == _LIST else [attr.s]
        found = [text.decode("utf-8", "replace").removeprefix("loc:@") for text in strings]
        if any(name in added for name in found):
            named += [(f"{key} {i}", name) for i, name in enumerate(found) if name in added]
            kept[key] = _joined(b"" if name in added else text for name, text in zip(found, strings, strict=True))
    return kept, named


def _edges(node: Node, named: Iterable[tuple[str, str]], places: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What a node reads, each with a key that tells how; all control edges have the same."""
    for slot, text in enumerate(node.inputs):
        if text.startswith("^"):
            yield "^", places[text[1:]]
        else:
            name, _, port = text.partition(":")
            yield f"{slot} {port or 0}", places[name]
    yield from ((key, places[name]) for key, name in named)


def _order(nodes: Sequence[Node], edges: Sequence[Edges]) -> list[int]:
    """Producers before readers; what an iteration hands to the next comes behind its reader."""
    sources = [{source for _, source in one if source != i} for i, one in enumerate(edges)]
    for i, one in enumerate(sources):
        if nodes[i].op in ("Merge", "RefMerge"):
            sources[i] = {source for source in one if not nodes[source].op.endswith("NextIteration")}
    readers: list[list[int]] = [[] for _ in nodes]
    for i, one in enumerate(sources):
        for source in one:
            readers[source].append(i)
    waits = [len(one) for one in sources]
    order = [i for i, count in enumerate(waits) if not count]
    for i in order:
        for reader in readers[i]:
            waits[reader] -= 1
            if not waits[reader]:
                order.append(reader)
    return order + [i for i, count in enumerate(waits) if count]  # these in a circle of another kind


def _coloured(
    order: Iterable[int], colours: Sequence[bytes], edges: Sequence[Sequence[tuple[str, int]]]
) -> list[bytes]:
    """Colours that take in those of the neighbours; a neighbour later in the order has the colour from before."""
    found = list(colours)
    for i in order:
        found[i] = _short(_joined([colours[i], *sorted(key.encode() + b" " + found[j] for key, j in edges[i])]))
    return found
