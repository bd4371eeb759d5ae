"""Compile a configuration to a plan, and a plan to a distributed graph, for every public function and verb.

    configuration ──Job.of──► processes, this one's task ──request──► Plan ──resolve_plan──► Plan with edges
    plan          ───────────────────────────────────────────────────────┴──compile_task──► distributed item

All callers interpret, complete and check a configuration in this one way. They differ in their other steps:
`distribute` joins the job and adapts the plan to a function, `verify` runs the distributed graph.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autograph_rewrite.cluster.membership import Membership, in_job, with_local_devices
from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.format import printer
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.passes.unused_settings import noted, with_unused_settings
from autograph_rewrite.plan import verify
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies import builder_for
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Job:
    """A configuration or a plan, and the process whose graph is compiled.

    Attributes:
        given: the plan; or the configuration, with the processes that the environment names.
        member: this process; None for a job of one process, or where the graph is for another process.
        task: the worker that the graph is for; 0 in the process of a parameter server.
    """

    given: Config | Plan
    member: Membership | None = None
    task: int = 0

    @classmethod
    def of(cls, given: Config | Plan, task: int | None = None) -> Job:
        """Return the job of this process, or, with a task, the job of the worker whose graph this process compiles.

        Raises:
            ConfigError: there are several processes, and nothing says which of them this is.
        """
        if task is not None:
            return cls(given, None, task)
        if isinstance(given, Config):
            given, member = in_job(given)
        else:
            member = in_job(Config())[1] if given.workers > 1 else None
        return cls(given, member, member.task if member is not None and member.is_worker else 0)

    @property
    def config(self) -> Config | None:
        """The configuration; None where a plan is given."""
        return self.given if isinstance(self.given, Config) else None


@dataclass(frozen=True)
class Instrumentation:
    """The checks and observers that run between two passes.

    Attributes:
        verify: check the graph's invariants after every pass that has edited it.
        observers: called with (pass name, folded graph) after every pass.
        certificate: compares the rewrite with the original.
    """

    verify: bool = True
    observers: Sequence[Observer] = ()
    certificate: Certifier | None = None


VERIFIED = Instrumentation()


def with_processes(given: Config) -> Config:
    """Return a configuration with its job's processes: those of the environment where it names none.

    This need not be one of those processes: a plan for a cluster can be made on any machine.

    Raises:
        ConfigError: the environment describes the job wrongly.
    """
    return given if given.workers > 1 else in_job(given)[0]


def request(item: TrainingGraph, given: Config | Plan, batch: int | None = None) -> Plan:
    """Return the plan of a strategy for a normalised item, still without its edges; return a given plan unchanged.

    The edges of a plan are checked once the graph is analysed.

    Args:
        item: it is not changed.
        given: a configuration, or a plan.
        batch: examples of all replicas together, for which a search compares plans; default: 32 for each replica.

    Raises:
        ConfigError: the configuration asks for something that does not exist.
        PlanError: the plan does not fit the graph.
    """
    if isinstance(given, Plan):
        verify.require(replace(given, edges=()), item)
        return given
    config = with_local_devices(given)
    plan = builder_for(config, batch).build(item, config)
    verify.require(plan, item)
    return plan


def resolve_plan(item: TrainingGraph, given: Config, batch: int | None = None) -> Plan:
    """Return the plan of a normalised item with every edge, and a note for each setting without effect.

    Args:
        item: it is not changed.
        given: with the processes of the job.
        batch: examples of all replicas together, for which the coverage is computed and a search compares plans.

    Raises:
        RewriteError: as `request`, or the graph cannot be distributed.
    """
    return noted(pass_pipeline.resolve(item, request(item, given, batch), batch), given, item)


def compile_task(
    item: TrainingGraph,
    plan: Plan,
    task: int = 0,
    *,
    training: bool = True,
    batch: int | None = None,
    instrumentation: Instrumentation = VERIFIED,
    in_place: bool = False,
) -> TrainingGraph:
    """Return the graph that one worker of a plan runs.

    Args:
        item: normalised.
        plan: a request, or a plan with edges.
        training: refuse a graph that updates nothing.
        batch: as for `resolve_plan`.
        in_place: edit the item's graph instead of a copy of it.

    Raises:
        RewriteError: the graph cannot be distributed by this plan.
    """
    asked = Request(item, plan, task, training, batch, instrumentation.certificate)
    return pass_pipeline.rewrite(
        asked, verify=instrumentation.verify, observers=instrumentation.observers, in_place=in_place
    )


def compile_item(
    item: TrainingGraph,
    plan: Plan,
    job: Job,
    *,
    training: bool = True,
    batch: int | None = None,
    instrumentation: Instrumentation = VERIFIED,
) -> TrainingGraph:
    """Return the graph of a job's worker; its report has the settings without effect and the text workers compare.

    Args:
        item: normalised; its graph is edited.
        training: as for `compile_task`.
        batch: as for `resolve_plan`.

    Raises:
        RewriteError: as `compile_task`, or the plan has no such worker.
    """
    plan = plan.of_step(training=training)
    if not 0 <= job.task < plan.workers:
        problem = f"there is no worker {job.task}: the plan has {plan.workers} of them"
        raise ConfigError(problem, hint="workers count from 0; name them all in cluster.workers")
    common = contents(item) if job.member is not None else b""
    new = compile_task(
        item, plan, job.task, training=training, batch=batch, instrumentation=instrumentation, in_place=True
    )
    if job.config is not None and training:
        new = with_unused_settings(new, job.config, item)
    covered = replace(new.report.covered, place=job.given.where("semantics", "min_coverage"))
    every = job.config.snapshot_steps if job.config is not None else None
    report = replace(new.report, member=job.member, contents=common, covered=covered, snapshot_steps=every)
    return replace(new, report=report)


# The part of a graph that must be equal on all workers before the rewrite, as text that the workers compare.


_CHANCE = re.compile(r' ?\b(shared_name|container|token|_\w+)=("[^"]*"|\[[^\]]*\]|[^,}]*),?|@\S+')
"""Attributes that may differ between workers: numbers that TensorFlow counts or draws, devices, function names."""


def contents(item: TrainingGraph) -> bytes:
    """Return the part of a graph that must be equal on all workers, constants included, as compressed text."""
    graph = item.graph
    roots = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    roots += [v.initializer for v in item.variables.values() if v.initializer is not None]
    pending = [graph.nodes[name] for name in roots if name in graph.nodes]
    seen: set[Node] = set(pending)
    while pending:
        node = pending.pop()
        if has(node.op, "input_or_output"):
            continue
        for other in (*(value.node for value in node.inputs), *node.controls):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    lines = sorted(_CHANCE.sub("", printer.line(node)) for node in seen if not has(node.op, "input_or_output"))
    return zlib.compress("\n".join(lines).encode(), 1)
