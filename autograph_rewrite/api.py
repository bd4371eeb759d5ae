"""The four verbs of the package: plan, rewrite, distribute, verify.

item ──build_plan──► Plan ──rewrite──► distributed item ──session() / distribute──► training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.quiet import no_garbage_collection
from autograph_rewrite.item import GraphItem
from autograph_rewrite.load.normal import normalise_original
from autograph_rewrite.passes import coverage, pipeline
from autograph_rewrite.passes.idle import noted, with_idle_settings
from autograph_rewrite.passes.pass_manager import Observer
from autograph_rewrite.plan import check, own_code, own_passes
from autograph_rewrite.plan.chosen import chosen, chosen_config
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.membership import in_job
from autograph_rewrite.plan.plan import Plan

ConfigLike = Config | Mapping[str, Any] | str | Path


def build_plan(item: GraphItem, config: ConfigLike | None = None, *, batch: int | None = None) -> Plan:
    """Decide how to distribute an item, and list what follows from it: every reshard edge with its reason.

    Args:
        item: a training graph.
        config: a Config, a dict, the path of a YAML file or the name of a shipped one; left out: what `run --config`
            or `launch --config` gave.
        batch: as for `rewrite`.

    Raises:
        ConfigError: the configuration is wrong.
        PlanError: it does not fit the graph.
        GraphError: the graph cannot be distributed.
    """
    with no_garbage_collection():
        flat = normalise_original(item)
        given = chosen(config)
        if isinstance(given, Plan):
            raise ConfigError("this is a plan already", hint="pass it to ar.rewrite or ar.distribute")
        used = given if given.workers > 1 else in_job(given)[0]
        return noted(pipeline.resolve(flat, request(flat, used), batch), used, flat)


def rewrite(
    item: GraphItem,
    config: ConfigLike | Plan | None = None,
    *,
    verify_each: bool = True,
    observers: Sequence[Observer] = (),
    training: bool = True,
    task: int | None = None,
    batch: int | None = None,
) -> GraphItem:
    """Return the distributed item: same inputs, outputs and variables, computing the same numbers on many devices.

    Args:
        item: a training graph; it is not changed.
        config: a config, or a plan made by `build_plan` for this graph; left out: what `run --config` or
            `launch --config` gave.
        verify_each: check the graph's invariants after every pass.
        observers: called with (pass name, folded graph) after every pass.
        training: refuse a graph that updates nothing.
        task: of several processes, the one that the graph is for; left out: this one, as TF_CONFIG says.
        batch: examples of all devices together, for which `report.coverage` is told; left out: what the graph says,
            else 32 for each replica.

    Raises:
        ConfigError: the configuration is wrong, or nothing says which process this is.
        PlanError: the plan does not fit the graph or was made for another one.
        GraphError: the graph cannot be distributed; the message says why.
        PassError: an edge cannot be lowered, or less is divided than `semantics.min_coverage` asks for.
    """
    from autograph_rewrite.runtime.agreement import contents as contents_of
    from autograph_rewrite.runtime.serve import serve

    with no_garbage_collection():
        flat = normalise_original(item)
        config, given = chosen(config), None
        if isinstance(config, Plan):
            check.require(replace(config, edges=()), flat)  # its edges are checked once the graph is analysed
            plan = config
            member = in_job(Config())[1] if task is None and plan.workers > 1 else None
        else:
            given, member = in_job(config) if task is None else (config, None)
            plan = request(flat, given)
        if member is not None and not member.is_worker:
            serve(member, plan.timeout_seconds)
        if not training:
            plan = plan.without_stages()
        own = member.task if member is not None else task or 0
        if not 0 <= own < plan.workers:
            problem = f"there is no worker {own}: the plan has {plan.workers} of them"
            raise ConfigError(problem, hint="workers count from 0; name them all in cluster.workers")
        common = contents_of(flat) if member is not None else b""
        new = pipeline.rewrite(
            flat, plan, verify=verify_each, observers=observers, training=training, in_place=True, task=own, batch=batch
        )
        if given is not None and training:
            new = with_idle_settings(new, given, flat)
        covered = replace(new.report.covered, place=(given or plan).where("semantics", "min_coverage"))
        if training:
            coverage.require(covered)
            coverage.warn_below(covered)
        return new.with_(report=replace(new.report, member=member, contents=common, covered=covered))


def request(item: GraphItem, config: Config) -> Plan:
    """Return the plan of a strategy for a normalised item, without the edges that follow from it.

    Raises:
        PlanError: it does not fit the graph.
    """
    from autograph_rewrite.runtime.devices import present_devices
    from autograph_rewrite.strategies import builder_for

    if config.devices is None and config.cluster is not None:
        config = config.with_devices(present_devices())
    plan = builder_for(config).build(item, config)
    check.require(plan, item)
    return plan


def distribute(target: Any, config: ConfigLike | Plan | None = None, *specs: Any, **options: Any) -> Any:
    """Return a function or Keras model that trains on many devices.

    Args:
        target: a compiled Keras model (the same object is returned), or a function that runs one training step.
        config: as for `rewrite`.
        specs: tf.TensorSpecs of the function's arguments; left out, it is traced at the first call.
        options: `batch_inputs={name: axis}`.

    Raises:
        ClusterError: TensorFlow's runtime has started with fewer devices than the config names.
        RewriteError: as for `rewrite`.
    """
    from autograph_rewrite.runtime.distribute import distribute as run

    return run(target, config, *specs, **options)


def join(config: ConfigLike | None = None) -> None:
    """Make this process a worker of the job that the configuration and the environment describe.

    Importing the package and TensorFlow does so where TF_CONFIG or its like say it all. A program whose configuration
    gives the addresses calls this before its first TensorFlow operation. One process alone: nothing happens. A
    parameter server serves here until all workers have ended, and then ends the program; so it does in `rewrite` and
    `distribute`.

    Raises:
        ConfigError: nothing says which process this is.
        ClusterError: TensorFlow has started already.
    """
    from autograph_rewrite.runtime.cluster import join as run
    from autograph_rewrite.runtime.serve import serve

    given, member = in_job(chosen_config(config))
    if member is not None and not member.is_worker:
        serve(member, given.timeout_seconds)
    if member is not None:
        run(member)


def shard_dataset(
    dataset: Any, global_batch_size: int | None = None, *, policy: Any = None, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part of a tf.data.Dataset that all workers build alike; of one process alone, all of it.

    The batch of a step is what all workers hold together, in worker order: the early ones get the rows that are left
    over, the late ones may get none. The part is a dataset, except where workers might run out of data at different
    times: then it can only be iterated over, and gives empty batches until all have ended.

    Args:
        dataset: batched with the global batch size.
        global_batch_size: batch it by this first.
        policy: a tf.data.experimental.AutoShardPolicy, or its name; left out: as the dataset's options say. FILE: each
            reads its own files. DATA: each reads everything and takes its rows of every batch, so that the batches are
            those of one process. AUTO: FILE where it reads files, else DATA. OFF: the data are each worker's own, only
            the size of the batch is divided.
        config: where the processes are, if not in the environment, and `timeout_seconds`.

    Raises:
        ConfigError: there is no such policy.
        GraphError: the dataset is not batched, or cannot be split by its files.
        ClusterError: the workers give different datasets, or somebody is missing.
    """
    from autograph_rewrite.runtime.shard_dataset import shard_dataset as run

    return run(dataset, global_batch_size, policy=policy, config=config)


def register_pass(name: str, function: Callable[[Any], None], *, after: str) -> None:
    """Run a function as a pass in every rewrite of this process from now on; one of the same name takes its place.

    Args:
        name: in words with hyphens, as in `fold-bias`.
        function: is called with the rewrite under way (docs/writing_passes.md), and edits its graph.
        after: the pass behind which it runs; `autograph-rewrite opt --list` names them.

    Raises:
        ConfigError: the name is no name of a pass, or nothing of one's own can run behind that pass.
    """
    own_passes.register_pass(name, function, after=after)


def allow_code(path: str | Path) -> None:
    """Let configurations that name a Python file (`strategy: {name: file.py:Class}`) run it.

    A configuration may be a stranger's, so what it names runs only with this, or with `--allow-code` on the command
    line. Objects that your own program makes, a Plan for example, need none.

    Args:
        path: of the Python file.

    Raises:
        ConfigError: there is no such file.
    """
    own_code.allow_code(path)


def verify(item: GraphItem, config: ConfigLike | Plan | None = None, **options: Any) -> Any:
    """Compare the rewritten item with the original, numerically; see `runtime.check.verify`."""
    from autograph_rewrite.runtime.check import verify as run

    return run(item, chosen(config), **options)
