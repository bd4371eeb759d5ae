"""Which device each node gets: the one that it asks for, or the host where a GPU has no kernel for it.

    global_step: int64 @GPU:0          stays
    words = AsString(loss) @GPU:0      CPU:0: no kernel
    table @GPU:0 ── LookupTableFind    CPU:0, both: what reads a resource is beside it

As TensorFlow's placer does it with soft placement: nodes that share a resource, or ask to be together, are one group,
which goes where all its members have a kernel. Of nodes that ask for nothing, those without inputs go to their readers,
and sizes are taken where the value is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autograph_rewrite.analysis.networks import groups
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.kernels import Kernel, find_kernel
from autograph_rewrite.ir.variable_ops import is_handle
from autograph_rewrite.ops.traits import has

ACCELERATOR = "GPU"
"""The kind of device whose kernels are known."""
DEFAULT = "/device:GPU:0"
"""Where TensorFlow puts what asks for no device."""
HOST = "/device:CPU:0"
_OF_DATA = re.compile(r"Dataset|Iterator")
"""Ops that may use a resource of another device."""


@dataclass(frozen=True)
class Placed:
    """Where a node runs.

    Attributes:
        device: its name.
        kernel: what an accelerator runs it with; None on the host.
        cause: a node that keeps it from the accelerator that it asks for: itself, or one of its group.
    """

    device: str
    kernel: Kernel | None = None
    cause: Node | None = None


def is_accelerator(device: str) -> bool:
    """Return whether a device is one whose kernels are known."""
    spec = device_specs.parse(device)
    return spec is not None and spec.kind == ACCELERATOR


def host_of(device: str) -> str:
    """Return the CPU beside a device."""
    return device_specs.process(device) + HOST


def kernel_of(node: Node) -> Kernel | None:
    """Return what an accelerator runs a node with."""
    return find_kernel(node.op, node.attrs)


def has_kernel(devices: Iterable[str], op: str, **types: int) -> bool:
    """Return whether all of some devices can run an op; what a kind of device other than GPUs can is not known.

    Args:
        devices: their names.
        op: type of the op.
        types: those of its attributes that are no default.
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
        elsewhere: nodes that have been found to be on the host, such as inputs and captured integers.
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
    """Return the nodes that must be on one device, as lists; those that are bound to no other are left out."""
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
    without = next((node for node, kernel in kernels.items() if kernel is None or node in elsewhere), None)
    if without is None:
        return {node: Placed(wanted, kernel) for node, kernel in kernels.items()}
    return {node: Placed(host_of(wanted), None, node if kernels[node] is None else without) for node in group}
