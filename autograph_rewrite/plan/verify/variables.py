"""Invariants of a plan's variable requests: each variable has a residence, and its shards cover it exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.diagnostics.located_yaml import KeyPath
from autograph_rewrite.ir.types import device_names
from autograph_rewrite.ir.types.device_names import DeviceNameError
from autograph_rewrite.plan.parts.graph_digest import ItemLike
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.residence import split_axis
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.verify.edges import Finding

KINDS = ("replicated", "single", "split")
SERVERS = "ps"


def placements_mean_something(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """A placement is one of three, and what stands beside it belongs to it."""
    for i, request in enumerate(plan.variables):
        path: KeyPath = ("variables", i)
        if request.placement not in KINDS[:2] and split_axis(request.placement) is None:
            hint = did_you_mean(request.placement, KINDS, noun="known ones")
            hint = "write split(0), or another axis" if request.placement.startswith("split") else hint
            message = f"'{request.placement}' is no placement of a variable ('{request.name}')"
            yield Finding((*path, "placement"), message, hint)
            continue
        yield from _alone(path, request)
        if request.placement == "replicated":
            yield from _replicated(path, request)
        elif request.placement == "single" and len(request.servers) != 1:
            message = f"'{request.name}' lives on one device, but {len(request.servers)} are named in servers"
            yield Finding((*path, "servers"), message, "name one")
        elif request.placement == "single" and request.sizes:
            yield Finding((*path, "sizes"), f"'{request.name}' is not split, so it has no sizes", _LEAVE_OUT)


def shards_make_up_their_variable(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """The shards of a variable are as long as its axis, together."""
    for i, request in enumerate(plan.variables):
        path: KeyPath = ("variables", i)
        axis, variable = split_axis(request.placement), item.variables.get(request.name)
        if axis is None or variable is None:
            continue
        name, sizes = request.name, request.sizes
        if variable.shape is None or axis >= len(variable.shape):
            rank = "an unknown shape" if variable.shape is None else f"{len(variable.shape)} axes"
            yield Finding((*path, "placement"), f"'{name}' has {rank}, so it cannot be split along axis {axis}")
            continue
        size = variable.shape[axis]
        if len(sizes) < 2:
            yield Finding((*path, "sizes"), f"'{name}' is split into {len(sizes)} shards; there must be 2 or more")
        elif min(sizes) < 1:
            yield Finding((*path, "sizes"), f"a shard of '{name}' has size {min(sizes)}; it must be at least 1")
        elif sum(sizes) != size:
            message = f"the shards of '{name}' add up to {sum(sizes)}, but axis {axis} has {size or 'no known size'}"
            yield Finding((*path, "sizes"), message, "their sizes must make up the axis")
        if request.servers and len(request.servers) != len(sizes):
            message = f"'{name}' has {len(sizes)} shards, but servers names {len(request.servers)} devices"
            yield Finding((*path, "servers"), message, "name one for each shard, or none")


def servers_are_there(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """A variable's devices are spelt canonically, and belong to a worker or to a parameter server."""
    for i, request in enumerate(plan.variables):
        for k, name in enumerate(request.servers):
            path: KeyPath = ("variables", i, "servers", k)
            try:
                device = device_names.parse(name)
            except DeviceNameError as error:
                yield Finding(path, error.problem, error.hint)
                continue
            process = device_names.process_of(str(device))
            if str(device) != name:
                yield Finding(path, f"'{name}' is not the canonical name", f"write {device}")
            elif device.job != SERVERS and process not in plan.processes:
                known = " and ".join(process or "this process" for process in plan.processes)
                message = f"'{request.name}' is on {name}, but no process of the plan has that device"
                yield Finding(path, message, f"there are {known}, and parameter servers are /job:{SERVERS}/task:N")


def servers_are_used_as_such(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """Settings of parameter servers stand where there is one."""
    for i, request in enumerate(plan.variables):
        path: KeyPath = ("variables", i)
        on_servers = request.options.synchronizer == SERVERS
        if on_servers and not request.servers:
            message = f"the synchronizer of '{request.name}' is {SERVERS}, but no server holds it"
            yield Finding((*path, "options"), message, "name its device in servers, and set placement to single")
        if request.server is None:
            continue
        if not on_servers:
            message = f"'{request.name}' has settings of a server, but its synchronizer is all_reduce"
            yield Finding((*path, "server"), message, f"{_LEAVE_OUT}, or set options.synchronizer to {SERVERS}")
        if request.server.staleness < 0:
            message = f"the staleness of '{request.name}' is {request.server.staleness}; it counts steps"
            yield Finding((*path, "server"), message, "0 lets no worker be ahead")
        if request.server.staleness and not request.server.sync:
            message = f"the staleness of '{request.name}' bounds how far workers drift, but sync: false sets no bound"
            yield Finding((*path, "server"), message, "leave one of them out")


def asynchronous_workers_share_all(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """Workers that do not wait for each other cannot have copies of a variable that are equal."""
    if not plan.is_asynchronous or len(plan.processes) == 1:
        return
    first = next(request for request in plan.variables if request.server is not None)
    for i, request in enumerate(plan.variables):
        if request.server is None and item.variables[request.name].trainable is False:
            continue
        ours = (request.server.sync, request.server.staleness) if request.server is not None else None
        if first.server is None or ours != (first.server.sync, first.server.staleness):
            message = f"workers do not wait for each other at '{first.name}', so '{request.name}' must be shared alike"
            hint = "give all variables synchronizer ps with the same sync and staleness, as in match: .*"
            yield Finding(("variables", i), message, hint)
            return


def stages_cover_the_replicas(plan: Plan, item: ItemLike) -> Iterator[Finding]:
    """What is split over the replicas has a shard on the device of each."""
    for i, request in enumerate(plan.variables):
        path: KeyPath = ("variables", i)
        if request.stage == 0:
            continue
        if not 1 <= request.stage <= 3:
            yield Finding((*path, "stage"), f"the stage of '{request.name}' is {request.stage}; it is 1, 2 or 3")
        elif split_axis(request.placement) is None:
            message = f"'{request.name}' has stage {request.stage}, but its placement is {request.placement}"
            yield Finding((*path, "stage"), message, "only what is split has one")
        elif request.servers != plan.devices:
            message = f"the shards of '{request.name}' are not on the replicas' devices, one on each in their order"
            yield Finding((*path, "servers"), message, "list devices again here")
        elif request.options.synchronizer == SERVERS:
            message = f"'{request.name}' is split over the replicas, so no server synchronises it"
            yield Finding((*path, "options"), message, "set synchronizer to all_reduce")


VARIABLE_CHECKS: tuple[Callable[[Plan, ItemLike], Iterator[Finding]], ...] = (
    placements_mean_something,
    shards_make_up_their_variable,
    servers_are_there,
    servers_are_used_as_such,
    asynchronous_workers_share_all,
    stages_cover_the_replicas,
)

_LEAVE_OUT = "leave it out"


def _alone(path: KeyPath, request: VariableRequest) -> Iterator[Finding]:
    if request.options.bucket_bytes < 0:
        message = f"bucket_bytes of '{request.name}' is {request.options.bucket_bytes}"
        yield Finding((*path, "options"), message, "0 reduces each gradient alone")


def _replicated(path: KeyPath, request: VariableRequest) -> Iterator[Finding]:
    for key in ("servers", "sizes"):
        if getattr(request, key):
            message = f"'{request.name}' is replicated, so it has no {key}"
            yield Finding((*path, key), message, f"{_LEAVE_OUT}, or set placement to single or split(0)")
