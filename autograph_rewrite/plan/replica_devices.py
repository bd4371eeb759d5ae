"""Find the devices of replicas: those that a process of a plan runs on, and those that must exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autograph_rewrite.ir.types.device_names import parse, process_of
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.residence import OnServer, residence_of
from autograph_rewrite.plan.plan import Plan

HOST = "/device:CPU:0"


def run_devices(plan: Plan, task: int = 0) -> tuple[str, ...]:
    """Return the devices that the replicas of one process run on; with stages, those of the first replica first."""
    devices = plan.devices_of(task)
    if plan.model is not None:
        each = len(plan.model.devices) // len(plan.processes)
        return plan.model.devices[task * each : (task + 1) * each]
    if plan.pipeline is not None:
        return plan.pipeline.devices
    if plan.mode == "shared" and not plan.has_shards_of_replicas and all(parse(one).kind == "CPU" for one in devices):
        return (devices[0],) * len(devices)
    return devices


def devices_by_replica(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return devices[replica][logical]: the devices of each replica, stage by stage, each with its logical devices."""
    parts, each = plan.part_devices or plan.devices, plan.devices_each
    return tuple(parts[first : first + each] for first in range(0, len(parts), each))


def first_devices(plan: Plan, task: int = 0, along: int = 1) -> tuple[str, ...]:
    """Return the first devices of each replica of one process, where it keeps the variables of a function.

    Args:
        along: how many devices of a replica have copies.
    """
    devices = run_devices(plan, task)
    each = max(1, len(devices) // plan.replicas_each)
    return tuple(device for first in range(0, len(devices), each) for device in devices[first : first + along])


def needed_devices(plan: Plan, task: int = 0) -> tuple[str, ...]:
    """Return the devices of one process that its replicas run on, or that hold variables."""
    devices = run_devices(plan, task)
    if plan.is_driven:
        return tuple(dict.fromkeys(device for device in devices if process_of(device) == plan.stage_hosts[task]))
    own = process_of(devices[0]) if devices else ""
    return tuple(dict.fromkeys((*devices, *(home for home in plan.homes.values() if process_of(home) == own))))


def within_reach(plan: Plan, task: int = 0) -> Plan:
    """Return the plan for a function: its variables are where its user made them, shards where a replica runs.

    A function captures variables of this process; a device that no replica runs on may not exist.
    """
    devices = run_devices(plan, task)

    def near(request: VariableRequest) -> tuple[str, ...]:
        if isinstance(residence_of(request), OnServer):
            return devices[:1]
        return tuple(server if server in devices else devices[0] for server in request.servers)

    return moved(plan, [replace(request, servers=near(request)) for request in plan.variables])


def moved(plan: Plan, variables: Iterable[VariableRequest]) -> Plan:
    """Return the plan with other places of its variables; edges for the old places are dropped, to be resolved again.

    Args:
        plan: a request, or a plan with edges.
    """
    new = replace(plan, variables=tuple(variables))
    if not plan.edges or new.variables == plan.variables:
        return new
    note = "a function's variables cannot be where this plan has them, so its edges are resolved anew"
    return replace(new, edges=(), notes=(*plan.notes, note))
