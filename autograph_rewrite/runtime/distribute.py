"""`ar.distribute`: a function or a Keras model that trains on many devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.quiet import no_garbage_collection
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.normal import normalise_original
from autograph_rewrite.passes import coverage, pipeline
from autograph_rewrite.passes.idle import with_idle_settings
from autograph_rewrite.passes.place import needed_devices, run_devices
from autograph_rewrite.plan import check
from autograph_rewrite.plan.chosen import chosen
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.devices import parse
from autograph_rewrite.plan.items import graph_digest
from autograph_rewrite.plan.membership import Membership, in_job
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.agreement import contents
from autograph_rewrite.runtime.cluster import join
from autograph_rewrite.runtime.devices import ensure_devices, present_devices
from autograph_rewrite.runtime.function import DistributedFunction
from autograph_rewrite.runtime.keras_job import KerasJob
from autograph_rewrite.runtime.serve import serve
from autograph_rewrite.runtime.served_step import stand_alone, with_proxies, without_servers, without_shards

ConfigLike = Config | Mapping[str, Any] | str | Path


def distribute(
    target: Any,
    config: ConfigLike | Plan | None = None,
    *specs: Any,
    batch_inputs: Mapping[str, int | None] | None = None,
    **named_specs: Any,
) -> Any:
    """Distribute a function or a compiled Keras model. See `api.distribute`.

    Raises:
        ConfigError: specs were given for a model.
        GraphError: the function or the model is distributed already.
    """
    rewriter = Rewriter(config)
    ensure_devices(rewriter.devices)
    if _is_keras_model(target):
        from autograph_rewrite.runtime.keras import distribute_keras

        if specs or named_specs:
            raise ConfigError(
                "a Keras model needs no specs: it is traced for the data that it is given",
                hint="ar.distribute(model, config)",
            )
        return distribute_keras(target, rewriter, batch_inputs=batch_inputs, job=rewriter.keras_job(batch_inputs))
    if isinstance(target, DistributedFunction):
        name = getattr(target, "__name__", "step")
        raise GraphError(f"the function '{name}' is already distributed", hint="distribute the original function")
    return DistributedFunction(target, rewriter, specs or None, named_specs, batch_inputs=batch_inputs)


def _is_keras_model(target: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(target, keras.Model)


class Rewriter:
    """Distributes traced items as one config or plan says.

    Replicas that share their variables and run on CPUs of this process are all put on one: virtual devices have no
    cores or memory of their own, so crossing from one to another only costs time.

    Attributes:
        devices: one per replica of this process.
        member: its place in a job of several processes.
    """

    def __init__(self, config: ConfigLike | Plan | None) -> None:
        given = chosen(config)
        self._plan = given if isinstance(given, Plan) else None
        self._config = given if isinstance(given, Config) else None
        self.member: Membership | None = None
        if self._config is not None:
            self._config, self.member = in_job(self._config)
        elif self._plan is not None and self._plan.workers > 1:
            self.member = in_job(Config())[1]
        if self.member is not None and not self.member.is_worker:
            serve(self.member, given.timeout_seconds)
        if self.member is not None:
            join(self.member)
        self.devices = self._own_devices()

    def _own_devices(self) -> tuple[str, ...]:
        if self._plan is not None:
            needed = needed_devices if self._plan.stage_hosts else run_devices
            return needed(self._plan, self._task)
        assert self._config is not None
        if self._config.devices is None:
            logical = tensorflow().config.list_logical_devices if self.member is None else None
            names = [device.name for device in logical()] if logical is not None else present_devices()
            self._config = self._config.with_devices(names)
        self._config.require_usable()
        own = self._config.replica_devices()
        return own if self._config.has_stages_on_hosts else _placed(own, self._config.mode)

    def keras_job(self, batch_inputs: Mapping[str, int | None] | None) -> KerasJob | None:
        """Return what this worker does differently with a model; None where there is only one process."""
        if self.member is None:
            return None
        said = self._config or self._plan
        assert said is not None
        splits = self._config is None or self._config.input == "global"
        has_stages = said.has_stages_on_hosts if isinstance(said, Config) else bool(said.stage_hosts)
        whole = ("train",) if has_stages else ()
        return KerasJob(self.member, said.timeout_seconds, splits=splits, batch_inputs=batch_inputs, whole=whole)

    @property
    def _task(self) -> int:
        return self.member.task if self.member is not None else 0

    def __call__(self, item: GraphItem, *, training: bool = True) -> GraphItem:
        """Return the distributed item.

        Raises:
            RewriteError: as `api.rewrite`.
        """
        from autograph_rewrite.strategies import builder_for

        with no_garbage_collection():
            flat = normalise_original(item)
            if self._plan is not None:
                check.require(replace(self._plan, edges=()), flat)  # its edges are checked once the graph is analysed
                plan = self._plan
            else:
                assert self._config is not None
                plan = builder_for(self._config).build(flat, self._config)
                check.require(plan, flat)
            if self.member is not None:
                plan = without_shards(plan)
            if not training:
                plan = plan.without_stages()
            is_remote = bool(plan.homes or plan.stage_hosts) and self.member is not None
            if is_remote:
                flat, plan = _served(flat, plan) if training else (flat, without_servers(plan))
            common = contents(flat) if self.member is not None else b""
            new = pipeline.rewrite(flat, plan, training=training, in_place=True, task=self._task)
            if self._config is not None and training:
                new = with_idle_settings(new, self._config, flat)
            place = (self._config or plan).where("semantics", "min_coverage")
            covered = replace(new.report.covered, place=place)
            if training and self.member is not None:  # of one process, once the first batch is there
                coverage.require(covered)
            report = replace(new.report, member=self.member, contents=common, covered=covered)
            return new.with_(report=report, binding=item.binding if is_remote and training else new.binding)


def _served(item: GraphItem, plan: Plan) -> tuple[GraphItem, Plan]:
    """Return an item and its plan for a step that runs in a session."""
    alone = stand_alone(item)
    return alone, replace(with_proxies(plan), graph_digest=graph_digest(alone.graph))


def _placed(devices: tuple[str, ...], mode: str) -> tuple[str, ...]:
    """Return where the replicas run."""
    parsed = [parse(device) for device in devices]
    if mode == "shared" and all(device.kind == "CPU" and device.job is None for device in parsed):
        return ("/device:CPU:0",) * len(devices)
    return devices
