"""Write the folded graph out as a GraphDef: one copy of each EACH node per replica, on its device.

    folded     %dw = MatMul(%x, %dy)  each
    expanded   replica_0/dw = MatMul(replica_0/x, replica_0/dy) @ device 0
               replica_1/dw = MatMul(replica_1/x, replica_1/dy) @ device 1

Replicas differ in name prefix and device only, so their bytes are written once with placeholders that are then
replaced for each replica: the cost hardly grows with their number. Nodes that hold the same value on every replica
keep their name on replica 0, so variables are found under their own names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autograph_rewrite.ir import wire
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, PerInstance, Select, Span, Value
from autograph_rewrite.ir.serde import frame

_MARK = wire.delimited(wire.ATTR, wire.delimited(1, PASS_ATTR.encode()) + wire.delimited(2, b"\x12\x06expand"))


class Instance(NamedTuple):
    """What tells one replica from another: name prefixes (of nodes with common and with own values) and device."""

    common: bytes
    own: bytes
    device: bytes


def prefix(replica: int) -> str:
    """Return the name prefix of a replica."""
    return f"replica_{replica}/"


def instance_name(node: Node, replica: int, common: frozenset[Node] | set[Node]) -> str:
    """Return the name of one instance of an EACH node; nodes in `common` keep theirs on replica 0."""
    return node.name if replica == 0 and node in common else prefix(replica) + node.name


def expand(graph: Graph, devices: Sequence[str], common: set[Node]) -> bytes:
    """Return the GraphDef bytes of a folded graph.

    Args:
        graph: the folded graph.
        devices: one per replica.
        common: the EACH nodes that hold the same value on every replica.

    Raises:
        GraphError: the result is over 2 GiB.
    """
    nodes = list(graph)
    each = [node for node in nodes if node.span is Span.EACH]
    special = [node for node in each if any(isinstance(raw, PerInstance) for raw in node._attrs.values())]
    special_set = set(special)
    plain = [node for node in each if node not in special_set]
    instances = [Instance(b"" if r == 0 else prefix(r).encode(), prefix(r).encode(), d.encode()) for r, d in enumerate(devices)]
    parts = [_once(node, devices, common) for node in nodes if node.span is Span.ONCE]
    parts += _copies(plain, instances, common)
    for node in special:
        parts += [_special(node, r, instance, common) for r, instance in enumerate(instances)]
    return frame(parts, graph)


def _copies(nodes: Sequence[Node], instances: Sequence[Instance], common: set[Node]) -> list[bytes]:
    """Encode all instances of `nodes`: replica 0 by hand, the others from one template per name length."""
    parts = [_block(nodes, instances[0], common)]
    templates: dict[tuple[int, int], tuple[Instance, bytes, bool]] = {}
    for instance in instances[1:]:
        key = (len(instance.own), len(instance.device))
        if key not in templates:
            token = Instance(_token("name", key[0]), _token("name", key[0]), _token("device", key[1]))
            template = _block(nodes, token, common)
            templates[key] = (token, template, _is_clean(nodes, token))
        token, template, clean = templates[key]
        if clean:
            parts.append(template.replace(token.own, instance.own).replace(token.device, instance.device))
        else:
            parts.append(_block(nodes, instance, common))
    return parts


def _token(what: str, length: int) -> bytes:
    """Return bytes that no name can contain (they are not UTF-8), of the length of what will replace them."""
    if not length:
        return b""
    seed = hashlib.sha256(what.encode()).digest()
    return bytes(0x80 | byte & 0x3F for byte in (seed * (length // len(seed) + 1))[:length])


def _is_clean(nodes: Iterable[Node], token: Instance) -> bool:
    """Return whether no attribute happens to contain a placeholder."""
    needles = [needle for needle in (token.own, token.device) if needle]
    return not any(
        needle in raw for node in nodes for raw in node._attrs.values() if len(raw) > 64 for needle in needles
    )


def _block(nodes: Iterable[Node], instance: Instance, common: set[Node]) -> bytes:
    """Encode one instance of each node. The hot loop of rewriting."""
    each = Span.EACH
    parts: list[bytes] = []
    for node in nodes:
        inputs: list[bytes] = []
        for value in node._inputs:
            producer = value.node
            text = producer.name if value.index == 0 else f"{producer.name}:{value.index}"
            encoded = text.encode()
            if producer.span is each:
                encoded = (instance.common if producer in common else instance.own) + encoded
            inputs.append(encoded)
        for control in node._controls:
            encoded = control.name.encode()
            if control.span is each:
                encoded = (instance.common if control in common else instance.own) + encoded
            inputs.append(b"^" + encoded)
        own = instance.common if node in common else instance.own
        parts.append(
            wire.write_node(own + node.name.encode(), node.op.encode(), inputs, instance.device, _tail(node, bool(own)))
        )
    return b"".join(parts)


def _tail(node: Node, copied: bool) -> bytes:
    attrs = {k: v for k, v in node._attrs.items() if k not in ("_class", "_output_shapes")}
    tail = wire.write_attrs(attrs) + node.rest
    return tail + _MARK if copied and PASS_ATTR not in attrs else tail


def _special(node: Node, replica: int, instance: Instance, common: set[Node]) -> bytes:
    """Encode one instance of a node whose attributes differ between replicas."""
    kept = node._attrs
    node._attrs = {k: v.raws[replica] if isinstance(v, PerInstance) else v for k, v in kept.items()}
    try:
        return _block([node], instance, common)
    finally:
        node._attrs = kept


def _once(node: Node, devices: Sequence[str], common: set[Node]) -> bytes:
    """Encode a node that runs once; it may read all instances of others."""
    count = len(devices)
    inputs: list[bytes] = []
    for index, value in enumerate(node._inputs):
        producer = value.node
        suffix = f":{value.index}" if value.index else ""
        if producer.span is Span.ONCE:
            inputs.append((producer.name + suffix).encode())
            continue
        wanted = range(count) if node.selects.get(index) is Select.ALL else range(1)
        inputs += [(instance_name(producer, r, common) + suffix).encode() for r in wanted]
    for control in node._controls:
        if control.span is Span.ONCE:
            inputs.append(b"^" + control.name.encode())
        else:
            inputs += [b"^" + instance_name(control, r, common).encode() for r in range(count)]
    return wire.write_node(node.name.encode(), node.op.encode(), inputs, node.device.encode(), _tail(node, False))
