"""Make a request from a configuration: the part of a plan that comes before its edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.fields import read_size
from autograph_rewrite.config.sections import Override, Pipeline
from autograph_rewrite.diagnostics.faults import raise_if_any
from autograph_rewrite.diagnostics.limits import matches
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.types.device_names import canonical, on_task, short
from autograph_rewrite.load.marks import has_segments
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.codecs import plan_name
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.parts.graph_digest import graph_digest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.shardings import annotations_of, placed_by_hand
from autograph_rewrite.plan.user_extensions import own_ops, own_passes
from autograph_rewrite.plan.variable_policies import policies_of, unmatched
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

UNUSED = "the sharding annotations of the graph place nothing: there is no model axis (mesh.model)"
_GIGABIT, _BUCKET_SECONDS, _LEAST_BUCKET = 1e9 / 8, 1e-3, 64 * 1024

_PADDINGS = {"auto": "longest", "power_of_two": "power_of_two", "none": "equal"}
"""The names in plans, by those in configurations."""


def request(item: TrainingGraph, config: Config, *, strategy: str) -> Plan:
    """The request in which every variable is replicated and follows `config`: its overrides, else its strategy section.

    It has no id yet.

    Args:
        strategy: name for the plan.

    Raises:
        ConfigError: with every setting that this item does not have.
    """
    raise_if_any(unmatched(item, config, "variables"), error=ConfigError, title=config.where())
    devices = job_devices(config)
    model, notes = _model(item, config)
    policies, faults = policies_of(item, config)
    raise_if_any(faults, error=ConfigError, title=config.where())
    return Plan(
        devices=devices,
        mode=config.mode,
        strategy=strategy,
        graph_digest=graph_digest(item.graph),
        mesh=_mesh(config, len(devices)),
        semantics=messages.Semantics(**config.semantics.model_dump()),
        timeout_seconds=config.timeout_seconds,
        batch_inputs=tuple(
            messages.BatchInput(name, axis, whole=_is_made_alike(item, item.inputs[name], config))
            for name, axis in _batch_axes(item, config).items()
        ),
        default=default_options(config),
        variables=tuple(_variable_requests(item, config)),
        micro=_micro(item, config),
        pipeline=_pipeline(config, len(devices)),
        remat=_remat(item, config),
        model=model,
        passes=own_passes(config),
        ops=own_ops(item, config),
        policies=policies,
        local_sgd=messages.LocalSgd(**config.local_sgd.model_dump()) if config.local_sgd is not None else None,
        steps_per_run=config.steps_per_run if config.steps_per_run > 1 else 0,
        notes=(*_idle_devices(config), *notes),
        padding=_PADDINGS[config.padding],
    )


def _idle_devices(config: Config) -> Iterator[str]:
    if config.idle_devices:
        idle = ", ".join(short(device) for device in config.idle_devices)
        yield f"{config.where('device_assignment')}: {idle} stay idle: no replica of the device_assignment has them"


def _mesh(config: Config, replicas: int) -> tuple[messages.Axis, ...]:
    data = messages.Axis("data", replicas)
    return (data, messages.Axis("model", config.model_size)) if config.model_size > 1 else (data,)


def _model(item: TrainingGraph, config: Config) -> tuple[messages.Model | None, list[str]]:
    """The model axis, with the variables and tensors that are placed on it by hand, and notes on them.

    Raises:
        ConfigError: with every entry of `sharding` that names nothing, and every impossible placement.
    """
    if config.mesh is None or config.model_size == 1:
        said = next(annotations_of(item), None)
        return None, [] if said is None else [f"{said.said}: {UNUSED}"]
    shardings, faults, notes = placed_by_hand(item, config)
    raise_if_any(faults, error=ConfigError, title=config.where())
    return messages.Model(config.mesh.model_axes, _of_all_workers(config), shardings), notes


def _micro(item: TrainingGraph, config: Config) -> messages.Micro | None:
    if config.pipeline is not None:
        count = _microbatches(item, config, config.pipeline)
        return messages.Micro(count, config.pipeline.layout, loop=config.pipeline.form == "loop")
    if config.microbatches == 1:
        return None
    how = config.accumulation
    return messages.Micro(config.microbatches, how.layout, how.uneven == "allow", how.form == "loop")


def _microbatches(item: TrainingGraph, config: Config, pipeline: Pipeline) -> int:
    """How many micro-batches go through the stages.

    Raises:
        ConfigError: only their size is given, and the batch cannot be divided by it.
    """
    if pipeline.microbatch_size is None:
        return pipeline.microbatches or config.microbatches
    axes = [(info.shape, info.batch_axis) for info in item.inputs.values()]
    batch = next((shape[axis] for shape, axis in axes if shape is not None and axis is not None and shape[axis]), None)
    each = pipeline.microbatch_size * len(job_devices(config))
    if batch is None or batch % each:
        size = "not known before a step" if batch is None else str(batch)
        message = f"pipeline.microbatch_size is {pipeline.microbatch_size}, but the size of the batch is {size}"
        fault = config.fault(("pipeline", "microbatch_size"), message, "say how many there are: pipeline.microbatches")
        raise_if_any([fault], error=ConfigError, title=config.where())
    return (batch or 0) // each


def _pipeline(config: Config, replicas: int) -> messages.Pipeline | None:
    section = config.pipeline
    if section is None:
        return None
    given, devices = config.replica_devices(), section.devices or ()
    if config.is_driven:
        devices = devices or _of_all_workers(config, config.model_size)
    elif not devices:
        defaults = tuple(canonical(f"CPU:{stage}") for stage in range(section.stages))
        devices = defaults if len(given) % section.stages else given[:: config.model_size]
    schedule = "one_f_one_b" if section.schedule == "1f1b" else section.schedule
    if section.form == "loop":
        schedule = "circular" if section.circular_repeat > 1 else "gpipe"
    return messages.Pipeline(
        section.chunks,
        devices if len(devices) > section.stages else devices * replicas,
        schedule,
        section.boundaries or (),
        section.names or (),
        section.assign,
    )


def _remat(item: TrainingGraph, config: Config) -> messages.Remat | None:
    section = config.remat
    offload = "" if section.offload == "none" else section.offload
    nodes = item.graph.nodes.values()
    if "policy" not in section.model_fields_set and has_segments((node.name, node.attrs) for node in nodes):
        return messages.Remat("marked", section.names, stages=section.stages, offload=offload)
    policy, _, size = section.policy.partition(":")
    if policy == "none" and not offload:
        return None
    stated = f"budget:{read_size(size)}" if policy == "budget" else section.policy
    return messages.Remat(stated, section.names, section.scopes, section.stages, offload)


def job_devices(config: Config) -> tuple[str, ...]:
    """The devices of all replicas, worker by worker; those of other processes under their full names.

    Raises:
        ConfigError: the configuration names no devices.
    """
    if config.is_driven:
        named, stages = None, 1
        if config.pipeline is not None:
            named, stages = config.pipeline.devices, config.pipeline.stages
        return named[:1] if named is not None else _of_all_workers(config, stages * config.model_size)
    own = config.replicas
    if config.workers == 1 and not (config.cluster is not None and config.cluster.ps):
        return own
    return tuple(on_task(device, "worker", task) for task in range(config.workers) for device in own)


def _of_all_workers(config: Config, every: int = 1) -> tuple[str, ...]:
    """Every `every`-th of the devices of all workers, worker by worker."""
    own = config.replica_devices()
    if config.workers > 1:
        own = tuple(on_task(device, "worker", task) for task in range(config.workers) for device in own)
    return own[::every]


def _batch_axes(item: TrainingGraph, config: Config) -> dict[str, int]:
    """Return the axis of the examples of each batch input.

    Where no input is known to be a batch, the values that an iterator draws are: data that is batched with
    drop_remainder has a static number of examples. With several processes, that could be the whole batch or a part.
    """
    axes = {name: tensor.batch_axis for name, tensor in item.inputs.items() if tensor.batch_axis is not None}
    if axes or config.workers > 1:
        return axes
    nodes = item.graph.nodes
    drawn = {
        name: tensor.shape[0]
        for name, tensor in item.inputs.items()
        if tensor.shape
        and (node := nodes.get(tensor.tensor.partition(":")[0])) is not None
        and has(node.op, "elements")
    }
    return dict.fromkeys(drawn, 0) if len(set(drawn.values())) == 1 else {}


def _is_made_alike(item: TrainingGraph, tensor: TensorInfo, config: Config) -> bool:
    """Whether an input comes from an iterator in the graph of each process; other inputs are fed."""
    if config.workers == 1 or config.input == "per_worker" or config.is_driven:
        return False
    nodes = item.graph.nodes
    made = nodes.get(tensor.tensor.partition(":")[0])
    if made is None or not made.op.startswith("IteratorGetNext"):
        return False
    handle = nodes.get(made.inputs[0].name.partition(":")[0])
    return handle is not None and not handle.op.startswith("Placeholder")


def default_options(config: Config) -> messages.Options:
    """The options of every reduction, from the strategy section."""
    section = config.strategy
    compressor = plan_name(config, section.compressor, "strategy", "compressor")
    return messages.Options("all_reduce", section.hint, compressor, _bucket_bytes(config))


def _bucket_bytes(config: Config) -> int:
    """The configured size; else the bytes that the configured network carries in a millisecond, up to the default.

    A collective takes about as long to start: on a slow link, gradients that are ready early should be sent early.
    """
    section, network = config.strategy, config.cluster.network if config.cluster is not None else None
    if network is None or "bucket_bytes" in section.model_fields_set:
        return section.bucket_bytes
    carried = int(network.bandwidth_gbps * _GIGABIT * _BUCKET_SECONDS)
    return min(max(carried, _LEAST_BUCKET), section.bucket_bytes)


def override_of(variable: str, config: Config) -> Override | None:
    """The first override whose pattern matches the whole name."""
    return next((o for o in config.variables if matches(o.match, variable)), None)


def _variable_requests(item: TrainingGraph, config: Config) -> Iterator[messages.VariableRequest]:
    """One for each variable that an override names, or that is not declared as untrained."""
    default = default_options(config)
    for name, variable in item.variables.items():
        override = override_of(name, config)
        if override is None and variable.trainable is False:
            continue
        yield messages.VariableRequest(name, options=_overridden(default, override, config))


def _overridden(options: messages.Options, override: Override | None, config: Config) -> messages.Options:
    if override is None:
        return options
    said = override.model_dump(include={"hint", "compressor", "bucket_bytes"}, exclude_none=True)
    if "compressor" in said:
        place = ("variables", config.variables.index(override), "compressor")
        said["compressor"] = plan_name(config, said["compressor"], *place)
    return replace(options, **said)
