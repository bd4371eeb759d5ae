"""Devices: instance r on device r, what runs once on the first device.

A node that the user put on a CPU stays on the host while replicas are on accelerators. Virtual CPU devices of one
process share their cores, so replicas that also share their variables all run on the first: sending tensors between
them would only cost (measured: 2 to 5 % of a step), and no device has to be made for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.propagate import is_pinned
from autograph_rewrite.ir.graph import Graph, Node, Span
from autograph_rewrite.plan.devices import parse, process_of
from autograph_rewrite.plan.parts import SINGLE, VariableRequest
from autograph_rewrite.plan.plan import Plan

HOST = "/device:CPU:0"


def run_devices(plan: Plan, task: int = 0) -> tuple[str, ...]:
    """Return the devices that the replicas of one process really run on; with stages, those of the first one first."""
    devices = plan.devices_of(task)
    if plan.pipeline is not None:
        return plan.pipeline.devices
    if plan.mode == "shared" and all(parse(device).kind == "CPU" for device in devices):
        return (devices[0],) * len(devices)
    return devices


def needed_devices(plan: Plan, task: int = 0) -> tuple[str, ...]:
    """Return the devices of one process that its replicas run on, or that hold variables."""
    devices = run_devices(plan, task)
    if plan.stage_hosts:
        return tuple(dict.fromkeys(device for device in devices if process_of(device) == plan.stage_hosts[task]))
    own = process_of(devices[0]) if devices else ""
    return tuple(dict.fromkeys((*devices, *(home for home in plan.homes.values() if process_of(home) == own))))


def within_reach(plan: Plan, task: int = 0) -> Plan:
    """Return the plan for a function: its variables are where its user made them, shards where a replica runs.

    What a function captures is in this process; a device that no replica runs on may not even be there.
    """
    devices = run_devices(plan, task)

    def near(request: VariableRequest) -> tuple[str, ...]:
        if request.placement == SINGLE:
            return devices[:1]
        return tuple(server if server in devices else devices[0] for server in request.servers)

    return replace(plan, variables=tuple(replace(request, servers=near(request)) for request in plan.variables))


def place(graph: Graph, devices: Sequence[str], elsewhere: Mapping[Node, str]) -> None:
    """Set the device of every node that runs once; expansion places the instances of the others.

    Args:
        graph: the folded graph.
        devices: one per replica.
        elsewhere: the devices of nodes that are not where their replica is.
    """
    first = devices[0]
    host_only = parse(first).kind == "CPU"
    for node in graph:
        if node.span is Span.EACH:
            continue
        if node in elsewhere:
            node.set_device(elsewhere[node])
        elif host_only:
            node.set_device(first)
        else:
            on_host = is_pinned(node) or "CPU" in node.device.upper()
            node.set_device(process_of(first) + HOST if on_host else first)
