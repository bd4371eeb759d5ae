"""What runs on the host though the replicas run on accelerators: what has no kernel there, sizes, cuts of inputs.

    x (fed) ─► StridedSlice ═► replica's device             each device gets its block, not the whole batch
    Shape(h) ─► GatherV2 ─► Prod ─► Reshape's shape         sizes are in host memory, and stay there
    Const(int64) ─► SplitV's sizes                          a constant is where its readers want it

Nothing here decides what is computed. A size that an accelerator computed would go there and come back, and the step
would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from autograph_rewrite.analysis.accelerator.device_placement import Placed, is_accelerator, place
from autograph_rewrite.ir.graph import PASS_ATTR, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ops.traits import has

_DISCRETE = dtypes.INTEGER | {dtypes.BOOL}
_SMALL = 64
"""Elements of a constant that counts as a size."""


def host_nodes(
    order: Sequence[Node], requested: Callable[[Node], str], fed: Collection[Node], inside: Collection[Node]
) -> set[Node]:
    """Return the nodes that run on the host beside the accelerator that they ask for.

    Args:
        order: the folded graph, producers first.
        requested: the device of a node, or of its first instance.
        fed: inputs that a program hands over.
        inside: nodes of loops, which stay together; but what is on the host already is measured there.
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
    """Return what passes cut out of inputs, and what is measured of those."""
    found: set[Node] = set()
    for node in free:
        made = PASS_ATTR in node.attrs and (has(node.op, "cuts") or node.op == "Identity")
        if (made or has(node.op, "sizes")) and all(v.node in host or v.node in found for v in node.inputs[:1]):
            is_input = bool(node.inputs) and not has(node.inputs[0].node.op, "routes")
            found |= {node} if is_input else set()
    return found


def _sizes(free: Iterable[Node], placed: dict[Node, Placed], host: Collection[Node]) -> set[Node]:
    """Return integers made of integers in host memory: arithmetic of sizes, and what passes work out of indices."""
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
                    value.node in host or value.node in moved or _is_small(value.node) or _made_on_host(value, placed)
                    for value in node.inputs
                )
            )
            moved |= {node} if (is_size or is_near) and not kernel.on_host else set()
    return moved


def _made_on_host(value: Value, placed: dict[Node, Placed]) -> bool:
    kernel = placed[value.node].kernel
    return kernel is None or kernel.outputs[value.index]


def _is_small(node: Node) -> bool:
    value = node.attr("value") if node.op == "Const" else None
    return isinstance(value, np.ndarray | np.generic) and value.size <= _SMALL


def _constants(free: Iterable[Node], placed: dict[Node, Placed], host: Collection[Node]) -> set[Node]:
    """Return the constants that all readers want in host memory; of 32-bit integers, those of readers on the host."""
    found = set()
    for node in free:
        kernel = placed[node].kernel
        if node.op != "Const" or kernel is None:
            continue
        uses = [use for value in node.read_outputs for use in value.uses if use.node in placed]
        is_there = all(use.node in host or not is_accelerator(placed[use.node].device) for use in uses)
        if uses and (is_there or (not kernel.on_host and all(_wants_host(*use, placed, host) for use in uses))):
            found.add(node)
    return found


def _wants_host(node: Node, index: int, placed: dict[Node, Placed], host: Collection[Node]) -> bool:
    kernel = None if node in host else placed[node].kernel
    return kernel is None or kernel.inputs[index]
