"""Choose the device of each node: the one that it asks for, or the host where a GPU has no kernel for it.

    global_step: int64 @GPU:0          stays
    words = AsString(loss) @GPU:0      CPU:0: no kernel
    table @GPU:0 ── LookupTableFind    CPU:0, both: what reads a resource is beside it

This follows TensorFlow's placer with soft placement: nodes that share a resource, or ask for colocation, form a group,
which is placed where all members have a kernel. Of nodes that ask for no device, those without inputs follow their
readers, and those that measure a value follow the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autograph_rewrite.analysis.networks import groups
from autograph_rewrite.ir.graph import PASS_ATTR, Node, Value
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.kernels import ALWAYS_ON_HOST, Kernel, find_kernel
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.variable_ops import is_handle
from autograph_rewrite.ops.traits import has

ACCELERATOR = "GPU"
"""The kind of device whose kernels are known."""
DEFAULT = "/device:GPU:0"
"""Where TensorFlow puts nodes that ask for no device."""
HOST = "/device:CPU:0"
_OF_DATA = re.compile(r"Dataset|Iterator")
"""Ops that may use a resource of another device."""


@dataclass(frozen=True)
class Placed:
    """Where a node runs.

    Attributes:
        kernel: the accelerator's kernel for it; None on the host.
    """

    device: str
    kernel: Kernel | None = None

    def makes_on_host(self, index: int) -> bool:
        """Return whether a result is in the memory of the host."""
        return self.kernel is None or self.kernel.outputs[index]

    def takes_on_host(self, index: int) -> bool:
        """Return whether an operand is read from the memory of the host."""
        return self.kernel is None or self.kernel.inputs[index]


def is_accelerator(device: str) -> bool:
    """Return whether a device is one whose kernels are known."""
    spec = device_specs.parse(device)
    return spec is not None and spec.kind == ACCELERATOR


def host_of(device: str) -> str:
    """Return the CPU in the process of a device."""
    return device_specs.process(device) + HOST


def kernel_of(node: Node) -> Kernel | None:
    """Return the accelerator's kernel for a node."""
    return find_kernel(node.op, node.attrs)


def has_kernel(devices: Iterable[str], op: str, **types: int) -> bool:
    """Return whether all of some devices can run an op; devices other than GPUs are taken to have every kernel.

    Args:
        types: the op's type attributes that differ from the defaults.
    """
    attrs = {name: encode("type", dtype) for name, dtype in types.items()}
    return not any(map(is_accelerator, devices)) or find_kernel(op, attrs) is not None


def place(
    nodes: Sequence[Node], requested: Callable[[Node], str], elsewhere: Collection[Node] = ()
) -> dict[Node, Placed]:
    """Return where each node runs.

    Args:
        nodes: producers first.
        requested: the device that a node asks for; empty for none.
        elsewhere: nodes that are known to be on the host, such as inputs and captured integers.
    """
    groups = _groups(nodes)
    grouped = {node for group in groups for node in group}
    alone = [node for node in nodes if node not in grouped]
    placed: dict[Node, Placed] = {}
    for group in (*groups, *([node] for node in alone)):
        placed.update(_together(group, requested, elsewhere))
    free = [node for node in alone if not requested(node) and node not in elsewhere]
    for node in free:
        if has(node.op, "measures") and node.inputs and node.inputs[0].node in placed:
            placed[node] = _at(node, placed[node.inputs[0].node].device) or placed[node]
    for node in free:
        readers = {placed[use.node].device for value in node.read_outputs for use in value.uses if use.node in placed}
        if not node.inputs and len(readers) == 1:
            placed[node] = _at(node, readers.pop()) or placed[node]
    return placed


def _at(node: Node, device: str) -> Placed | None:
    """Return a node as placed on a device; None where that has no kernel for it."""
    if not is_accelerator(device):
        return Placed(device)
    kernel = kernel_of(node)
    return None if kernel is None else Placed(device, kernel)


