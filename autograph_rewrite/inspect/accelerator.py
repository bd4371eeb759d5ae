"""Find how a graph uses GPUs, without having one: nodes that run on the host, and tensors copied in every step.

The answer follows from the kernels that TensorFlow's GPU build registers (`ir.types.kernels`). A node without a device
counts as on GPU:0. If the original graph is given, too, the nodes and copies that the rewrite added are counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from autograph_rewrite.analysis.accelerator import Crossing, Placed, crossings, is_accelerator, kernel_of, place
from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.diagnostics.amounts import several, size
from autograph_rewrite.inspect.communication import origin_of
from autograph_rewrite.inspect.graph_source import Source, as_item
from autograph_rewrite.inspect.summary import flattened
from autograph_rewrite.inspect.table import drawn, table
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import ancestors, grouped, topological_order
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.normalize.normalize import roots
from autograph_rewrite.ops.facts.concrete_sizes import EXAMPLES
from autograph_rewrite.ops.rules.inference import Shapes
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph

SIZE = "a size that is computed with: of the batch, as a number"
INDICES = "indices, worked out on the host of inputs or sizes there"
INTEGERS = "integers of 32 bits, which TensorFlow reshapes and compares on the host only"
SERVER = "the plan keeps variables on the host"


@dataclass(frozen=True)
class HostNode:
    """Nodes of one op and type for which an accelerator has no kernel.

    Attributes:
        types: of their operands and results.
        nodes: their names, without the replica.
        count: over all replicas.
        added: how many of them the original graph does not have.
    """

    op: str
    types: str
    nodes: tuple[str, ...]
    count: int
    added: int


@dataclass(frozen=True)
class Moved:
    """A value that is copied between host and device, over all replicas.

    Attributes:
        value: its name without the replica.
        op: its producer's op type.
        to: "host" or "device".
        readers: the op types that read it there.
        count: copies per step.
        bytes: of all copies.
        added: how many of the copies the original graph does not have.
        added_bytes: bytes of the added copies.
        why: the reason for the added copies.
    """

    value: str
    op: str
    dtype: str
    to: str
    readers: tuple[str, ...]
    count: int
    bytes: int
    added: int
    added_bytes: int
    why: str


@dataclass(frozen=True)
class AcceleratorUse:
    """The result of `inspect --accelerator`.

    Attributes:
        devices: the accelerators that nodes are on.
        host_nodes: nodes without a kernel there.
        moved: values that are copied.
        seconds: time of the copies on the busiest link.
        batch: the assumed size of an unknown first dimension.
        compared: whether an original graph was given.
    """

    devices: tuple[str, ...]
    host_nodes: tuple[HostNode, ...]
    moved: tuple[Moved, ...]
    seconds: float
    batch: int
    compared: bool

    @property
    def added(self) -> tuple[int, int]:
        """How many nodes without a kernel, and how many copies, the original graph does not have."""
        return sum(one.added for one in self.host_nodes), sum(one.added for one in self.moved)

    def data(self) -> dict[str, Any]:
        """Return it as plain data; with the added ones only if an original was given."""
        nodes, moved = ([asdict(one) for one in ones] for ones in (self.host_nodes, self.moved))
        for one in () if self.compared else (*nodes, *moved):
            one.pop("added")
            one.pop("added_bytes", None)
            one.pop("why", None)
        return {
            "devices": list(self.devices),
            "examples": self.batch,
            "without_kernel": nodes,
            "crossings": moved,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        extra = ("#added",) if self.compared else ()
        nodes = [
            (one.op, one.types, one.nodes[0], one.count, *((one.added,) if extra else ())) for one in self.host_nodes
        ]
        moved = [
            (
                one.value, one.op, one.dtype, one.to, ", ".join(one.readers) or "the program", one.count, one.bytes,
                *((one.added,) if extra else ()),
            )
            for one in self.moved
        ]  # fmt: skip
        total = sum(one.count for one in self.moved)
        nbytes = sum(one.bytes for one in self.moved)
        parts = [
            table("no kernel on a GPU", ("op", "types", "for example", "#nodes", *extra), nodes),
            table("host and device", ("value", "op", "type", "to", "read by", "#crossings", "#bytes", *extra), moved),
        ]
        where = ", ".join(map(device_specs.short, self.devices)) or "no GPU"
        text = f"{where}: {several(total, 'crossing')}, {size(nbytes)}, {self.seconds * 1e6:,.0f} us of a link per step"
        return drawn(*parts) + f"{text} of {self.batch:,} examples\n"


def accelerator_use(source: Source, before: Source | None = None, batch: int | None = None) -> AcceleratorUse:
    """Return how a graph uses GPUs.

    Args:
        source: an original graph, or one that was rewritten to GPUs.
        before: its original, to find the added nodes and copies.
        batch: the assumed size of an unknown first dimension; default: 32.
    """
    examples = batch or EXAMPLES
    found = _PlacedStep(as_item(source))
    base = _PlacedStep(as_item(before)) if before is not None else None
    return AcceleratorUse(
        tuple(dict.fromkeys(placed.device for placed in found.placed.values() if is_accelerator(placed.device))),
        tuple(_host_nodes(found, base)),
        tuple(_moved(found, base, examples)),
        _seconds(found, examples),
        examples,
        base is not None,
    )


class _PlacedStep:
    """One step of an original or rewritten item, with the device of each node."""

    def __init__(self, item: TrainingGraph) -> None:
        item = flattened(item) if item.report is None else item
        graph = item.graph
        order = topological_order(graph)
        self.fed = frozenset(graph.nodes[info.tensor.partition(":")[0]] for info in item.inputs.values())
        self.placed: Mapping[Node, Placed] = place(order, lambda node: node.device, self.fed)
        run = ancestors(roots(item, graph))
        self.nodes = dict.fromkeys(node for node in order if node in run)
        fetched = [graph.value(info.tensor) for info in item.outputs.values()]
        self.crossings = crossings(self.nodes, self.placed, self.fed, fetched)
        self.shapes = Shapes()
        self.instances = max(1, len({_prefix(node) for node in self.nodes} - {""}))

    def without_kernel(self) -> list[Node]:
        """Return the nodes of the step that no accelerator can run."""
        nodes = (node for node in self.nodes if node not in self.fed and not has(node.op, "routes"))
        return [node for node in nodes if kernel_of(node) is None]

    @cached_property
    def keeps_variables(self) -> bool:
        """Whether the host holds variables that an accelerator could hold."""
        handles = (node for node in self.nodes if has(node.op, "variables") and kernel_of(node) is not None)
        return any(not is_accelerator(self.placed[node].device) for node in handles)

    def reason(self, one: Crossing) -> str:
        """Return why a rewrite added a copy; "" if no reason is known."""
        is_discrete = one.value.dtype in dtypes.INTEGER or one.value.dtype == dtypes.BOOL
        if is_discrete and not one.to_host:
            return SIZE if self.shapes(one.value) == () else INDICES
        if one.value.dtype == dtypes.INT32:
            return INTEGERS
        return SERVER if self.keeps_variables else ""

    def nbytes(self, value: Value, batch: int) -> int:
        """Return the bytes of a value whose first unknown dimension counts examples.

        Args:
            batch: examples of all replicas together.
        """
        shape, batch = self.shapes(value), -(-batch // self.instances) if _prefix(value.node) else batch
        unknown = [1] * (0 if isinstance(shape, str) else sum(not isinstance(dim, int) for dim in shape))
        unknown[:1] = [batch] if unknown else []
        known = () if isinstance(shape, str) else (dim for dim in shape if isinstance(dim, int))
        return math.prod((*known, *unknown)) * dtypes.width(value.dtype)


def _kind(node: Node) -> tuple[str, str]:
    given, made = ([dtypes.dtype_name(dtype) for dtype in side] for side in (node.input_dtypes, node.output_dtypes))
    return node.op, f"{', '.join(dict.fromkeys(given))} -> {', '.join(dict.fromkeys(made))}"


def _host_nodes(found: _PlacedStep, base: _PlacedStep | None) -> list[HostNode]:
    usual = Counter(_node_key(node) for node in base.without_kernel()) if base is not None else Counter()
    groups = grouped((_kind(node), node) for node in found.without_kernel())
    return [
        HostNode(
            *kind,
            tuple(dict.fromkeys(common_name(node.name) for node in nodes)),
            len(nodes),
            sum(_node_key(node) not in usual for node in nodes),
        )
        for kind, nodes in groups.items()
    ]


def _node_key(node: Node) -> tuple[str, str]:
    return origin_of(node), node.op


def _moved(found: _PlacedStep, base: _PlacedStep | None, batch: int) -> list[Moved]:
    usual = Counter(_origin(one) for one in base.crossings) if base is not None else Counter()
    groups = grouped(((common_name(one.value.name), one.to_host), one) for one in found.crossings)
    seen: Counter[tuple[tuple[str, bool], tuple[str, str]]] = Counter()
    result = []
    for (name, to_host), group in groups.items():
        value, extra = group[0].value, []
        for one in group:
            place = _origin(one), (_prefix(one.value.node), one.device)  # each instance may have the original's copies
            seen[place] += 1
            extra += [one] if seen[place] > usual[place[0]] else []
        nbytes, added = (sum(found.nbytes(one.value, batch) for one in ones) for ones in (group, extra))
        if base is not None and not _prefix(value.node):  # a value that exists once is copied whole to all devices
            added = max(added, nbytes - usual[_origin(group[0])] * found.nbytes(value, batch))
        moved = Moved(
            value=name,
            op=value.node.op,
            dtype=dtypes.dtype_name(value.dtype),
            to="host" if to_host else "device",
            readers=tuple(sorted({reader.op for one in group for reader in one.readers})),
            count=len(group),
            bytes=nbytes,
            added=len(extra),
            added_bytes=added,
            why=found.reason(group[0]) if extra else "",
        )
        result.append(moved)
    return result


def _origin(one: Crossing) -> tuple[str, bool]:
    """Return the key of a crossing in the original: the value's node and the direction."""
    return origin_of(one.value.node), one.to_host


def _prefix(node: Node) -> str:
    """Return the prefix of an instance's name: its replica and micro-batch."""
    return node.name.removesuffix(common_name(node.name))


def _seconds(found: _PlacedStep, batch: int) -> float:
    """Return how long the busiest link between a host and an accelerator is used."""
    busy: Counter[str] = Counter()
    link = Machine().host
    for one in found.crossings:
        busy[one.device] += link.time(found.nbytes(one.value, batch))  # type: ignore[assignment]
    return max(busy.values(), default=0.0)
