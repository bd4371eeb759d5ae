"""The verbs of the package: plan, rewrite, distribute, verify, and what goes with them.

item ──build_plan──► Plan ──rewrite──► distributed item ──session() / distribute──► training
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autograph_rewrite.cluster.membership import in_job
from autograph_rewrite.codecs.codec import Codec
from autograph_rewrite.compile import Instrumentation, Job, compile_item, request, resolve_plan, with_processes
from autograph_rewrite.config import compressor_names, user_code
from autograph_rewrite.config.config import Config, ConfigLike
from autograph_rewrite.diagnostics.stages import stage
from autograph_rewrite.errors import ConfigError, GraphError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.item import GraphItem, RewrittenTrace
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.plan import user_passes
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.selected import chosen, chosen_config
from autograph_rewrite.resolve import coverage


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
        return resolve_plan(flat, with_processes(given), batch)


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
    from autograph_rewrite.runtime.job.parameter_server import serve

    with no_garbage_collection():
        flat = normalise_original(item)
        job = Job.of(chosen(config), task)
        if job.member is not None and not job.member.is_worker:
            serve(job.member, job.given.timeout_seconds)
        plan = request(flat, job.given)
        looking = Instrumentation(verify_each, observers)
        new = compile_item(flat, plan, job, training=training, batch=batch, instrumentation=looking)
        if training:
            coverage.require(new.report.covered)
            coverage.warn_below(new.report.covered)
        return new


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
    from autograph_rewrite.runtime.job.parameter_server import serve
    from autograph_rewrite.runtime.job.tf_server import join as run

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
    from autograph_rewrite.runtime.data.shard_dataset import shard_dataset as run

    return run(dataset, global_batch_size, policy=policy, config=config)


def distribute_datasets_from_function(
    dataset_fn: Callable[[Any], Any], options: Any = None, *, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part of the data: what a function makes that is told which part it is.

    The function is called once, with a `tf.distribute.InputContext`: the number of workers (`num_input_pipelines`),
    which of them this is (`input_pipeline_id`), and how many replicas there are in all (`num_replicas_in_sync`). It
    returns batches of one replica (`context.get_per_replica_batch_size(global_batch_size)`); as many as this process
    has replicas are put together for a step. Workers that run out of data give empty batches until all have ended.

    Args:
        dataset_fn: takes the context, returns a batched `tf.data.Dataset`.
        options: `tf.distribute.InputOptions`.
        config: where devices and processes are, if not in the environment, and `timeout_seconds`.

    Raises:
        ConfigError: the options ask for a pipeline of each replica.
        GraphError: the function returns no dataset, or one without batches.
        ClusterError: workers have different numbers of replicas, or somebody is missing.
    """
    from autograph_rewrite.runtime.data.from_function import distribute_datasets_from_function as run

    return run(dataset_fn, options, config=config)


def register_compressor(name: str, codec: Codec) -> None:
    """Let configurations name a codec of your own as a compressor; one of the same name takes its place.

    Args:
        name: as in `compressor: NAME`.
        codec: an instance of a class derived from `autograph_rewrite.codecs.codec.Codec` (docs/writing_compressors.md).

    Raises:
        ConfigError: the name is no name or one of this package's, or this is no codec.
    """
    compressor_names.register_compressor(name, codec)


def register_pass(name: str, function: Callable[[Any], None], *, after: str) -> None:
    """Run a function as a pass in every rewrite of this process from now on; one of the same name takes its place.

    Args:
        name: in words with hyphens, as in `fold-bias`.
        function: is called with the rewrite under way (docs/writing_passes.md), and edits its graph.
        after: the pass behind which it runs; `autograph-rewrite opt --list` names them.

    Raises:
        ConfigError: the name is no name of a pass, or nothing of one's own can run behind that pass.
    """
    user_passes.register_pass(name, function, after=after)


def allow_code(path: str | Path) -> None:
    """Let configurations that name a Python file (`strategy: {name: file.py:Class}`) run it.

    A configuration may be a stranger's, so what it names runs only with this, or with `--allow-code` on the command
    line. Objects that your own program makes, a Plan for example, need none.

    Args:
        path: of the Python file.

    Raises:
        ConfigError: there is no such file.
    """
    user_code.allow_code(path)


def explain(new: Any, *, batch: int | None = None) -> str:
    """Say in sentences what was rewritten, what is divided, what runs whole, why, and what it costs.

    Args:
        new: a rewritten item, or a distributed function or Keras model that has run: of each of its traces.
        batch: examples of all devices together, where the graph leaves that open.

    Raises:
        GraphError: nothing was rewritten.
    """
    from autograph_rewrite.inspect.explain import explain as run

    return "\n".join(run(trace.rewritten, batch=batch) for trace in _traces(new))