def _groups(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return groups of nodes that must share a device; nodes that are bound to no other are left out."""
    known = {node.name: node for node in nodes}
    bound: dict[tuple[Node, Node], None] = {}
    for node in known.values():
        for value in node.inputs:
            if is_handle(value) and value.node.name in known and not _OF_DATA.search(node.op):
                bound[value.node, node] = None
        for label in node.attr("_class") or ():
            other = known.get(label.decode().removeprefix("loc:@"))
            if other is not None and other is not node:
                bound[other, node] = None
    together = {node for pair in bound for node in pair}
    return groups([node for node in known.values() if node in together], bound)


def _together(
    group: Sequence[Node], requested: Callable[[Node], str], elsewhere: Collection[Node]
) -> Mapping[Node, Placed]:
    """Return where the nodes of a group run: where its variable is, whatever its initial value asks for."""
    owners_first = sorted(group, key=lambda node: not has(node.op, "variables"))
    wanted = next(filter(None, map(requested, owners_first)), DEFAULT)
    if not is_accelerator(wanted):
        return dict.fromkeys(group, Placed(wanted))
    kernels = {node: kernel_of(node) for node in group}
    if any(kernel is None or node in elsewhere for node, kernel in kernels.items()):
        return dict.fromkeys(group, Placed(host_of(wanted)))
    return {node: Placed(wanted, kernel) for node, kernel in kernels.items()}


# Nodes that run on the host although replicas run on accelerators: ops without a kernel there, sizes, cuts of inputs.
#
#     x (fed) ─► StridedSlice ═► replica's device             each device gets its block, not the whole batch
#     Shape(h) ─► GatherV2 ─► Prod ─► Reshape's shape         sizes are in host memory, and stay there
#     Const(int64) ─► SplitV's sizes                          a constant is where its readers want it
#
# A size that an accelerator computed would be copied there and back, and the step would wait for it.


_DISCRETE = dtypes.INTEGER | {dtypes.BOOL}
_SMALL = 64
"""Elements of a constant that counts as a size."""


def host_nodes(
    order: Sequence[Node], requested: Callable[[Node], str], fed: Collection[Node], inside: Collection[Node]
) -> set[Node]:
    """Return the nodes that run on the host instead of on the accelerator that they ask for.

    Args:
        order: the folded graph, producers first.
        requested: the device of a node, or of its first instance.
        fed: inputs that the program feeds.
        inside: nodes of loops, which stay together, except that values on the host are measured on the host.
    """
    if not any(is_accelerator(requested(node)) for node in order):
        return set()
    placed = place(order, requested, fed)
    host = {node for node in order if is_accelerator(requested(node)) and not is_accelerator(placed[node].device)}
    host |= {node for node in order if node in inside and has(node.op, "sizes") and node.inputs[0].node in host}
    free = [node for node in order if node in placed and is_accelerator(placed[node].device) and node not in inside]
    host |= _cuts(free, host)
    host |= _sizes(free, placed, host)
    return host | _constants(free, placed, host)


def _cuts(free: Iterable[Node], host: Collection[Node]) -> set[Node]:
    """Return the nodes by which passes cut blocks out of inputs, and the nodes that measure these blocks."""
    found: set[Node] = set()
    for node in free:
        made = PASS_ATTR in node.attrs and (has(node.op, "cuts") or node.op == "Identity")
        if (made or has(node.op, "sizes")) and all(v.node in host or v.node in found for v in node.inputs[:1]):
            is_input = bool(node.inputs) and not has(node.inputs[0].node.op, "routes")
            found |= {node} if is_input else set()
    return found


def _sizes(free: Iterable[Node], placed: dict[Node, Placed], host: Collection[Node]) -> set[Node]:
    """Return nodes that make integers of integers in host memory: arithmetic on sizes, and indices that passes make."""
    sizes: set[Node] = set()
    moved: set[Node] = set()
    for node in free:
        kernel = placed[node].kernel
        if kernel is None or not node.output_dtypes or not all(dtype in _DISCRETE for dtype in node.output_dtypes):
            continue
        if has(node.op, "sizes") or _is_small(node):
            sizes.add(node)
        elif node.inputs and is_pure(node.op):
            is_size = not has(node.op, "enlarges_by_value") and all(value.node in sizes for value in node.inputs)
            sizes |= {node} if is_size else set()
            is_near = (
                PASS_ATTR in node.attrs
                and not has(node.op, "enlarges")
                and all(
                    value.node in host
                    or value.node in moved
                    or _is_small(value.node)
                    or placed[value.node].makes_on_host(value.index)
                    for value in node.inputs
                )
            )
            moved |= {node} if (is_size or is_near) and not kernel.on_host else set()
    return moved


def _is_small(node: Node) -> bool:
    value = node.attr("value") if node.op == "Const" else None
    return isinstance(value, np.ndarray | np.generic) and value.size <= _SMALL


def _constants(free: Iterable[Node], placed: dict[Node, Placed], host: Collection[Node]) -> set[Node]:
    """Return the constants that all readers read from host memory.

    A constant of 32-bit integers is in host memory also on a GPU: it counts only if all its readers are on the host.
    """
    found = set()
    for node in free:
        kernel = placed[node].kernel
        if node.op != "Const" or kernel is None:
            continue
        uses = [use for value in node.read_outputs for use in value.uses if use.node in placed]
        is_there = all(use.node in host or not is_accelerator(placed[use.node].device) for use in uses)
        is_wanted = all(use.node in host or placed[use.node].takes_on_host(use.index) for use in uses)
        if uses and (is_there or (is_wanted and not kernel.on_host)):
            found.add(node)
    return found


# Which tensors cross between the memory of an accelerator and that of its host in each step.
#
#     x (fed) ═════► MatMul @GPU:0                    to the device
#     loss @GPU:0 ═════► fetch                        to the host
#     dims: int32 ─────► Reshape @GPU:0               host memory on both ends: nothing moves
#     Prod: int32 @GPU:0 ═════► Reshape's shape       a size that was computed on the device
#
# TensorFlow sends a tensor once to each memory where it is read. Transfers between accelerators, or between processes,
# are communication, and not counted here.


@dataclass(frozen=True)
class Crossing:
    """A tensor that moves between a host and an accelerator.

    Attributes:
        device: the accelerator at one end.
        readers: the nodes that read it at the other end; empty: only the program that runs the step does.
    """

    value: Value
    device: str
    to_host: bool
    readers: tuple[Node, ...]


def crossings(
    step: Collection[Node], placed: Mapping[Node, Placed], fed: Collection[Node], fetched: Iterable[Value]
) -> list[Crossing]:
    """Return the tensors that cross in each step, in the order of the nodes.

    Args:
        step: the nodes that a step runs.
        fed: inputs, which the program feeds from host memory.
        fetched: values that the program gets back in host memory.
    """
    wanted = set(fetched)
    found: dict[tuple[Value, str], list[Node]] = {}
    for node in step:
        for value in node.read_outputs:
            for reader, target in _readers(value, step, placed, value in wanted):
                source = "" if node in fed else _memory(placed[node], placed[node].makes_on_host(value.index))
                source = source or host_of(target or placed[node].device)
                target = target or host_of(source)
                if _crosses(source, target):
                    found.setdefault((value, target), []).extend([reader] if reader is not None else [])
    return [_crossing(value, target, readers, placed) for (value, target), readers in found.items()]


def _crossing(value: Value, target: str, readers: list[Node], placed: Mapping[Node, Placed]) -> Crossing:
    to_host = not is_accelerator(target)
    return Crossing(value, placed[value.node].device if to_host else target, to_host, tuple(readers))


def _readers(
    value: Value, step: Collection[Node], placed: Mapping[Node, Placed], fetched: bool
) -> Iterator[tuple[Node | None, str]]:
    """Yield each reader of a value (None: the program), and its memory; empty: the host of the value's device."""
    if value.dtype in ALWAYS_ON_HOST or value.dtype > dtypes.REF_OFFSET:
        return
    for use in value.uses:
        if use.node in step:
            yield use.node, _memory(placed[use.node], placed[use.node].takes_on_host(use.index))
    if fetched:
        yield None, ""


def _memory(placed: Placed, on_host: bool) -> str:
    """Return the name of the device whose memory is meant: the host's CPU, or the device itself."""
    return host_of(placed.device) if on_host else placed.device


def _crosses(source: str, target: str) -> bool:
    same_process = device_specs.process(source) == device_specs.process(target)
    return same_process and is_accelerator(source) != is_accelerator(target)
