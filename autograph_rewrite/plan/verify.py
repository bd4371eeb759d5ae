"""Check a plan against its graph and devices: every problem together, before anything is edited."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from autograph_rewrite.diagnostics.faults import FileFault, did_you_mean, raise_if_any
from autograph_rewrite.diagnostics.located_yaml import Finding, KeyPath
from autograph_rewrite.errors import PlanError, RewriteError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import device_names
from autograph_rewrite.ir.types.device_names import DeviceNameError
from autograph_rewrite.ir.types.dtypes import NUMBERS, dtype_name
from autograph_rewrite.plan.parts import collective_keys
from autograph_rewrite.plan.parts.graph_digest import graph_digest
from autograph_rewrite.plan.parts.lowerings import LOWERINGS
from autograph_rewrite.plan.parts.messages import SIZES, STEP, EdgePlan
from autograph_rewrite.plan.parts.residence import shard_name, split_axis
from autograph_rewrite.plan.plan import READ, Plan
from autograph_rewrite.plan.user_extensions import problems
from autograph_rewrite.plan.variable_policies import problem_of
from autograph_rewrite.training_graph import TrainingGraph

Check = Callable[[Plan, TrainingGraph], Iterator[Finding]]


def check(plan: Plan, item: TrainingGraph) -> list[FileFault]:
    """All faults of `plan` for `item`."""
    return _faults(plan, item, (*HEADER_CHECKS, *VARIABLE_CHECKS, *EDGE_CHECKS))


def require(plan: Plan, item: TrainingGraph) -> None:
    """Refuse a plan that does not fit.

    Raises:
        PlanError: with every problem that `check` finds.
    """
    raise_if_any(check(plan, item), error=PlanError, title=plan.source.name)


def require_edges(plan: Plan, item: TrainingGraph) -> None:
    """Refuse edges that do not fit; the rest of the plan has been checked, and passes have edited its requests since.

    Raises:
        PlanError: with every problem.
    """
    raise_if_any(_faults(plan, item, EDGE_CHECKS), error=PlanError, title=plan.source.name)


def _faults(plan: Plan, item: TrainingGraph, checks: Iterable[Check]) -> list[FileFault]:
    return [plan.source.fault(*finding) for check in checks for finding in check(plan, item)]


def header_is_complete(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The version, the mode and the timeout are valid."""
    if plan.version not in READ:
        yield Finding(
            ("version",), f"version is {plan.version}; only {READ[0]} to {READ[-1]} are known", "build the plan anew"
        )
    if plan.mode not in ("shared", "mirrored"):
        yield Finding(("mode",), f"mode must be shared or mirrored, not '{plan.mode}'")
    if not plan.timeout_seconds > 0:
        message = f"timeout_seconds is {plan.timeout_seconds:g}: a collective whose peer is gone would hang"
        yield Finding(("timeout_seconds",), message, "set it above 0")


