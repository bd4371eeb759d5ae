"""Validate pipelines across fields: find impossible combinations of stages, schedules and workers, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autograph_rewrite.diagnostics.located_yaml import Finding
from autograph_rewrite.ir.types.device_names import parse, short

if TYPE_CHECKING:
    from autograph_rewrite.config.config import Config


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
