"""From a request to a plan, and from a plan to a distributed graph: what every verb does, in one place.

    configuration ──Job.of──► processes, this one's task ──request──► Plan ──resolve_plan──► Plan with edges
    plan          ───────────────────────────────────────────────────────┴──compile_task──► distributed item

Verbs differ in what they do around it: `distribute` joins the job and adapts the plan to a function, `verify` runs what
comes out. What a configuration means, in which order it is completed, and what is checked is the same for all of them.
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
    """A configuration or a plan, and the process of its job that graphs are for.

    Attributes:
        given: the plan; or the configuration, with the processes that the environment names.
        member: this process; None of one process alone, or where the graph is for another one.
        task: the worker that graphs are for; a parameter server is given the graph of worker 0.
    """

    given: Config | Plan
    member: Membership | None = None
    task: int = 0

    @classmethod
    def of(cls, given: Config | Plan, task: int | None = None) -> Job:
        """The job of this process; with a task, that of a worker whose graph is made here.

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
    """What looks on between two passes.

    Attributes:
        verify: the graph's invariants are checked after every pass that has edited it.
        observers: called with (pass name, folded graph) after every pass.
        certificate: compares the rewrite with the original.
    """

    verify: bool = True
    observers: Sequence[Observer] = ()
    certificate: Certifier | None = None


VERIFIED = Instrumentation()


def with_processes(given: Config) -> Config:
    """A configuration with its job's processes: those of the environment where it names none.

    Nobody asks which of them this is: a plan for a cluster is made on any machine.

    Raises:
        ConfigError: what the environment says is malformed.
    """
    return given if given.workers > 1 else in_job(given)[0]


def request(item: TrainingGraph, given: Config | Plan) -> Plan:
    """The plan of a strategy for a normalised item, without the edges that follow from it; a plan as it is.

    The edges of a plan are checked once the graph is analysed.

    Raises:
        ConfigError: the configuration asks for what there is not.
        PlanError: it does not fit the graph.
    """
    if isinstance(given, Plan):
        verify.require(replace(given, edges=()), item)
        return given
    config = with_local_devices(given)
    plan = builder_for(config).build(item, config)
    verify.require(plan, item)
    return plan


def resolve_plan(item: TrainingGraph, given: Config, batch: int | None = None) -> Plan:
    """The plan of a normalised item with every edge, and a note for each setting that does nothing.

    Args:
        item: it is not changed.
        given: with the processes of the job.
        batch: examples of all replicas together, of which the coverage is told.

    Raises:
        RewriteError: as `request`, or the graph cannot be distributed.
    """
    return noted(pass_pipeline.resolve(item, request(item, given), batch), given, item)


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
    """What one worker of a plan runs.

    Args:
        item: normalised.
        plan: a request, or a plan with edges.
        training: refuse a graph that updates nothing.
        batch: as for `resolve_plan`.
        in_place: use the graph of the item up, instead of leaving it as it is.

    Raises:
        RewriteError: the graph cannot be distributed so.
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
    """What this process of a job runs, with what all workers must agree on and the settings that do nothing.

    Args:
        item: normalised; its graph is used up.
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


# What the graphs of all workers must have in common before they are rewritten, as text that they can compare.


_CHANCE = re.compile(r' ?\b(shared_name|container|token|_\w+)=("[^"]*"|\[[^\]]*\]|[^,}]*),?|@\S+')
"""What means nothing to others in the line of a node: numbers that TensorFlow counts or draws, devices, functions."""


def contents(item: TrainingGraph) -> bytes:
    """Return what all workers must have in common of a graph, constants included, as compressed text."""
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