def steps_run_in_one_process(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """A loop of steps is in the graph of one process, with its variables."""
    if plan.steps_per_run < 0:
        yield Finding(("steps_per_run",), f"steps_per_run is {plan.steps_per_run}", "it is at least 1; 0 means no loop")
    # not parsed: another check finds a misspelt device
    jobs = {home.split("/")[1].partition(":")[2] for home in plan.server_homes.values() if home.startswith("/job:")}
    if plan.steps_per_run < 2 or not (plan.is_driven or jobs):
        return
    if plan.pipeline is not None:
        where, without = "the stages are in several processes", "leave pipeline out"
    elif plan.is_driven:
        where, without = "the model axis goes through several processes", "give each worker all devices of a replica"
    elif "ps" in jobs:
        where, without = "variables are on parameter servers", "use a strategy without servers"
    else:
        where, without = "variables are on single workers", "use a strategy that places none on a worker"
    message = f"steps_per_run is {plan.steps_per_run}, but {where}, and each step is led from outside of the graph"
    yield Finding(("steps_per_run",), message, f"leave steps_per_run out, or {without}")


def devices_are_named_canonically(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """There is a replica, and each device has its canonical name, from which keys are made."""
    if not plan.devices:
        yield Finding(("devices",), "devices is empty: there must be a replica")
    for i, name in enumerate(plan.devices):
        yield from _misspelt(name, ("devices", i))


def _misspelt(name: str, path: KeyPath) -> Iterator[Finding]:
    """The name of a device is its canonical one."""
    try:
        canonical = device_names.canonical(name)
    except DeviceNameError as error:
        yield Finding(path, error.problem, error.hint)
        return
    if canonical != name:
        yield Finding(path, f"'{name}' is not the canonical name", f"write {canonical}")


def processes_are_alike(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The replicas of a process are adjacent, and each process has as many; with stages, each process has a stage."""
    if plan.pipeline is not None or plan.is_driven:
        wanted = tuple(f"/job:worker/replica:0/task:{task}" for task in range(len(plan.stage_hosts)))
        if plan.stage_hosts != wanted:
            kind, key = ("stage", "pipeline") if plan.pipeline is not None else ("logical device", "model")
            message = f"the {kind}s are on {', '.join(plan.stage_hosts)}; workers count from 0, and each has a {kind}"
            yield Finding((key, "devices"), message, "name a device of each worker")
        return
    parts = [plan.devices_of(task) for task in range(len(plan.processes))]
    is_whole = sum(map(len, parts)) == plan.replicas
    for process, part in zip(plan.processes, parts, strict=True):
        if any(device_names.process_of(device) != process for device in part) or not is_whole:
            message = f"{process or 'this process'} does not have {plan.replicas_each} replicas in a row"
            yield Finding(("devices",), message, "list the devices of each process together, equally many of each")
            return


def mirrored_devices_are_distinct(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """A collective with two members on one device never ends."""
    if plan.mode != "mirrored":
        return
    for name in device_names.repeated(plan.devices):
        second = plan.devices.index(name, plan.devices.index(name) + 1)
        shown = name.removeprefix("/device:")
        message = f"mirrored replicas share {shown}: a collective with two members on one device never ends"
        yield Finding(("devices", second), message, "name distinct devices, or set mode to shared")


def mesh_covers_the_devices(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The axes are known ones, and multiply to the number of devices."""
    size = 1
    for i, axis in enumerate(plan.mesh):
        size *= axis.size
        if axis.name not in ("data", "model"):
            hint = did_you_mean(axis.name, ("data", "model"), noun="known axes")
            yield Finding(("mesh", i), f"the mesh has no axis '{axis.name}'", hint)
        elif axis.size < 1:
            yield Finding(("mesh", i), f"the axis {axis.name} has size {axis.size}; it must be at least 1")
        elif axis.name == "model" and axis.size > 1 and plan.model is None:
            yield Finding(("mesh", i), "mesh has a model axis, and the plan names no devices for it", "fill in model")
    for name in device_names.repeated([axis.name for axis in plan.mesh]):
        yield Finding(("mesh",), f"the axis '{name}' stands twice in mesh")
    model, devices = plan.model, plan.replicas
    if model is not None:
        stages = plan.pipeline.devices if plan.pipeline is not None else plan.devices
        devices = len(stages) * model.size
        if len(model.devices) != devices:
            needed = f"{plan.replicas} replicas of {devices // plan.replicas} devices need {devices}"
            message = f"{needed}, and there are {len(model.devices)}"
            yield Finding(("model", "devices"), message, "name those of the first replica, then of the second")
        devices = plan.replicas * model.size
    if plan.mesh and size != devices:
        message = f"the axes of mesh multiply to {size}, but there are {devices} devices"
        yield Finding(("mesh",), message)


def batch_inputs_fit(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Every batch input is an input of the item, once, and has the axis."""
    inputs = item.inputs
    for i, batch in enumerate(plan.batch_inputs):
        path = ("batch_inputs", i)
        tensor = inputs.get(batch.name)
        if tensor is None:
            hint = did_you_mean(batch.name, list(inputs), noun="known inputs")
            yield Finding(path, f"the graph has no input '{batch.name}'", hint)
        elif batch.axis < 0:
            yield Finding(path, f"the batch axis of '{batch.name}' is {batch.axis}; count it from the front")
        elif tensor.shape is not None and batch.axis >= len(tensor.shape):
            message = f"the input '{batch.name}' has {len(tensor.shape)} axes, so no axis {batch.axis}"
            yield Finding(path, message)
    for name in device_names.repeated([batch.name for batch in plan.batch_inputs]):
        yield Finding(("batch_inputs",), f"the input '{name}' stands twice in batch_inputs")


def variables_exist_once(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Every request is for a variable of the item, and no variable has two."""
    known = list(item.variables)
    for i, request in enumerate(plan.variables):
        if request.name not in item.variables:
            hint = did_you_mean(request.name, known, noun="known variables")
            yield Finding(("variables", i), f"the graph has no variable '{request.name}'", hint)
    for name in device_names.repeated([request.name for request in plan.variables]):
        yield Finding(("variables",), f"the variable '{name}' stands twice in variables")


def policies_fit(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Every policy is for a variable of the item that can have it, and no variable has two."""
    variables = item.variables
    for i, policy in enumerate(plan.policies):
        if policy.variable not in variables:
            hint = did_you_mean(policy.variable, list(variables), noun="known variables")
            yield Finding(("policies", i), f"the graph has no variable '{policy.variable}'", hint)
            continue
        problem = problem_of(policy, variables[policy.variable])
        if problem is not None:
            yield Finding(("policies", i), *problem)
        if policy.has_components and (plan.microbatches > 1 or plan.part_devices):
            message = f"each replica has a component of '{policy.variable}', and is cut into parts"
            yield Finding(("policies", i), message, "aggregate on_write, or leave micro-batches, stages and model out")
    for name in device_names.repeated([policy.variable for policy in plan.policies]):
        yield Finding(("policies",), f"the variable '{name}' stands twice in policies")


def replicas_that_train_alone_have_all_of_it(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Replicas that train by themselves are one device each, with every variable."""
    how = plan.local_sgd
    if how is None:
        return
    if how.period < 1 or how.warmup_steps < 0:
        message = f"local_sgd has period {how.period} and warmup_steps {how.warmup_steps}"
        yield Finding(("local_sgd",), message, "period is at least 1, warmup_steps at least 0")
    placed = any(request.placement != "replicated" or request.stage for request in plan.variables)
    asked = {
        "shared variables": plan.mode != "mirrored" and plan.replicas > 1,
        "variables in parts or on servers": placed,
        "micro-batches, stages or a model axis": plan.microbatches > 1 or bool(plan.part_devices),
        "compressors": plan.compresses,
        "policies of variables": bool(plan.policies),
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        yield Finding(("local_sgd",), f"replicas train all variables by themselves, not with {what}", "leave one out")


def ops_are_registered(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The user's descriptions of custom ops are those with which the plan was made."""
    for message, hint in problems(plan.ops, item):
        yield Finding(("ops",), message, hint)


HEADER_CHECKS: tuple[Check, ...] = (
    header_is_complete,
    steps_run_in_one_process,
    devices_are_named_canonically,
    processes_are_alike,
    mirrored_devices_are_distinct,
    mesh_covers_the_devices,
    batch_inputs_fit,
    variables_exist_once,
    policies_fit,
    replicas_that_train_alone_have_all_of_it,
    ops_are_registered,
)


# Invariants of a plan's variable requests: each variable has a residence, and its shards cover it exactly.

KINDS = ("replicated", "single", "split")
SERVERS = "ps"


def placements_mean_something(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """A placement is one of three, and the other fields of the request fit it."""
    for i, request in enumerate(plan.variables):
        path: KeyPath = ("variables", i)
        if request.placement not in KINDS[:2] and split_axis(request.placement) is None:
            hint = did_you_mean(request.placement, KINDS, noun="known ones")
            hint = "write split(0), or another axis" if request.placement.startswith("split") else hint
            message = f"'{request.placement}' is no placement of a variable ('{request.name}')"
            yield Finding((*path, "placement"), message, hint)
            continue
        if request.options.bucket_bytes < 0:
            message = f"bucket_bytes of '{request.name}' is {request.options.bucket_bytes}"
            yield Finding((*path, "options"), message, "0 reduces each gradient alone")
        if request.placement == "replicated":
            for key in ("servers", "sizes"):
                if getattr(request, key):
                    message = f"'{request.name}' is replicated, so it has no {key}"
                    yield Finding((*path, key), message, f"{_LEAVE_OUT}, or set placement to single or split(0)")
        elif request.placement == "single" and len(request.servers) != 1:
            message = f"'{request.name}' lives on one device, but {len(request.servers)} are named in servers"
            yield Finding((*path, "servers"), message, "name one")
        elif request.placement == "single" and request.sizes:
            yield Finding((*path, "sizes"), f"'{request.name}' is not split, so it has no sizes", _LEAVE_OUT)


def shards_make_up_their_variable(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The shards of a variable add up to its axis."""
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


def servers_are_there(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """A variable's devices are spelt canonically, and belong to a worker or to a parameter server."""
    for i, request in enumerate(plan.variables):
        for k, name in enumerate(request.servers):
            path: KeyPath = ("variables", i, "servers", k)
            if problem := next(_misspelt(name, path), None):
                yield problem
                continue
            process, hosts = device_names.process_of(name), plan.stage_hosts or plan.processes
            if device_names.parse(name).job != SERVERS and process not in hosts:
                known = " and ".join(process or "this process" for process in hosts)
                message = f"'{request.name}' is on {name}, but no process of the plan has that device"
                yield Finding(path, message, f"there are {known}, and parameter servers are /job:{SERVERS}/task:N")


def servers_are_used_as_such(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Only variables on parameter servers have settings of servers."""
    for i, request in enumerate(plan.variables):
        path: KeyPath = ("variables", i)
        on_servers = request.options.synchronizer == SERVERS
        if on_servers and not request.servers:
            message = f"the synchronizer of '{request.name}' is {SERVERS}, but no server holds it"
            yield Finding((*path, "options"), message, "name its device in servers, and set placement to single")
        if request.server is None:
            continue
        if not on_servers and not request.over_replicas:
            message = f"'{request.name}' has settings of a server, but its synchronizer is all_reduce"
            yield Finding((*path, "server"), message, f"{_LEAVE_OUT}, or set options.synchronizer to {SERVERS}")
        if request.server.staleness < 0:
            message = f"the staleness of '{request.name}' is {request.server.staleness}; it counts steps"
            yield Finding((*path, "server"), message, "0 lets no worker be ahead")
        if request.server.staleness and not request.server.sync:
            message = f"the staleness of '{request.name}' bounds how far workers drift, but sync: false sets no bound"
            yield Finding((*path, "server"), message, "leave one of them out")


def asynchronous_workers_share_all(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Workers that do not wait for each other share all variables: their copies would differ."""
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


def stages_cover_the_replicas(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """A variable that is split over the replicas has a shard on the device of each."""
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


VARIABLE_CHECKS: tuple[Check, ...] = (
    placements_mean_something,
    shards_make_up_their_variable,
    servers_are_there,
    servers_are_used_as_such,
    asynchronous_workers_share_all,
    stages_cover_the_replicas,
)

_LEAVE_OUT = "leave it out"


# Invariants of a plan's edges: they name existing values, and their collectives cannot deadlock or be confused.

_PLACEMENT = re.compile(r"[a-z_]+(\([^()]+\))?")
_OF_SHARDS = re.compile(r"/(part_\d+|shards(_\d+)?)(/|$)")  # nodes that partitioning makes
_INT32 = 2**31


def edges_are_of_this_graph(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Edges were resolved on this graph."""
    if plan.edges and plan.graph_digest and plan.graph_digest != graph_digest(item.graph):
        message = "the edges of this plan were resolved on another graph"
        yield Finding(("graph_digest",), message, "delete edges and graph_digest to have them resolved anew")


def edges_name_what_is_there(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The value and the owner of an edge exist; where variables are cut into shards, a pass will make some of them."""
    shards = {shard_name(request.name, k) for request in plan.variables for k in range(len(request.sizes))}
    for i, edge in enumerate(plan.edges):
        node = item.graph.nodes.get(edge.node)
        if node is None and shards and _OF_SHARDS.search(edge.node):
            continue
        if node is None:
            hint = did_you_mean(edge.node, list(item.graph.nodes)) if len(item.graph.nodes) < 1000 else None
            close = hint if hint and hint.startswith("did you mean") else None
            yield Finding(("edges", i, "value"), f"the graph has no value '{edge.value}'", close)
        else:
            yield from _fits_node(i, edge, node)
        if edge.owner != STEP and edge.owner not in item.variables and edge.owner not in shards:
            hint = did_you_mean(edge.owner, [STEP, *item.variables], noun="known owners")
            yield Finding(("edges", i, "owner"), f"no variable '{edge.owner}' can own '{edge.value}'", hint)


def edges_are_well_formed(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Placements, lowering, type and numbers are valid."""
    for i, edge in enumerate(plan.edges):
        for key, placement in (("from", edge.from_), ("to", edge.to)):
            if _PLACEMENT.fullmatch(placement) is None:
                message = f"'{placement}' is no placement ({key} of '{edge.value}')"
                yield Finding(("edges", i, key), message, "write one like replicated, split(0) or partial(sum)")
        if edge.lowering not in LOWERINGS:
            hint = did_you_mean(edge.lowering, list(LOWERINGS), noun="known lowerings")
            yield Finding(("edges", i, "lowering"), f"there is no lowering '{edge.lowering}'", hint)
        if edge.dtype and edge.dtype not in NUMBERS:
            hint = did_you_mean(edge.dtype, list(NUMBERS), noun="known types")
            yield Finding(("edges", i, "dtype"), f"there is no type '{edge.dtype}'", hint)
        for key in ("bytes", "bucket", "group_key", "instance_key", "order"):
            number = getattr(edge, key)
            if number is not None and not 0 <= number < (_INT32 if key != "bytes" else 2**63):
                yield Finding(("edges", i, key), f"{key} of '{edge.value}' is {number}")
        if edge.bucket and edge.lowering in LOWERINGS and not edge.lowered.is_bucketed:
            message = f"'{edge.value}' cannot be in a bucket: {edge.lowering} has none"
            yield Finding(("edges", i, "bucket"), message, "leave bucket out")


def edges_stand_once(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """One value is converted to one placement once."""
    first: dict[tuple[str, str, str], int] = {}
    for i, edge in enumerate(plan.edges):
        seen = first.setdefault((edge.value, edge.to, edge.role), i)
        if seen != i:
            message = f"edges[{i}] converts '{edge.value}' to {edge.to} again, as edges[{seen}] does"
            yield Finding(("edges", i), message, "delete one of them")


def collectives_have_keys(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """Each collective has a group with its key, an instance key and a place in the order."""
    groups = functools.cache(lambda crosses, logical: _group_key(plan.members(crosses, logical)))
    for i, edge in enumerate(plan.edges):
        if not edge.is_collective:
            continue
        group = groups(edge.lowered.crosses, edge.logical)
        if plan.mode == "shared" and not edge.lowered.crosses:
            message = f"'{edge.value}' is a {edge.lowering}, which has no members where variables are shared"
            yield Finding(("edges", i, "lowering"), message, "set mode to mirrored, or use add_n or concat")
        if group is not None and edge.group_key != group:
            message = f"group_key of '{edge.value}' is {edge.group_key}, but that of these devices is {group}"
            yield Finding(("edges", i, "group_key"), message, "delete edges to have them resolved anew")
        if edge.instance_key == 0:
            yield Finding(("edges", i), f"the collective '{edge.value}' has no instance_key")
        if edge.order is None:
            message = f"the collective '{edge.value}' has no order: replicas could start theirs in different orders"
            yield Finding(("edges", i), message, "give each collective its own number")


def collectives_do_not_meet(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """No two collectives of a group share a key, and no two at all share a place in the order."""
    keyed: dict[tuple[int, int], int] = {}
    ordered: dict[int, int] = {}
    for i, edge in enumerate(plan.edges):
        if not edge.is_collective:
            continue
        if edge.instance_key:
            other = keyed.setdefault((edge.group_key, edge.instance_key), i)
            if not _together(plan, i, other):
                message = f"'{edge.value}' has the instance_key {edge.instance_key} of '{plan.edges[other].value}'"
                hint = "TensorFlow would pair whichever tensors arrive together; give each its own"
                yield Finding(("edges", i, "instance_key"), message, hint)
        if edge.order is not None:
            other = ordered.setdefault(edge.order, i)
            if not _together(plan, i, other):
                message = f"'{edge.value}' has the order {edge.order} of '{plan.edges[other].value}'"
                yield Finding(("edges", i, "order"), message, "a deadlock is ruled out by a total order only")


def buckets_are_uniform(plan: Plan, item: TrainingGraph) -> Iterator[Finding]:
    """The values of a bucket are reduced as one, so they agree in type, lowering, keys and options."""
    buckets: dict[int, list[int]] = defaultdict(list)
    for i, edge in enumerate(plan.edges):
        if edge.bucket:
            buckets[edge.bucket].append(i)
    for bucket, (first, *others) in buckets.items():
        for i in others:
            for key, of_first, of_this in _traits(plan, first, i):
                if of_first != of_this:
                    message = (
                        f"bucket {bucket} mixes {key} {of_first} ('{plan.edges[first].value}') "
                        f"and {of_this} ('{plan.edges[i].value}')"
                    )
                    yield Finding(("edges", i), message, "put them in two buckets")


EDGE_CHECKS: tuple[Check, ...] = (
    edges_are_of_this_graph,
    edges_name_what_is_there,
    edges_are_well_formed,
    edges_stand_once,
    collectives_have_keys,
    collectives_do_not_meet,
    buckets_are_uniform,
)


def _fits_node(i: int, edge: EdgePlan, node: Node) -> Iterator[Finding]:
    """The node has the output of the edge, with its type."""
    index = edge.value.partition(":")[2] or "0"
    try:
        dtypes = node.output_dtypes
    except RewriteError:
        return  # an unknown op, which the loader has reported
    if not index.isdecimal() or int(index) >= len(dtypes):
        message = f"%{node.name} ({node.op}) has {len(dtypes)} outputs, so no '{edge.value}'"
        yield Finding(("edges", i, "value"), message)
    elif edge.to == SIZES:
        return  # it exchanges the sizes of the parts of the value, not the value
    elif edge.dtype in NUMBERS and NUMBERS[edge.dtype] != dtypes[int(index)]:
        message = f"'{edge.value}' is {dtype_name(dtypes[int(index)])}, not {edge.dtype}"
        yield Finding(("edges", i, "dtype"), message)


def _group_key(devices: Sequence[str]) -> int | None:
    try:
        return collective_keys.group_key(devices)
    except DeviceNameError:
        return None  # the check of the devices reports it


def _together(plan: Plan, i: int, j: int) -> bool:
    """Whether two edges are one collective."""
    return i == j or (plan.edges[i].bucket != 0 and plan.edges[i].bucket == plan.edges[j].bucket)


def _traits(plan: Plan, first: int, other: int) -> Iterator[tuple[str, object, object]]:
    """The traits that two edges of a bucket must share."""
    a, b = plan.edges[first], plan.edges[other]
    placements = () if SIZES in (a.to, b.to) else ("from_", "to")  # sizes of parts may ride with sums
    for key in ("dtype", "lowering", "compressor", *placements, "group_key", "instance_key", "order"):
        yield key.rstrip("_"), getattr(a, key), getattr(b, key)
    ours, theirs = plan.options_of(a.owner), plan.options_of(b.owner)
    yield "hint", ours.hint, theirs.hint
