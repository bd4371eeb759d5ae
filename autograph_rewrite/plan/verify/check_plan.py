"""Check a plan against its graph and devices: every problem together, before anything is edited."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from autograph_rewrite.diagnostics.faults import Fault, did_you_mean, raise_if_any
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.types import device_names
from autograph_rewrite.ir.types.device_names import DeviceNameError
from autograph_rewrite.plan.parts.graph_digest import ItemLike
from autograph_rewrite.plan.plan import VERSION, Plan
from autograph_rewrite.plan.user_ops import problems
from autograph_rewrite.plan.variable_policies import problem_of
from autograph_rewrite.plan.verify.edges import EDGE_CHECKS, Finding
from autograph_rewrite.plan.verify.variables import VARIABLE_CHECKS

Problem = Fault


def check(plan: Plan, item: ItemLike, available_devices: Sequence[str] | None = None) -> list[Problem]:
    """Everything that is wrong with `plan` for `item`.

    Args:
        plan: a request or a resolved plan.
        item: the graph item that it shall be applied to.
        available_devices: the logical devices that there are; None when that is not known.
    """
    setting = Setting(plan, item, available_devices)
    findings = chain(
        chain.from_iterable(check(setting) for check in CHECKS),
        chain.from_iterable(check(plan, item) for check in (*VARIABLE_CHECKS, *EDGE_CHECKS)),
    )
    return [plan.source.fault(*finding) for finding in findings]


def require(plan: Plan, item: ItemLike, available_devices: Sequence[str] | None = None) -> None:
    """Refuse a plan that does not fit.

    Args:
        plan: a request or a resolved plan.
        available_devices: canonical names of what there is; None: not checked.

    Raises:
        PlanError: with every problem that `check` finds.
    """
    raise_if_any(check(plan, item, available_devices), error=PlanError, title=plan.source.name)


@dataclass(frozen=True)
class Setting:
    """What a check looks at."""

    plan: Plan
    item: ItemLike
    available: Sequence[str] | None


def header_is_complete(setting: Setting) -> Iterator[Finding]:
    """The version, the mode and the timeout mean something."""
    plan = setting.plan
    if plan.version != VERSION:
        yield Finding(("version",), f"version is {plan.version}; only {VERSION} is known", "build the plan anew")
    if plan.mode not in ("shared", "mirrored"):
        yield Finding(("mode",), f"mode must be shared or mirrored, not '{plan.mode}'")
    if not plan.timeout_seconds > 0:
        message = f"timeout_seconds is {plan.timeout_seconds:g}: a collective whose peer is gone would hang"
        yield Finding(("timeout_seconds",), message, "set it above 0")


def steps_run_in_one_process(setting: Setting) -> Iterator[Finding]:
    """A loop of steps is in the graph of one process, with its variables."""
    plan = setting.plan
    if plan.steps_per_run < 0:
        yield Finding(("steps_per_run",), f"steps_per_run is {plan.steps_per_run}", "it is at least 1; 0 means no loop")
    # not parsed: a device that is misspelt is another check's finding
    jobs = {home.split("/")[1].partition(":")[2] for home in plan.homes.values() if home.startswith("/job:")}
    if plan.steps_per_run < 2 or not (plan.is_driven or jobs):
        return
    if plan.pipeline is not None:
        where, without = "the stages are in several processes", "leave pipeline out"
    elif plan.is_driven:
        where, without = "the model axis goes through several processes", "give each worker all devices of a replica"
    elif "ps" in jobs:
        where, without = "variables are on parameter servers", "use a strategy without servers"
    else:
        where, without = "shards of variables are on several workers", "use a strategy that splits none over workers"
    message = f"steps_per_run is {plan.steps_per_run}, but {where}, and each step is led from outside of the graph"
    yield Finding(("steps_per_run",), message, f"leave steps_per_run out, or {without}")


def devices_are_named_canonically(setting: Setting) -> Iterator[Finding]:
    """There is a replica, and each device is spelt in the one way that keys are made from."""
    if not setting.plan.devices:
        yield Finding(("devices",), "devices is empty: there must be a replica")
    for i, name in enumerate(setting.plan.devices):
        try:
            canonical = device_names.canonical(name)
        except DeviceNameError as error:
            yield Finding(("devices", i), error.problem, error.hint)
            continue
        if canonical != name:
            yield Finding(("devices", i), f"'{name}' is not the canonical name", f"write {canonical}")


def devices_exist(setting: Setting) -> Iterator[Finding]:
    """Every device is one of those that there are."""
    if setting.available is None:
        return
    there = [device_names.parse(name) for name in setting.available]
    names = {str(device) for device in there} | {f"/device:{device.short}" for device in there}
    for i, name in enumerate(setting.plan.devices):
        if name not in names:
            known = ", ".join(dict.fromkeys(device.short for device in there)) or "none"
            message = f"there is no device {_short(name)}; there are: {known}"
            yield Finding(("devices", i), message, "create more virtual devices, or change devices")


def processes_are_alike(setting: Setting) -> Iterator[Finding]:
    """The replicas of a process stand together, and each process has as many; each has a stage if they share them."""
    plan = setting.plan
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


def mirrored_devices_are_distinct(setting: Setting) -> Iterator[Finding]:
    """A collective with two members on one device never ends."""
    if setting.plan.mode != "mirrored":
        return
    for name in device_names.repeated(setting.plan.devices):
        second = setting.plan.devices.index(name, setting.plan.devices.index(name) + 1)
        message = f"mirrored replicas share {_short(name)}: a collective with two members on one device never ends"
        yield Finding(("devices", second), message, "name distinct devices, or set mode to shared")


def mesh_covers_the_devices(setting: Setting) -> Iterator[Finding]:
    """The axes are known ones, and multiply to the number of devices."""
    size = 1
    for i, axis in enumerate(setting.plan.mesh):
        size *= axis.size
        if axis.name not in ("data", "model"):
            hint = did_you_mean(axis.name, ("data", "model"), noun="known axes")
            yield Finding(("mesh", i), f"the mesh has no axis '{axis.name}'", hint)
        elif axis.size < 1:
            yield Finding(("mesh", i), f"the axis {axis.name} has size {axis.size}; it must be at least 1")
        elif axis.name == "model" and axis.size > 1 and setting.plan.model is None:
            yield Finding(("mesh", i), "mesh has a model axis, and the plan names no devices for it", "fill in model")
    for name in device_names.repeated([axis.name for axis in setting.plan.mesh]):
        yield Finding(("mesh",), f"the axis '{name}' stands twice in mesh")
    model, devices = setting.plan.model, setting.plan.replicas
    if model is not None:
        stages = setting.plan.pipeline.devices if setting.plan.pipeline is not None else setting.plan.devices
        devices = len(stages) * model.size
        if len(model.devices) != devices:
            needed = f"{setting.plan.replicas} replicas of {devices // setting.plan.replicas} devices need {devices}"
            message = f"{needed}, and there are {len(model.devices)}"
            yield Finding(("model", "devices"), message, "name those of the first replica, then of the second")
        devices = setting.plan.replicas * model.size
    if setting.plan.mesh and size != devices:
        message = f"the axes of mesh multiply to {size}, but there are {devices} devices"
        yield Finding(("mesh",), message)


def batch_inputs_fit(setting: Setting) -> Iterator[Finding]:
    """Every batch input is an input of the item, once, and has the axis."""
    inputs = setting.item.inputs
    for i, batch in enumerate(setting.plan.batch_inputs):
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
    for name in device_names.repeated([batch.name for batch in setting.plan.batch_inputs]):
        yield Finding(("batch_inputs",), f"the input '{name}' stands twice in batch_inputs")


def variables_exist_once(setting: Setting) -> Iterator[Finding]:
    """Every request is for a variable of the item, and no variable has two."""
    known = list(setting.item.variables)
    for i, request in enumerate(setting.plan.variables):
        if request.name not in setting.item.variables:
            hint = did_you_mean(request.name, known, noun="known variables")
            yield Finding(("variables", i), f"the graph has no variable '{request.name}'", hint)
    for name in device_names.repeated([request.name for request in setting.plan.variables]):
        yield Finding(("variables",), f"the variable '{name}' stands twice in variables")


def policies_fit(setting: Setting) -> Iterator[Finding]:
    """Every policy is for a variable of the item that can have it, and no variable has two."""
    plan, variables = setting.plan, setting.item.variables
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


def replicas_that_train_alone_have_all_of_it(setting: Setting) -> Iterator[Finding]:
    """Replicas that train by themselves are one device each, with every variable."""
    plan, how = setting.plan, setting.plan.local_sgd
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


def ops_are_registered(setting: Setting) -> Iterator[Finding]:
    """What the user says of custom ops is what it was when the plan was made."""
    for message, hint in problems(setting.plan.ops, setting.item):
        yield Finding(("ops",), message, hint)


CHECKS: tuple[Callable[[Setting], Iterator[Finding]], ...] = (
    header_is_complete,
    steps_run_in_one_process,
    devices_are_named_canonically,
    devices_exist,
    processes_are_alike,
    mirrored_devices_are_distinct,
    mesh_covers_the_devices,
    batch_inputs_fit,
    variables_exist_once,
    policies_fit,
    replicas_that_train_alone_have_all_of_it,
    ops_are_registered,
)


def _short(name: str) -> str:
    return re.sub(r"^/device:", "", name)