def verify(item: Any, config: ConfigLike | Plan | None = None, **options: Any) -> Any:
    """Compare the rewritten item with the original, numerically; see `runtime.verify.verify.verify`.

    Args:
        item: the original; or a distributed function or Keras model that has run: its first trace, from the values
            that its variables have now.
        config: file, dict, `Config` or plan to rewrite it by; none: what something distributed runs by, else what
            `run --config` or `launch --config` gave.
        **options: those of `runtime.verify.verify.verify`.

    Raises:
        GraphError: there is nothing to compare.
    """
    from autograph_rewrite.runtime.verify.verify import verify as run

    return run(*_compared(item, config), **options)


def bisect(item: Any, config: ConfigLike | Plan | None = None, **options: Any) -> Any:
    """Find the first pass behind which `verify` fails, and the first value and edge that are wrong.

    Args:
        item: the original; or a distributed function or Keras model that has run: its first trace.
        config: as for `verify`.
        **options: those of `runtime.bisect.bisect.bisect`.

    Returns:
        A `runtime.bisect.bisection.Bisection`: `ok` where nothing fails.

    Raises:
        GraphError: there is nothing to compare.
    """
    from autograph_rewrite.runtime.bisect.bisect import bisect as run

    return run(*_compared(item, config), **options)


def reduce(item: GraphItem, config: ConfigLike | None = None, **options: Any) -> Any:
    """Return a graph as small as can be found whose rewrite still fails as that of an item does, on random feeds.

    Args:
        item: the original.
        config: as for `rewrite`; a plan is of one graph only, so none is taken.
        **options: those of `runtime.reduce.reduce.reduce`.

    Returns:
        A `runtime.reduce.reduce.Reduction`: `item` is the graph, `kind` says how its rewrite fails, empty where it
        does not.

    Raises:
        ConfigError: a plan is given.
        RewriteError: as for `rewrite`.
    """
    from autograph_rewrite.runtime.reduce.reduce import reduce as run

    given = chosen(config)
    if isinstance(given, Plan):
        raise ConfigError("a plan is of one graph, not of what becomes of it", hint="give a configuration")
    return run(item, given, **options)


def report(
    target: Any,
    out: str | Path = "report.html",
    config: ConfigLike | Plan | None = None,
    *,
    batch: int | None = None,
    task: int | None = None,
    measured: Any = None,
    title: str = "",
) -> Path:
    """Write one offline HTML file that shows a graph, what each pass made of it, and what a step costs.

    Args:
        target: a training graph; a rewritten item; or a distributed function or Keras model that has run, of which the
            first trace is shown.
        out: the file.
        config: what to rewrite a training graph by; left out, it is shown as it is.
        batch: examples of all devices together, where the graph leaves that open.
        task: of several processes, the one whose graph is shown; left out, all of them.
        measured: what `profile` returned, or the file that it was saved in.
        title: of the page; left out, the name of the file.

    Returns:
        The path of the file.

    Raises:
        RewriteError: the graph cannot be rewritten so, or has been already; nothing is written then.
    """
    from autograph_rewrite.inspect.profile.profile import Profile
    from autograph_rewrite.inspect.report.build import Shown, is_rewritten, of_ranks, report_page
    from autograph_rewrite.inspect.report.graph_states import GraphStates
    from autograph_rewrite.inspect.report_view import plan_of

    original, new = _traces(target)[0]
    given = chosen(config) if config is not None else None
    plan = plan_of(new, given if isinstance(given, Plan) else None)
    found = Profile.load(measured) if isinstance(measured, (str, Path)) else measured
    states = GraphStates()
    if original is new and (new.report is not None or is_rewritten(new.graph)):
        if isinstance(given, Config):
            hint = "give the original with the configuration; or this one alone, or with its plan"
            raise GraphError("this graph is distributed already", hint=hint)
        states.keep("graph", new.graph, new.placements)
        shown = Shown(states, None, new, plan, batch=batch, measured=found)
    elif original is new and given is None:
        states.keep("graph", original.graph, original.placements)
        shown = Shown(states, original, measured=found)
    else:

        def run(flat: GraphItem, observers: list[Observer], task: int) -> GraphItem:
            return rewrite(flat, plan if given is None else given, observers=observers, batch=batch, task=task)

        new = of_ranks(states, original, run, task)
        network = given if isinstance(given, Config) else None
        shown = Shown(states, original, new, new.report.plan, network, batch, found)
    stage("drawing")
    Path(out).write_text(report_page(title or Path(out).stem, shown), encoding="utf-8")
    return Path(out)


def _compared(item: Any, config: ConfigLike | Plan | None) -> tuple[GraphItem, Config | Plan]:
    """Return the original that `verify` and `bisect` compare with, and what it is rewritten by."""
    if isinstance(item, GraphItem):
        return item, chosen(config)
    trace = _traces(item)[0]
    return trace.original, trace.rewritten.report.plan if config is None else chosen(config)


def _traces(target: Any) -> Sequence[RewrittenTrace]:
    """Return what was rewritten of an item, or of what `distribute` has returned."""
    if isinstance(target, GraphItem):
        return [RewrittenTrace(target, target)]
    from autograph_rewrite.runtime.distribute import traces_of

    return traces_of(target)
