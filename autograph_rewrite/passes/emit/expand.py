"""Write the folded graph out as a GraphDef: one copy of each EACH node per replica, on its device.

    folded     %dw = MatMul(%x, %dy)  each
    expanded   replica_0/dw = MatMul(replica_0/x, replica_0/dy) @ device 0
               replica_1/dw = MatMul(replica_1/x, replica_1/dy) @ device 1

Replicas differ in name prefix and device only, so their bytes are written once with placeholders that are then
replaced for each replica: the cost hardly grows with their number. Nodes that hold the same value on every replica
keep their name on replica 0, so variables are found under their own names.

A sum over micro-batches is written as a running one, so that each gradient is added when it is there, and gone:

    folded     dw/add_n = AddN(all(%dw))
    expanded   dw/add_n/with_1 = AddV2(replica_0/micro_0/dw, replica_0/micro_1/dw)
               dw/add_n = AddV2(dw/add_n/with_1, replica_0/micro_2/dw)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from autograph_rewrite.ir.format.serde import frame
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, PerInstance, Select, Span, Value
from autograph_rewrite.ir.replication import prefix
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.passes.base.instance_order import NO_ORDER, InstanceOrder, is_running_sum

_MARK = wire.delimited(wire.ATTR, wire.delimited(1, PASS_ATTR.encode()) + wire.delimited(2, b"\x12\x06expand"))


class Instance(NamedTuple):
    """What tells one replica from another: name prefixes (of nodes with common and with own values) and device."""

    common: bytes
    own: bytes
    device: bytes


def instance_name(node: Node, instance: int, common: frozenset[Node] | set[Node], micro: int = 1) -> str:
    """Return the name of one instance of an EACH node; nodes in `common` keep theirs for the first.

    Args:
        node: of the folded graph.
        instance: counted over replicas, and over the micro-batches of each.
        common: nodes whose instances all hold one value.
        micro: micro-batches per replica.
    """
    return node.name if instance == 0 and node in common else prefix(instance, micro) + node.name


def sum_name(node: Node, instance: int, instances: int, micro: int) -> str:
    """Return the name of a running sum once it has an instance, which is not the first of its replica.

    Args:
        node: the AddN of the folded graph.
        instance: the last that has been added.
        instances: how many there are.
        micro: micro-batches per replica.
    """
    return node.name if instances == micro == instance + 1 else f"{node.name}/with_{instance}"


class _Record(NamedTuple):
    """An EACH node, encoded as far as its instances agree: kind of prefix and rest of each name, fixed bytes."""

    own: int
    name: bytes
    op: bytes
    inputs: tuple[int, ...]  # places in `_Records.references`
    device: bytes | None  # encoded, if it is not that of the replica
    tail: bytes


_ONCE, _COMMON, _OWN = 0, 1, 2  # kinds of name prefix


@dataclass(frozen=True)
class ReplicaLayout:
    """How EACH nodes are run: on which devices, and in which order.

    Attributes:
        devices: by stage, the device of each instance; one entry where there are no stages.
        micro: how many instances belong to one replica.
        order: in which they follow each other.
        stages: of the nodes that are not in the first one.
        pinned_devices: the devices of nodes that are not where their replica is.
    """

    devices: tuple[tuple[str, ...], ...]
    micro: int = 1
    order: InstanceOrder = NO_ORDER
    stages: Mapping[Node, int] = field(default_factory=dict)
    pinned_devices: Mapping[Node, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.devices[0])

    def of(self, node: Node) -> tuple[str, ...]:
        """Return the device of each instance of a node."""
        return self.devices[self.stages.get(node, 0)]


def expand(graph: Graph, run: ReplicaLayout, common: set[Node]) -> bytes:
    """Return the GraphDef bytes of a folded graph.

    Args:
        graph: the folded graph.
        run: how its EACH nodes are run.
        common: the EACH nodes that hold the same value on every replica.

    Raises:
        GraphError: the result is over 2 GiB.
    """
    tails = _Tails()
    parts: list[bytes] = []
    special: list[list[Node]] = [[] for _ in run.devices]
    alike: list[tuple[list[Node], list[Node]]] = [([], []) for _ in run.devices]
    for node in graph:
        stage = run.stages.get(node, 0)
        if node.span is Span.ONCE:
            parts.append(_once(node, run, common, tails))
        elif node in run.order.roots or node in run.order.sums or _differs(node):
            special[stage].append(node)
        else:
            alike[stage][node not in common].append(node)
    prefixes = [prefix(i, run.micro).encode() for i in range(len(run))]
    for devices, of_stage in zip(run.devices, alike, strict=True):
        instances = _instances(prefixes, devices)
        for nodes in of_stage:
            parts += _copies(_Records(common, nodes, tails, run.pinned_devices), instances)
    for i in range(len(run)):
        waits = _waits(run, i, common)
        for devices, nodes in zip(run.devices, special, strict=True):
            parts.append(
                _block(_Records(common, nodes, tails, run.pinned_devices, i, waits), _instances(prefixes, devices)[i])
            )
    return frame(parts, graph)


def _differs(node: Node) -> bool:
    return any(isinstance(raw, PerInstance) for raw in node._attrs.values())


def _instances(prefixes: Sequence[bytes], devices: Sequence[str]) -> list[Instance]:
    named = zip(prefixes, devices, strict=True)
    return [Instance(name if i else b"", name, device.encode()) for i, (name, device) in enumerate(named)]


def _waits(run: ReplicaLayout, instance: int, common: set[Node]) -> dict[Node, list[str]]:
    """Return the names that one instance of each ordered node waits for, besides those of its own micro-batch."""
    waits: dict[Node, list[str]] = {}
    own = instance % run.micro
    for node, by_micro in run.order.roots.items():
        wait = by_micro[own]
        if wait is not None:
            waits[node] = [instance_name(wait.node, instance - own + wait.micro, common, run.micro)]
    for gate, sums in run.order.sums.items():
        if own:
            waits[gate] = [sum_name(total, instance, len(run), run.micro) for total in sums]
        else:
            waits[gate] = [instance_name(total.inputs[0].node, instance, common, run.micro) for total in sums]
    return waits


class _Tails:
    """Encodes attributes; equal ones, which are most, only once."""

    def __init__(self) -> None:
        self._single: dict[tuple[str, bytes], bytes] = {}
        self._joined: dict[tuple[object, ...], bytes] = {}

    def __call__(self, node: Node, replica: int = 0, *, copied: bool) -> bytes:
        """Return the encoded attributes and uninterpreted fields of one instance.

        Colocation is dropped: every node has a device. So are shapes, which were those of the whole batch.
        """
        attrs = [item for item in node._attrs.items() if item[0] not in _DROPPED]
        key = (copied, replica, node.rest, *attrs)
        tail = self._joined.get(key)
        if tail is None:
            tail = self._joined[key] = self._encode(node, attrs, replica, copied)
        return tail

    def _encode(
        self, node: Node, attrs: Iterable[tuple[str, bytes | PerInstance]], replica: int, copied: bool
    ) -> bytes:
        parts: list[bytes] = []
        for key, raw in attrs:
            value = raw.raws[replica] if isinstance(raw, PerInstance) else raw
            encoded = self._single.get((key, value))
            if encoded is None:
                encoded = self._single[key, value] = wire.write_attrs({key: value})
            parts.append(encoded)
        if copied and PASS_ATTR not in node._attrs:
            parts.append(_MARK)
        parts.append(node.rest)
        return b"".join(parts)


_DROPPED = frozenset(("_class", "_output_shapes"))


class _Records:
    """Nodes that are encoded together, and what they read: most values have several readers, and are named once.

    Args:
        common: the nodes that hold the same value on every replica.
        nodes: the EACH nodes to encode.
        tails: encodes their attributes.
        pinned_devices: the devices of nodes that are not where their replica is.
        replica: the one whose attributes count, where they differ.
        waits: full names that nodes wait for besides their controls.
    """

    def __init__(
        self,
        common: set[Node],
        nodes: Iterable[Node],
        tails: _Tails,
        pinned_devices: Mapping[Node, str],
        replica: int = 0,
        waits: Mapping[Node, list[str]] = MappingProxyType({}),
    ) -> None:
        self.references: list[tuple[int, bytes, bytes]] = []  # kind of prefix; mark (`^` or nothing); rest of the name
        self._common = common
        self._elsewhere = pinned_devices
        self._places: dict[Value | Node | str, int] = {}
        self._waits = waits
        self.all = [self._record(node, tails(node, replica, copied=True)) for node in nodes]
        kinds = {kind for kind, _, _ in self.references} | {record.own for record in self.all}
        self.uses_common = _COMMON in kinds

    def _record(self, node: Node, tail: bytes) -> _Record:
        places = self._places
        inputs = [places[value] if value in places else self._add(value) for value in node._inputs]
        inputs += [places[control] if control in places else self._add(control) for control in node._controls]
        if node in self._waits:
            inputs += [places[name] if name in places else self._add(name) for name in self._waits[node]]
        op = node.op.encode()
        head = b"\x12" + wire.varint(len(op)) + op
        device = _device(self._elsewhere[node].encode()) if node in self._elsewhere else None
        return _Record(_kind(node, self._common), node.name.encode(), head, tuple(inputs), device, tail)

    def _add(self, read: Value | Node | str) -> int:
        self._places[read] = place = len(self.references)
        if isinstance(read, str):
            self.references.append((_ONCE, b"^", read.encode()))
        elif isinstance(read, Node):
            self.references.append((_kind(read, self._common), b"^", read.name.encode()))
        else:
            self.references.append((_kind(read.node, self._common), b"", read.name.encode()))
        return place


def _kind(node: Node, common: set[Node]) -> int:
    if node.span is Span.ONCE:
        return _ONCE
    return _COMMON if node in common else _OWN


def _copies(records: _Records, instances: Sequence[Instance]) -> list[bytes]:
    """Encode all instances from one template per length of name prefixes and device."""
    parts: list[bytes] = []
    templates: dict[tuple[int, ...], tuple[Instance, bytes, bool]] = {}
    for instance in instances:
        if records.uses_common and not instance.common:  # replica 0 of common nodes has no prefix to replace
            parts.append(_block(records, instance))
            continue
        key = (len(instance.own), len(instance.device))
        if key not in templates:
            token = Instance(_token("name", key[0]), _token("name", key[0]), _token("device", key[1]))
            templates[key] = (token, _block(records, token), _is_clean(records, token))
        token, template, clean = templates[key]
        if clean:
            parts.append(template.replace(token.own, instance.own).replace(token.device, instance.device))
        else:
            parts.append(_block(records, instance))
    return parts


def _token(what: str, length: int) -> bytes:
    """Return bytes that no name can contain (they are not UTF-8), of the length of what will replace them."""
    if not length:
        return b""
    seed = hashlib.sha256(what.encode()).digest()
    return bytes(0x80 | byte & 0x3F for byte in (seed * (length // len(seed) + 1))[:length])


def _is_clean(records: _Records, token: Instance) -> bool:
    """Return whether no attribute happens to contain a placeholder."""
    needles = [needle for needle in (token.own, token.device) if needle]
    return not any(needle in record.tail for record in records.all for needle in needles)


def _block(records: _Records, instance: Instance) -> bytes:
    """Encode one instance of each node. The hot loop of rewriting."""
    prefixes = (b"", instance.common, instance.own)
    varint = wire.varint
    own = _device(instance.device)
    reads: list[bytes] = []
    for kind, mark, text in records.references:
        full = mark + prefixes[kind] + text
        reads.append(b"\x1a" + varint(len(full)) + full)
    parts: list[bytes] = []
    for kind, rest, op, inputs, fixed, tail in records.all:
        name = prefixes[kind] + rest
        device = own if fixed is None else fixed
        payload = b"".join((b"\n", varint(len(name)), name, op, *[reads[place] for place in inputs], device, tail))
        parts += (b"\n", varint(len(payload)), payload)
    return b"".join(parts)


def _device(name: bytes) -> bytes:
    return b"\x22" + wire.varint(len(name)) + name if name else b""


def _once(node: Node, run: ReplicaLayout, common: set[Node], tails: _Tails) -> bytes:
    """Encode a node that runs once; it may read all instances of others."""
    if run.micro > 1 and is_running_sum(node):
        return _running_sum(node, run, common)
    count = len(run)
    inputs: list[bytes] = []
    for index, value in enumerate(node._inputs):
        producer = value.node
        suffix = f":{value.index}" if value.index else ""
        if producer.span is Span.ONCE:
            inputs.append((producer.name + suffix).encode())
            continue
        wanted = range(count) if node.selects.get(index) is Select.ALL else range(1)
        inputs += [(instance_name(producer, r, common, run.micro) + suffix).encode() for r in wanted]
    for control in node._controls:
        if control.span is Span.ONCE:
            inputs.append(b"^" + control.name.encode())
        else:
            inputs += [b"^" + instance_name(control, r, common, run.micro).encode() for r in range(count)]
    return wire.write_node(
        node.name.encode(), node.op.encode(), inputs, node.device.encode(), tails(node, copied=False)
    )


def _running_sum(node: Node, run: ReplicaLayout, common: set[Node]) -> bytes:
    """Encode a sum over all instances: those of each replica are added one by one, and then the replicas."""
    value = node.inputs[0]
    suffix = f":{value.index}" if value.index else ""
    controls = [b"^" + control.name.encode() for control in node.controls]
    kept = {key: raw for key, raw in node._attrs.items() if key != "N" and isinstance(raw, bytes)}
    parts: list[bytes] = []
    totals: list[bytes] = []
    for instance, device in enumerate(run.of(value.node)):
        term = (instance_name(value.node, instance, common, run.micro) + suffix).encode()
        if instance % run.micro == 0:
            totals.append(term)
            continue
        name = sum_name(node, instance, len(run), run.micro).encode()
        place = (node.device if name == node.name.encode() else device).encode()
        inputs = [totals[-1], term, *controls]
        parts.append(wire.write_node(name, b"AddV2", inputs, place, wire.write_attrs(kept)))
        totals[-1] = name
    if len(totals) > 1:
        attrs = wire.write_attrs(kept | {"N": encode("int", len(totals))})
        inputs = [*totals, *controls]
        parts.append(wire.write_node(node.name.encode(), b"AddN", inputs, node.device.encode(), attrs))
    return b"".join(parts)
