"""`ar.distribute`: make a function or a Keras model train on many devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autograph_rewrite.cluster.membership import with_local_devices
from autograph_rewrite.compile import Job, compile_item, request
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.load.keras_library import is_legacy, is_model
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.plan.parts.graph_digest import graph_digest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import needed_devices, run_devices
from autograph_rewrite.plan.selected import chosen
from autograph_rewrite.resolve import coverage
from autograph_rewrite.runtime.function.function import DistributedFunction
from autograph_rewrite.runtime.function.session_step import (
    stand_alone,
    with_proxies,
    without_servers,
    without_shards,
)
from autograph_rewrite.runtime.job.job_memory import JobMemory, require_alike
from autograph_rewrite.runtime.job.logical_devices import ask_for_devices, devices_of, ensure_devices
from autograph_rewrite.runtime.job.own_loop import FunctionSteps, keep_steps, kept_loop
from autograph_rewrite.runtime.job.parameter_server import serve_if_server
from autograph_rewrite.runtime.job.tf_server import be_patient, join
from autograph_rewrite.runtime.keras_fit import make_elastic, make_preemptible, seed
from autograph_rewrite.runtime.keras_workers import KerasJob
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph

ORDERED = "buckets of gradients are filled in the order in which worker 0 had them ready in the first steps"


def distribute(
    target: Any,
    config: ConfigLike | Plan | None = None,
    *specs: Any,
    batch_inputs: Mapping[str, int | None] | None = None,
    **named_specs: Any,
) -> Any:
    """Distribute a function or a compiled Keras model. See `api.distribute`.

    Args:
        config: file, dict, `Config` or plan.
        *specs: `tf.TensorSpec`s to trace a function for at once.
        batch_inputs: axis of the examples by input; None for an input without one.
        **named_specs: the same for keyword arguments.

    Raises:
        ConfigError: specs were given for a model.
        GraphError: the target is neither a function nor a model, or it is distributed already.
    """
    if not callable(target) or isinstance(target, type):  # a model can be called, too
        hint = "give a compiled Keras model, or a function that runs one training step; ar.rewrite takes a GraphItem"
        raise GraphError(f"ar.distribute cannot distribute {_described(target)}", hint=hint)
    rewriter = Rewriter(config)
    ensure_devices(rewriter.devices)
    if is_model(target):
        if specs or named_specs:
            raise ConfigError(
                "a Keras model needs no specs: it is traced for the data that it is given",
                hint="ar.distribute(model, config)",
            )
        return _distributed_model(target, rewriter, batch_inputs)
    name = getattr(target, "__name__", "step")
    if isinstance(target, DistributedFunction):
        raise GraphError(f"the function '{name}' is already distributed", hint="distribute the original function")
    loop = kept_loop()
    return DistributedFunction(
        target,
        rewriter,
        specs or None,
        named_specs,
        batch_inputs=batch_inputs,
        steps=rewriter.steps_per_run,
        elastic=FunctionSteps(loop, name) if loop is not None else None,
    )


def _described(target: Any) -> str:
    return f"the class {target.__name__}" if isinstance(target, type) else f"an object of type {type(target).__name__}"


def _distributed_model(model: Any, rewriter: Rewriter, batch_inputs: Mapping[str, int | None] | None) -> Any:
    """Distribute a model; make its `fit` survive the loss of workers in an elastic job, and stops in others."""
    from autograph_rewrite.runtime.keras_model import average_in_fit, distribute_keras

    memory = JobMemory.here()
    if memory is not None:
        if is_legacy(model):
            raise GraphError(
                f"the model '{model.name}' is one of tf_keras, whose `fit` cannot go on in an elastic job",
                hint="launch without --elastic and keep the fit with BackupAndRestore, or distribute a training loop",
            )
        seed(memory)
    job = rewriter.keras_job(batch_inputs)
    model = distribute_keras(model, rewriter, batch_inputs, job, rewriter.steps_per_run)
    if rewriter.given.local_sgd is not None:
        average_in_fit(model)
    if memory is not None:
        make_elastic(model, memory, rewriter.snapshot_steps)
        kept_loop()  # for a loop around `train_on_batch`
    elif not is_legacy(model):  # tf_keras' BackupAndRestore has `save_freq`
        make_preemptible(model, rewriter.member, rewriter.given.timeout_seconds)
    return model


def traces_of(target: Any) -> tuple[RewrittenTrace, ...]:
    """Return the rewritten graphs of a distributed function or model, with their originals, training first.

    Raises:
        GraphError: the target is not distributed, or has run no step yet.
    """
    if isinstance(target, DistributedFunction):
        functions, kind = [target], "function"
    elif is_model(target):
        from autograph_rewrite.runtime.keras_model import functions_of

        functions, kind = functions_of(target), "model"
    else:
        hint = "give an item, what ar.distribute has returned, or what it takes with specs=(...)"
        raise GraphError(f"nothing was rewritten of an object of type {type(target).__name__}", hint=hint)
    found = tuple(trace for function in functions for trace in function.traces)
    if not found:
        problem = f"the {kind} has run no step on several devices yet"
        raise GraphError(problem, hint="run a step of what ar.distribute returns, or give specs=(...)")
    return found


class Rewriter:
    """Distributes traced items by one configuration or plan.

    Replicas that share their variables and run on CPUs of this process all use one device: virtual devices have no
    separate cores or memory, so a transfer between them only costs time.

    Attributes:
        devices: one per replica of this process.
        given: the configuration or plan.
        member: the membership of this process; None where it is the only one.
        steps_per_run: how many steps a call or run does at most.
        snapshot_steps: how many steps there are from one snapshot of an elastic job to the next.
    """

    def __init__(self, config: ConfigLike | Plan | None) -> None:
        self._job = job = Job.of(chosen(config))
        serve_if_server(job.member, job.given.timeout_seconds)
        if job.member is not None:
            join(job.member)
            be_patient(job.member, job.given.timeout_seconds)
        keep_steps(job.config.snapshot_steps if job.config is not None else None)
        require_alike(trains_alone=job.given.local_sgd is not None)
        if job.config is not None:
            self._job = replace(job, given=with_local_devices(job.config))
        self.member, self.given = job.member, self._job.given
        given = self.given
        self.steps_per_run = max(1, given.steps_per_run)
        self.snapshot_steps = (job.config if job.config is not None else Config()).snapshot_steps
        if isinstance(given, Plan):
            self.devices = self._devices_of(given)
        else:
            given.require_usable()
            ask_for_devices(given)
            self.devices = devices_of(given)
        self._is_of_model_in_job = False

    def _devices_of(self, plan: Plan) -> tuple[str, ...]:
        return (needed_devices if plan.is_driven else run_devices)(plan, self._job.task)

    def keras_job(self, batch_inputs: Mapping[str, int | None] | None) -> KerasJob | None:
        """Return the worker's side of a distributed model's job; None where there is only one process."""
        if self.member is None:
            return None
        self._is_of_model_in_job = True
        given = self.given
        splits = isinstance(given, Plan) or given.input == "global"
        whole = ("train",) if given.is_driven else ()
        return KerasJob(self.member, given.timeout_seconds, splits=splits, batch_inputs=batch_inputs, whole=whole)

    def __call__(
        self, item: TrainingGraph, *, training: bool = True, bucket_order: Sequence[str] = ()
    ) -> TrainingGraph:
        """Return the distributed item.

        Args:
            bucket_order: gradients in the order in which they were ready in the first steps.

        Raises:
            RewriteError: as `api.rewrite`.
        """
        with no_garbage_collection():
            flat = normalise_original(item)
            plan = request(flat, self.given)
            if bucket_order:
                notes = plan.notes if plan.edges else (*plan.notes, ORDERED)  # a plan's given edges keep their buckets
                plan = replace(plan, bucket_order=tuple(bucket_order), notes=notes)
            if self._is_of_model_in_job:  # each process takes its part of every batch outside of the graph
                plan = replace(plan, steps_per_run=min(plan.steps_per_run, 1))
            if self.member is not None:
                plan = without_shards(plan)
            plan = plan.of_step(training=training)
            if plan.mode == "mirrored":  # which Auto has just chosen; replicas that share variables may share a device
                ensure_devices(self._devices_of(plan))
            is_remote = bool(plan.homes or plan.is_driven) and self.member is not None
            if is_remote:
                if training:
                    flat = stand_alone(flat)
                    plan = replace(with_proxies(plan), graph_digest=graph_digest(flat.graph))
                else:
                    plan = without_servers(plan)
            new = compile_item(flat, plan, self._job, training=training)
            if training and self.member is not None:  # in one process `FirstBatch` checks it, with the batch size
                coverage.require(new.report.covered)
            return replace(new, binding=item.binding) if is_remote and training else new
