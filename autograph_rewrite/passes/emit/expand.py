"""Write the folded graph out as a GraphDef: one copy of each EACH node per replica, on its device.

    folded     %dw = MatMul(%x, %dy)  each
    expanded   replica_0/dw = MatMul(replica_0/x, replica_0/dy) @ device 0
               replica_1/dw = MatMul(replica_1/x, replica_1/dy) @ device 1

Replicas differ in name prefix and device only, so their bytes are written once, with placeholders that are then
replaced for each replica: the cost hardly grows with the number of replicas. Nodes that hold the same value on every
replica keep their name on replica 0, so variables keep their names.

A sum over micro-batches is written as a running sum, so that each gradient is added, and freed, once it is computed:

    folded     dw/add_n = AddN(all(%dw))
    expanded   dw/add_n/with_1 = AddV2(replica_0/micro_0/dw, replica_0/micro_1/dw)
               dw/add_n = AddV2(dw/add_n/with_1, replica_0/micro_2/dw)

A sum over very many replicas adds sums of at most 200 values, and a gather likewise (`in_chunks`).
The control inputs of a ConcatV2 of three or more values move to an Identity of its first operand: where TensorFlow's
constant folding joins operands of the node, it counts control inputs among them, and a session of several processes
fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.format.serde import frame
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH, MODEL, ONCE, PER_MODEL, PER_REPLICA, REPLICA, PerInstance, Select, prefix
from autograph_rewrite.ir.types import wire
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.verify.reshards import unlowered
from autograph_rewrite.passes.base.instance_order import is_running_sum
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.merge_instances import Merged
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout, instance_name, sum_name

_MARK = wire.delimited(wire.ATTR, wire.delimited(1, PASS_ATTR.encode()) + wire.delimited(2, b"\x12\x06expand"))


class Instance(NamedTuple):
    """The name prefixes and the device of an instance.

    Nodes with one common value and nodes whose instances differ (`own`) have different prefixes. So have nodes that run
    per instance, once on each replica, and once for all replicas on each device of a model axis.
    """

    common: bytes
    own: bytes
    replica_common: bytes
    replica_own: bytes
    model_common: bytes
    model_own: bytes
    device: bytes


class _Record(NamedTuple):
    """The encoding that all instances of an EACH node share: kind of prefix and rest of each name, fixed bytes."""

    own: int
    name: bytes
    op: bytes
    inputs: tuple[int, ...]  # places in `_Records.references`
    device: bytes | None  # encoded, if it is not that of the replica
    tail: Tail


_ONCE, _COMMON, _OWN, _REPLICA_COMMON, _REPLICA_OWN, _MODEL_COMMON, _MODEL_OWN = range(7)  # kinds of name prefix


def expand(graph: Graph, run: ReplicaLayout, common: set[Node]) -> bytes:
    """Return the GraphDef bytes of a folded graph.

    Args:
        run: the layout of its instances.
        common: the EACH nodes that hold the same value on every replica.

    Raises:
        GraphError: the result is over 2 GiB.
    """
    tails = _Tails()
    parts: list[bytes] = []
    special: list[list[Node]] = [[] for _ in run.cells]
    alike: list[tuple[list[Node], list[Node]]] = [([], []) for _ in run.cells]
    for node in graph:
        if node.span != EACH or _reads_every(node):
            for i in range(run.mesh.count(node.span)):
                waits = _waits(run, i, common) if node in run.order.roots else {}
                parts.append(_one_by_one(node, i, run, common, tails, waits.get(node, ())))
        elif node in run.order.roots or node in run.order.sums or _differs(node):
            special[run.cell(node)].append(node)
        else:
            alike[run.cell(node)][node not in common].append(node)
    for devices, of_cell in zip(run.cells, alike, strict=True):
        instances = _instances(devices, run)
        for nodes in of_cell:
            parts += _copies(_Records(common, nodes, tails, run), instances)
    cells = [
        (_instances(devices, run), nodes, _Records(common, nodes, tails, run))
        for devices, nodes in zip(run.cells, special, strict=True)
    ]
    for i in range(len(run)):
        waits = _waits(run, i, common)
        for instances, nodes, records in cells:
            parts.append(_block(_Records(common, nodes, tails, run, waits) if waits else records, instances[i], i))
    return frame(parts, graph)


def _reads_every(node: Node) -> bool:
    """Return whether instances read values of all others, so that they do not share a template."""
    return any(select in (Select.EVERY, Select.OWN) for select in node.selects.values())


def _differs(node: Node) -> bool:
    return PerInstance in map(type, node._attrs.values())


def _instances(devices: Sequence[str], run: ReplicaLayout) -> list[Instance]:
    found, micro = [], run.micro
    for i, device in enumerate(devices):
        own, replica = prefix(i, micro).encode(), prefix(i // micro).encode()
        at = run.mesh.coordinates(EACH, i).get(MODEL, 0)
        model = prefix(at).encode() if MODEL in run.mesh.along else b""
        common = own if i else b"", replica if i >= micro else b"", model if at else b""
        found.append(Instance(common[0], own, common[1], replica, common[2], model, device.encode()))
    return found


def _waits(run: ReplicaLayout, instance: int, common: set[Node]) -> dict[Node, list[str]]:
    """Return the names that one instance of each ordered node waits for, in addition to its controls."""
    waits: dict[Node, list[str]] = {}
    own = instance % run.micro
    for node, by_micro in run.order.roots.items():
        wait = by_micro[own]
        if wait is not None:
            waits[node] = [instance_name(wait.node, instance - own + wait.micro, common, run.micro)]
    for gate, sums in run.order.sums.items():
        if own:
            waits[gate] = [sum_name(total, instance, run, common) for total in sums]
        else:
            waits[gate] = [instance_name(total.inputs[0].node, instance, common, run.micro) for total in sums]
    return waits


Tail = bytes | tuple[bytes, ...]
"""The bytes after the device in an encoded node: one for all instances, or one for each."""


class _Tails:
    """Encodes attributes; equal ones, which are most, only once."""

    def __init__(self) -> None:
        self._single: dict[tuple[str, bytes], bytes] = {}
        self._joined: dict[tuple[object, ...], Tail] = {}

    def __call__(self, node: Node, *, copied: bool) -> Tail:
        """Return the encoded attributes and uninterpreted fields of a node; where instances differ, of each.

        Colocation is dropped: every node has a device. So are shapes, which were those of the whole batch.
        """
        attrs = [item for item in node._attrs.items() if item[0] not in DROPPED]
        key = (copied, node.rest, *attrs)
        tail = self._joined.get(key)
        if tail is None:
            tail = self._joined[key] = self._encode(node, attrs, copied)
        return tail

    def _encode(self, node: Node, attrs: Iterable[tuple[str, bytes | PerInstance]], copied: bool) -> Tail:
        parts: list[Tail] = [
            tuple([self._attr(key, one) for one in raw.raws]) if isinstance(raw, PerInstance) else self._attr(key, raw)
            for key, raw in attrs
        ]
        if copied and PASS_ATTR not in node._attrs:
            parts.append(_MARK)
        parts.append(node.rest)
        count = max([len(part) for part in parts if isinstance(part, tuple)], default=0)
        each = [b"".join([_of(part, i) for part in parts]) for i in range(max(count, 1))]
        return tuple(each) if count else each[0]

    def _attr(self, key: str, raw: bytes) -> bytes:
        encoded = self._single.get((key, raw))
        if encoded is None:
            encoded = self._single[key, raw] = wire.write_attrs({key: raw})
        return encoded


def _of(tail: Tail, instance: int) -> bytes:
    return tail[instance] if isinstance(tail, tuple) else tail


WAITS = b"/waits"
"""Suffix of the Identity that has the control inputs of a ConcatV2."""
_FEW = 3
"""Inputs of a ConcatV2 of two values and its axis: constant folding joins none of them."""


class _Records:
    """Nodes that are encoded together, with their inputs; the name of a value is encoded once for all its readers.

    Args:
        common: the nodes that hold the same value on every replica.
        nodes: the EACH nodes to encode.
        waits: full names that nodes wait for in addition to their controls.
    """

    def __init__(
        self,
        common: set[Node],
        nodes: Iterable[Node],
        tails: _Tails,
        run: ReplicaLayout,
        waits: Mapping[Node, list[str]] = MappingProxyType({}),
    ) -> None:
        self.references: list[tuple[int, bytes, bytes]] = []  # kind of prefix; mark (`^` or nothing); rest of the name
        self._common = common
        self._run = run
        self._places: dict[Value | Node | str, int] = {}
        self._waits = waits
        self.all = [one for node in nodes for one in self._made(node, tails(node, copied=True))]
        kinds = {reference[0] for reference in self.references} | {record[0] for record in self.all}
        self.uses_common = _COMMON in kinds

    def _made(self, node: Node, tail: Tail) -> Iterator[_Record]:
        places = self._places
        inputs = [places[value] if value in places else self._add(value) for value in node._inputs]
        controls = [places[control] if control in places else self._add(control) for control in node._controls]
        if node in self._waits:
            controls += [places[name] if name in places else self._add(name) for name in self._waits[node]]
        kind, name = _kind(node, self._common), node.name.encode()
        shared = self._run.shared(node)
        device = None if shared is None else _device(shared.encode())
        if controls and _is_miscounted(node, len(inputs)):
            waits, first = name + WAITS, (inputs[0], *controls)
            yield _Record(kind, waits, _op("Identity"), first, device, _type_of(node) + _MARK)
            self.references.append((kind, b"", waits))
            inputs[0], controls = len(self.references) - 1, []
        yield _Record(kind, name, _op(node.op), (*inputs, *controls), device, tail)

    def _add(self, read: Value | Node | str) -> int:
        self._places[read] = place = len(self.references)
        if isinstance(read, str):
            self.references.append((_ONCE, b"^", read.encode()))
        elif isinstance(read, Node):
            self.references.append((_kind(read, self._common), b"^", read.name.encode()))
        else:
            self.references.append((_kind(read.node, self._common), b"", read.name.encode()))
        return place


@cache
def _op(name: str) -> bytes:
    return b"\x12" + wire.varint(len(name)) + name.encode()


def _is_miscounted(node: Node, count: int) -> bool:
    """Return whether TensorFlow may count the control inputs of a node among its `count` operands."""
    return node.op == "ConcatV2" and count > _FEW


def _type_of(node: Node) -> bytes:
    return wire.write_attrs({"T": encode("type", node.attr("T"))})


_KINDS = {
    ONCE: (_ONCE, _ONCE),
    PER_REPLICA: (_REPLICA_OWN, _REPLICA_COMMON),
    EACH: (_OWN, _COMMON),
    PER_MODEL: (_MODEL_OWN, _MODEL_COMMON),
}


def _kind(node: Node, common: set[Node]) -> int:
    return _KINDS[node.span][node in common]


def _copies(records: _Records, instances: Sequence[Instance]) -> list[bytes]:
    """Encode all instances from one template per length of name prefixes and device."""
    parts: list[bytes] = []
    templates: dict[tuple[int, ...], tuple[Instance, list[bytes]]] = {}
    for instance in instances:
        if records.uses_common and not instance.common:  # replica 0 of common nodes has no prefix to replace
            parts.append(_block(records, instance))
            continue
        key = tuple(map(len, instance[1:]))
        if key not in templates:
            own, *others = map(_token, ("name", "replica", "replica", "model", "model", "device"), key)
            token = Instance(own, own, *others)
            templates[key] = token, _block(records, token).split(own) if _is_clean(records, token) else []
        token, pieces = templates[key]
        if not pieces:
            parts.append(_block(records, instance))
            continue
        block = instance.own.join(pieces)  # in a third of the time of `replace`; here `common` is `own`
        for mark, text in zip(token[2:], instance[2:], strict=True):
            block = block.replace(mark, text) if mark else block
        parts.append(block)
    return parts


def _token(what: str, length: int) -> bytes:
    """Return bytes that no name can contain (they are not UTF-8), of the length of what will replace them."""
    if not length:
        return b""
    seed = hashlib.sha256(what.encode()).digest()
    return bytes(0x80 | byte & 0x3F for byte in (seed * (length // len(seed) + 1))[:length])


def _is_clean(records: _Records, token: Instance) -> bool:
    """Return whether no attribute happens to contain a placeholder."""
    tails = {record.tail for record in records.all}
    return not any(needle in tail for needle in token[1:] if needle for tail in tails)


def _block(records: _Records, instance: Instance, number: int = 0) -> bytes:
    """Encode one instance of each node; `number` selects attributes that differ. The hot loop of rewriting."""
    prefixes = (b"", *instance[:-1])
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
        tail = tail if isinstance(tail, bytes) else tail[number]
        payload = b"".join((b"\n", varint(len(name)), name, op, *[reads[place] for place in inputs], device, tail))
        parts += (b"\n", varint(len(payload)), payload)
    return b"".join(parts)


def _device(name: bytes) -> bytes:
    return b"\x22" + wire.varint(len(name)) + name if name else b""


def _one_by_one(
    node: Node, instance: int, run: ReplicaLayout, common: set[Node], tails: _Tails, waits: Iterable[str] = ()
) -> bytes:
    """Encode an instance of a node that runs once, or once on each replica, or reads several instances of others.

    Args:
        waits: full names that it waits for in addition to its controls.
    """
    if run.micro > 1 and is_running_sum(node):
        return _running_sum(node, instance, run, common)

    def read(producer: Node, select: Select | None) -> list[bytes]:
        wanted = run.mesh.read(node.span, instance, producer.span, select)
        return [instance_name(producer, i, common, run.micro).encode() for i in wanted]

    inputs: list[bytes] = []
    for index, value in enumerate(node._inputs):
        select = node.selects.get(index)
        output = value.index + (run.mesh.coordinates(node.span, instance)[REPLICA] if select is Select.OWN else 0)
        suffix = f":{output}".encode() if output else b""
        inputs += [name + suffix for name in read(value.node, select)]
    controls = [b"^" + name for control in node._controls for name in read(control, Select.ALL)]
    controls += [b"^" + name.encode() for name in waits]
    if node.op == "AddN" and len(inputs) > INPUT_LIMIT and node.span == ONCE:
        return in_chunks(node, (node.name, node.device), inputs, controls)
    if node.op == "ConcatV2" and len(inputs) > INPUT_LIMIT + 1 and node.span == ONCE and node.selects:
        return in_chunks(node, (node.name, node.device), inputs[:-1], controls, axis=inputs[-1:])
    if node.span == ONCE:
        name, device, tail = node.name, node.device, _of(tails(node, copied=False), 0)
    else:
        name, device = instance_name(node, instance, common, run.micro), run.device(node, instance)
        tail = _of(tails(node, copied=True), instance)
    before = b""
    if controls and _is_miscounted(node, len(inputs)):
        own, attrs = name.encode() + WAITS, _type_of(node)
        before = wire.write_node(own, b"Identity", [inputs[0], *controls], device.encode(), attrs)
        inputs, controls = [own, *inputs[1:]], []
    return before + wire.write_node(name.encode(), node.op.encode(), [*inputs, *controls], device.encode(), tail)


def _running_sum(node: Node, replica: int, run: ReplicaLayout, common: set[Node]) -> bytes:
    """Encode a sum over instances: those of each replica are added one by one, and then the replicas, if it runs once.

    Args:
        replica: the one whose micro-batches are added, if the node runs on each replica.
        common: nodes whose instances hold one value.
    """
    value = node.inputs[0]
    suffix = f":{value.index}" if value.index else ""
    controls = [b"^" + control.name.encode() for control in node.controls]
    kept = {key: raw for key, raw in node._attrs.items() if key != "N" and isinstance(raw, bytes)}
    parts: list[bytes] = []
    totals: list[bytes] = []
    for instance in run.mesh.read(node.span, replica, value.node.span, Select.ALL):
        term = (instance_name(value.node, instance, common, run.micro) + suffix).encode()
        if instance % run.micro == 0:
            totals.append(term)
            continue
        name = sum_name(node, instance, run, common).encode()
        is_last = node.span == ONCE and name == node.name.encode()
        place = (node.device if is_last else run.of(value.node)[instance]).encode()
        inputs = [totals[-1], term, *controls]
        parts.append(wire.write_node(name, b"AddV2", inputs, place, wire.write_attrs(kept)))
        totals[-1] = name
    if len(totals) > 1:
        own = instance_name(node, replica, common), node.device if node.span == ONCE else run.device(node, replica)
        parts.append(in_chunks(node, own, totals, controls))
    return b"".join(parts)


# Encode sums and gathers over very many replicas in chunks of at most 200, as TensorFlow's TPU strategy does.
#
# folded     dw/add_n = AddN(all(%dw))
# expanded   dw/add_n/chunk_0 = AddN(200 of them), dw/add_n/chunk_1 = ..., dw/add_n = AddN(the chunks)


INPUT_LIMIT = 200
"""The most values that one AddN, or one ConcatV2 of a gather, reads."""
DROPPED = frozenset(("_class", "_output_shapes"))
"""Attributes that are dropped: every node has a device, and shapes were those of the whole batch."""


def in_chunks(
    node: Node, own: tuple[str, str], terms: Sequence[bytes], controls: Sequence[bytes], axis: Sequence[bytes] = ()
) -> bytes:
    """Encode an AddN or a ConcatV2 that runs once, of any number of values.

    Args:
        node: the AddN or ConcatV2.
        own: the name and the device of the instance.
        terms: names of the values.
        controls: names of the nodes that it waits for.
        axis: of a ConcatV2, the name of its axis.
    """
    own_name, device = own
    op = node.op.encode()
    kept = {key: raw for key, raw in node._attrs.items() if key not in ("N", *DROPPED) and isinstance(raw, bytes)}

    def added(name: str, values: Sequence[bytes]) -> bytes:
        attrs = wire.write_attrs(kept | {"N": encode("int", len(values))})
        return wire.write_node(name.encode(), op, [*values, *axis, *controls], device.encode(), attrs)

    parts: list[bytes] = []
    level = 0
    while len(terms) > INPUT_LIMIT:
        chunks = [terms[at : at + INPUT_LIMIT] for at in range(0, len(terms), INPUT_LIMIT)]
        names = [f"{own_name}/chunk_{level + at}".encode() for at in range(len(chunks))]
        if axis and len(chunks[-1]) == 1:  # a ConcatV2 needs two values at least
            names[-1] = chunks.pop()[0]
        parts += [added(name.decode(), chunk) for name, chunk in zip(names, chunks, strict=False)]
        terms, level = names, level + len(names)
    return b"".join([*parts, added(own_name, terms)])


@dataclass(frozen=True)
class Expanded:
    """The finished graph, as an encoded GraphDef."""

    data: bytes


def _expand(rewrite: Rewrite) -> None:
    """Write the GraphDef, with one copy per replica of the nodes that every replica runs."""
    for node, problem in unlowered(rewrite.graph):
        raise PassError(problem, node=node, hint="run the passes that lower it: 'expand' writes ops of TensorFlow only")
    common = rewrite.get(Merged).common & set(rewrite.graph)
    rewrite.put(Expanded(expand(rewrite.graph, rewrite.get(ReplicaLayout), set(common))))


EXPAND = Pass("expand", _expand, needs=(Merged, ReplicaLayout), gives=(Expanded,))
