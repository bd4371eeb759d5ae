"""Devices: instance r on device r, what runs once on the first device.

A node that the user put on a CPU stays on the host while replicas are on accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.analysis.propagate import is_pinned
from autograph_rewrite.ir.graph import Graph, Span
from autograph_rewrite.plan.devices import parse

HOST = "/device:CPU:0"


def place(graph: Graph, devices: Sequence[str]) -> None:
    """Set the device of every node that runs once; expansion places the instances of the others."""
    first = devices[0]
    host_only = parse(first).kind == "CPU"
    for node in graph:
        if node.span is Span.EACH:
            continue
        if host_only:
            node.set_device(first)
        else:
            on_host = is_pinned(node) or "CPU" in node.device.upper()
            node.set_device(HOST if on_host else first)
