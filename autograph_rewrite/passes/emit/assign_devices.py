"""Assign devices: instance r to device r, what runs once to the first device.

A node that the user put on a CPU stays on the host while replicas are on accelerators. Virtual CPU devices of one
process share their cores, so replicas that also share their variables all run on the first: sending tensors between
them would only cost (measured: 2 to 5 % of a step), and no device has to be made for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autograph_rewrite.analysis.propagate import is_pinned
from autograph_rewrite.ir.graph import Graph, Node, Span
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse, process_of
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ops.rules.random import is_draw
from autograph_rewrite.plan.replica_devices import HOST


def assign_devices(graph: Graph, devices: Sequence[str], pinned_devices: Mapping[Node, str]) -> None:
    """Set the device of every node that runs once; expansion places the instances of the others.

    Args:
        graph: the folded graph.
        devices: one per replica.
        pinned_devices: the devices of nodes that are not where their replica is.
    """
    first = devices[0]
    host_only = parse(first).kind == "CPU"
    for node in graph:
        if node.span is not Span.ONCE:
            continue
        if node in pinned_devices:
            node.set_device(pinned_devices[node])
        elif host_only:
            node.set_device(first)
        else:
            on_host = stays_on_host(node) or "CPU" in node.device.upper()
            node.set_device(process_of(first) + HOST if on_host else first)


def stays_on_host(node: Node) -> bool:
    """Return whether a node that runs once is on the host though replicas are on accelerators.

    Inputs and side effects are; random numbers are drawn, and numbers exchanged, where they are read. Integers that
    processes exchange once for all their replicas are sizes and digests, which come from the host.
    """
    if is_collective(node.op):
        return not any(dtype in dtypes.INEXACT for dtype in node.output_dtypes[:1])
    return is_pinned(node) and not is_draw(node.op)
