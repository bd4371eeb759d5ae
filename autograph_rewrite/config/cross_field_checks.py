"""Validate the configuration across fields: find impossible combinations of valid settings, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autograph_rewrite.config.device_assignment import problem_of
from autograph_rewrite.diagnostics.located_yaml import Finding, KeyPath
from autograph_rewrite.ir.types.device_names import parse, repeated, short

if TYPE_CHECKING:
    from autograph_rewrite.config.config import Config


def replicas_have_a_device(config: Config) -> Iterator[Finding]:
    """`devices`, when given, names at least one."""
    if config.devices == ():
        yield Finding(("devices",), "devices is empty: there must be a replica", "name one, as in [CPU:0]")


def workers_are_there_once(config: Config) -> Iterator[Finding]:
    """A cluster has workers, and no two processes listen at one address."""
    if config.cluster is None:
        return
    if not config.cluster.workers:
        yield Finding(("cluster", "workers"), "cluster.workers is empty: there must be a worker", "name one")
    for address in repeated((*config.cluster.workers, *config.cluster.ps)):
        message = f"the address {address} stands twice in cluster: two processes cannot listen at one"
        yield Finding(("cluster", "workers"), message, "give each its own port")


def mirrored_devices_are_distinct(config: Config) -> Iterator[Finding]:
    """A collective whose members share a device waits for ever."""
    if config.mode != "mirrored":
        return
    for device in repeated(config.devices or ()):
        assert config.devices is not None
        second = config.devices.index(device, config.devices.index(device) + 1)
        yield Finding(
            ("devices", second),
            f"{short(device)} stands twice in devices, but mirrored variables live on distinct devices: "
            "a collective with two members on one device never ends",
            "name N distinct devices, or set strategy.variables to shared",
        )


def one_thing_says_where_replicas_are(config: Config) -> Iterator[Finding]:
    """Only one of device_assignment and mesh is given, and an assignment fits the devices."""
    if config.device_assignment is None or config.is_assigned:
        return
    path = ("device_assignment",)
    if config.mesh is not None:
        message = "device_assignment and mesh both say which devices are replicas"
        yield Finding(path, message, "leave one of them out")
        return
    problem = problem_of(config.device_assignment, len(config.devices or ()), config.stages_in_a_row)
    if problem is not None:
        yield Finding((*path, *problem.path), f"device_assignment.{problem.path[0]}: {problem.message}", problem.hint)


def mesh_may_cover_the_devices(config: Config) -> Iterator[Finding]:
    """The axes of the mesh multiply to the number of devices; without named workers, to that of a job of some size.

    TF_CONFIG tells the number of workers later, when the configuration is used.
    """
    if config.mesh is None or not config.devices:
        return
    mesh, own = config.mesh, len(config.replicas)
    is_multiple = mesh.data is not None and mesh.data * mesh.model_size % own == 0
    if (config.cluster is not None and config.pipeline is None) or not is_multiple:
        yield from mesh_covers_the_devices(config)


def mesh_covers_the_devices(config: Config) -> Iterator[Finding]:
    """The axes of the mesh, and the stages, multiply to the number of devices of all workers together."""
    if config.mesh is None or not config.devices:
        return
    if config.mesh.stage not in (None, config.pipeline.stages if config.pipeline is not None else 1):
        yield Finding(("mesh", "stage"), f"mesh.stage is {config.mesh.stage}, not pipeline.stages", "leave it out")
    mesh, devices = config.mesh, len(config.devices) * config.workers
    stages = config.stages_in_a_row if devices // config.model_size % config.stages_in_a_row == 0 else 1
    if mesh.data is None and devices % mesh.model_size:
        message = f"mesh.model is {mesh.model_size}, which {devices} devices cannot be divided by"
        yield Finding(("mesh",), message, "change either")
    if mesh.data is not None and mesh.data * mesh.model_size * stages != devices:
        times_stages = f" x {stages} stages" if stages > 1 else ""
        message = f"mesh has data {mesh.data} x model {mesh.model_size}{times_stages}, but there are {devices} devices"
        yield Finding(("mesh",), message, "the axes must multiply to the number of devices")


def overrides_fit_their_synchronizer(config: Config) -> Iterator[Finding]:
    """Staleness and proxies belong to parameter servers."""
    for i, override in enumerate(config.variables):
        if override.synchronizer == "all_reduce":
            for key in override.server_settings:
                message = f"variables[{i}].{key} belongs to parameter servers; an all-reduce has none"
                yield Finding(("variables", i, key), message, "set synchronizer to ps, or leave it out")
        if override.staleness and not override.sync:
            message = f"variables[{i}].staleness bounds how far replicas drift, but sync: false sets no bound"
            yield Finding(("variables", i, "staleness"), message, "leave one of them out")


def partitions_count_their_parts(config: Config) -> Iterator[Finding]:
    """Over `data` there are as many parts as replicas; otherwise `shards` gives their number."""
    for i, override in enumerate(config.variables):
        partition, path = override.partition, ("variables", i, "partition")
        if partition is None:
            continue
        where = f"variables[{i}].partition"
        if partition.over == "data" and partition.shards is not None:
            message = f"{where} has shards: {partition.shards}, but over data there is one for each replica"
            yield Finding((*path, "shards"), message, "leave it out")
        if partition.over == "data" and override.synchronizer == "ps":
            message = f"{where} is over data, where replicas hold the parts, but its synchronizer is ps"
            yield Finding(path, message, "leave one of them out")
        if partition.over == "shard" and partition.shards is None:
            yield Finding(path, f"{where} does not say into how many parts", "add shards, or over: data")
        if partition.over == "shard" and partition.stage is not None:
            yield Finding((*path, "stage"), f"{where}.stage says what is split over data", "add over: data")


def shardings_say_one_thing(config: Config) -> Iterator[Finding]:
    """A tensor is split (by numbers of parts, or by axes), replicated or on one device."""
    for i, sharding in enumerate(config.sharding):
        said = (sharding.split, sharding.axes, sharding.device, sharding.assign)
        asked = sharding.replicate + sum(one is not None for one in said)
        if asked != 1:
            message = f"sharding[{i}] must say exactly one of split, axes, replicate and device, not {asked}"
            yield Finding(("sharding", i), message, "for example split: [1, 2]")


def remat_names_go_with_their_policy(config: Config) -> Iterator[Finding]:
    """One policy each reads `names` and `scopes`; `offload` reads `names`, too."""
    if config.remat.offload == "names" and not config.remat.names:
        yield Finding(("remat", "offload"), "remat.offload: names needs remat.names", "list patterns of tensors")
    for key, what in (("names", "tensors to keep"), ("scopes", "name scopes to compute again")):
        given = getattr(config.remat, key)
        if given and config.remat.policy != key and config.remat.offload != key:
            message = f"remat.{key} is read by the policy '{key}', not by '{config.remat.policy}'"
            yield Finding(("remat", key), message, f"set remat.policy to {key}")
        if config.remat.policy == key and not given:
            yield Finding(("remat",), f"the policy '{key}' needs remat.{key}", f"list patterns of {what}")


def components_have_replicas_of_their_own(config: Config) -> Iterator[Finding]:
    """Where each replica has a component of a variable, replicas are single devices without micro-batches."""
    parts = [
        ("microbatches", config.microbatches > 1, "is cut into micro-batches"),
        ("pipeline", config.pipeline is not None, "is a pipeline of stages"),
        ("mesh", config.mesh is not None and config.mesh.model_size > 1, "has several logical devices"),
    ]
    for i, policy in enumerate(config.variable_policies):
        independent = policy.synchronization == "on_write" and policy.aggregation == "none"
        for key, is_cut, what in parts:
            if is_cut and (policy.synchronization == "on_read" or independent):
                given = f"variable_policies[{i}] gives each replica a component of '{policy.match}'"
                message = f"{given}, and here a replica {what}"
                yield Finding(("variable_policies", i), message, f"leave {key} out, or aggregate on_write")


def replicas_that_train_alone_have_all_of_it(config: Config) -> Iterator[Finding]:
    """With `local_sgd` each replica is one device with every variable, and only averages cross."""
    if config.local_sgd is None:
        return
    asked: list[tuple[KeyPath, bool, str]] = [
        (("strategy", "name"), config.strategy.name != "AllReduce", f"the strategy {config.strategy.name}"),
        (("strategy", "variables"), config.mode == "shared", "variables that replicas share"),
        (("strategy", "compressor"), config.strategy.compressor != "none", "a compressor, which is for gradients"),
        (("pipeline",), config.pipeline is not None, "stages"),
        (("microbatches",), config.microbatches > 1, "micro-batches"),
        (("mesh",), config.mesh is not None and config.mesh.model_size > 1, "several devices of a replica"),
        (("variable_policies",), bool(config.variable_policies), "policies of variables"),
        (("remat",), config.remat.policy != "none" or config.remat.offload != "none", "rematerialisation"),
        (("cluster", "ps"), config.cluster is not None and bool(config.cluster.ps), "parameter servers"),
    ]
    for i, override in enumerate(config.variables):
        asked += [
            (("variables", i, "synchronizer"), override.synchronizer == "ps", "a parameter server"),
            (("variables", i, "partition"), override.partition is not None, "a variable in parts"),
            (("variables", i, "compressor"), override.compressor not in (None, "none"), "a compressor"),
        ]
    for path, is_asked, what in asked:
        if is_asked:
            message = f"local_sgd lets each replica train all variables by itself, not with {what}"
            yield Finding(path, message, "leave one of them out")


# Pipelines: impossible combinations of stages, schedules and workers.


def stages_share_variables(config: Config) -> Iterator[Finding]:
    """Replicas of a pipeline share variables; in one process, without a loop, each may have a copy."""
    pipeline, is_mirrored = config.pipeline, config.mode == "mirrored"
    if pipeline is not None and is_mirrored and (config.workers > 1 or pipeline.form == "loop"):
        where = "in a job" if config.workers > 1 else "in a loop (pipeline.form)"
        message = f"stages {where} hold one copy of each variable, and strategy.variables is mirrored"
        yield Finding(("pipeline",), message, "set strategy.variables to shared")
    if config.strategy.name == "Pipeline" and config.pipeline is None:
        yield Finding(("strategy", "name"), "strategy.name is Pipeline, and there is no pipeline section", "add one")


def schedules_come_out_even(config: Config) -> Iterator[Finding]:
    """The interleaved schedule works in rounds of as many micro-batches as there are stages."""
    pipeline = config.pipeline
    if pipeline is None:
        return
    looped, said = pipeline.form == "loop", "schedule" in pipeline.model_fields_set
    if looped and said and pipeline.schedule not in ("gpipe", "circular"):
        message = (
            f"pipeline.form is loop, which runs all forwards before all backwards, not as {pipeline.schedule} says"
        )
        yield Finding(("pipeline", "schedule"), message, "leave schedule out, or set form to unrolled")
    elif (said or not looped) and pipeline.circular_repeat > 1 and pipeline.schedule in ("gpipe", "1f1b"):
        message = (
            f"pipeline.circular_repeat is {pipeline.circular_repeat}, but {pipeline.schedule} has one stage per device"
        )
        yield Finding(("pipeline", "circular_repeat"), message, "use the schedule interleaved or circular")
    if pipeline.microbatches is not None and pipeline.microbatch_size is not None:
        message = "pipeline.microbatches and pipeline.microbatch_size say the same thing twice"
        yield Finding(("pipeline", "microbatch_size"), message, "leave one of them out")
    for key, wanted in (("boundaries", pipeline.chunks - 1), ("names", pipeline.chunks)):
        given = getattr(pipeline, key)
        if given is not None and len(given) != wanted:
            message = f"pipeline.{key} has {len(given)} entries; {pipeline.chunks} stages need {wanted}"
            yield Finding(("pipeline", key), message, "change either")
    if pipeline.boundaries is not None and pipeline.names is not None:
        message = "pipeline.boundaries and pipeline.names both say where stages begin"
        yield Finding(("pipeline", "names"), message, "leave one of them out")
    if pipeline.schedule == "interleaved" and (pipeline.microbatches or 0) % pipeline.stages:
        message = (
            f"pipeline.microbatches ({pipeline.microbatches}) must be a multiple of pipeline.stages "
            f"({pipeline.stages}) for the interleaved schedule"
        )
        yield Finding(("pipeline",), message, "change either, or use 1f1b")
    if pipeline.devices is not None and len(pipeline.devices) != pipeline.stages:
        message = f"pipeline.devices names {len(pipeline.devices)} devices for {pipeline.stages} stages"
        yield Finding(("pipeline", "devices"), message, "name one device per stage")


def stages_fit_the_workers(config: Config) -> Iterator[Finding]:
    """Every worker of a job has a stage, and all stages have a worker."""
    section = config.pipeline
    if section is None or not config.is_driven:
        return
    if config.input == "per_worker":
        message = "input is per_worker, but stages are no replicas: every worker is given the whole batch"
        yield Finding(("input",), message, "leave it out")
    workers, own = config.workers, len(config.devices or ())
    if section.devices is None:
        if own and workers * own % section.stages:
            message = f"pipeline.stages is {section.stages}, but the {workers} workers have {workers * own} devices"
            hint = "start as many workers as there are stages, or a multiple of them: that makes replicas"
            yield Finding(("pipeline", "stages"), message, hint)
        return
    tasks = set()
    for i, name in enumerate(section.devices):
        device = parse(name)
        tasks.add(device.task)
        if device.job != "worker" or device.task >= workers:
            message = f"{short(name)} is no device of the {workers} workers that pipeline.devices can name"
            yield Finding(("pipeline", "devices", i), message, "write /job:worker/task:0/device:CPU:0 and so on")
    if idle := sorted({*range(workers)} - tasks):
        message = f"pipeline.devices gives worker {idle[0]} no stage"
        yield Finding(("pipeline", "devices"), message, "start fewer workers, or name a device of each")


def stages_fit_the_devices(config: Config) -> Iterator[Finding]:
    """In one process `devices` are as many as the stages, or a multiple; one CPU stands for as many as needed.

    A job has a stage on `CPU:0` of each worker, and the same configuration can be tried in one process.
    """
    section, devices = config.pipeline, config.devices or ()
    if section is None or config.is_driven or section.devices is not None or not devices:
        return
    needed, is_one_cpu = section.stages * config.model_size, len(devices) == 1 and parse(devices[0]).kind == "CPU"
    if len(devices) % needed and not is_one_cpu:
        along = f" and mesh.model is {config.model_size}" if config.model_size > 1 else ""
        message = f"pipeline.stages is {section.stages}{along}, devices are {len(devices)}"
        hint = f"give {needed} devices, or a multiple of {needed} for replicas"
        yield Finding(("pipeline", "stages"), message, hint)


def remat_stages_are_there(config: Config) -> Iterator[Finding]:
    """`remat.stages` numbers stages of the pipeline."""
    if not config.remat.stages:
        return
    if config.pipeline is None:
        yield Finding(("remat", "stages"), "remat.stages numbers stages, and there is no pipeline", "leave it out")
        return
    beyond = [stage for stage in config.remat.stages if stage >= config.pipeline.chunks]
    if beyond:
        message = f"remat.stages names stage {beyond[0]}, and the pipeline has {config.pipeline.chunks}, from 0 on"
        yield Finding(("remat", "stages"), message, f"name stages from 0 to {config.pipeline.chunks - 1}")


# Each with the keys that it reads: it is skipped if one of these is wrong by itself.
CHECKS: tuple[tuple[frozenset[str], Callable[[Config], Iterator[Finding]]], ...] = (
    (frozenset({"devices"}), replicas_have_a_device),
    (frozenset({"cluster"}), workers_are_there_once),
    (frozenset({"devices", "strategy", "cluster"}), mirrored_devices_are_distinct),
    (frozenset({"microbatches", "strategy", "cluster", "pipeline"}), stages_share_variables),
    (frozenset({"devices", "mesh", "device_assignment"}), one_thing_says_where_replicas_are),
    (frozenset({"devices", "mesh", "cluster"}), mesh_may_cover_the_devices),
    (frozenset({"pipeline"}), schedules_come_out_even),
    (frozenset({"variables"}), overrides_fit_their_synchronizer),
    (frozenset({"variables"}), partitions_count_their_parts),
    (frozenset({"sharding"}), shardings_say_one_thing),
    (frozenset({"variable_policies", "microbatches", "pipeline", "mesh"}), components_have_replicas_of_their_own),
    (
        frozenset({"local_sgd", "strategy", "cluster", "pipeline", "microbatches", "mesh", "variables", "remat"})
        | {"variable_policies"},
        replicas_that_train_alone_have_all_of_it,
    ),
    (frozenset({"remat"}), remat_names_go_with_their_policy),
    (frozenset({"remat", "pipeline"}), remat_stages_are_there),
)

# Checks that need the known job.
IN_JOB: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    mesh_covers_the_devices,
    stages_fit_the_workers,
    stages_fit_the_devices,
)


# Valid settings that this version does not support: rejected at their line, never ignored.


def unavailable(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Each setting of `config` that asks for a future feature, with the name of the feature."""
    if (
        config.remat.policy.startswith("budget")
        and config.pipeline is not None
        and config.pipeline.chunks != config.pipeline.stages
    ):
        yield ("remat", "policy"), f"remat.policy {config.remat.policy} with several stages per device"
