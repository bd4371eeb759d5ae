"""The public functions that plan, rewrite and distribute a graph; `views` has those that show and check a rewrite.

item ──build_plan──► Plan ──rewrite──► distributed item ──session() / distribute──► training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from autograph_rewrite.codecs.codec import Codec
from autograph_rewrite.compile import Instrumentation, Job, compile_item, request, resolve_plan, with_processes
from autograph_rewrite.config import compressor_names, user_code
from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.item import GraphItem
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.ops.rules.registered import OpEntry
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.plan import user_extensions
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.selected import chosen
from autograph_rewrite.resolve import coverage
from autograph_rewrite.training_graph import TrainingGraph

T = TypeVar("T")


def virtual_devices(count: int) -> None:
    """Divide this process's CPU into `count` CPU devices, for mirrored variables without accelerators.

    Raises:
        ClusterError: TensorFlow has already started with fewer.
    """
    from autograph_rewrite.runtime.job.logical_devices import ensure_devices

    ensure_devices([f"/device:CPU:{number}" for number in range(count)])


def build_plan(item: TrainingGraph, config: ConfigLike | None = None, *, batch: int | None = None) -> Plan:
    """Return the plan by which an item is distributed, with every reshard edge and its reason.

    Args:
        item: a training graph.
        config: a Config, a dict, the path of a YAML file or the name of a shipped one; default: the configuration of
            `run --config` or `launch --config`.
        batch: as for `rewrite`.

    Raises:
        ConfigError: the configuration is wrong.
        PlanError: the configuration does not fit the graph.
        GraphError: the graph cannot be distributed.
    """
    with no_garbage_collection():
        flat = normalise_original(item)
        given = chosen(config)
        if isinstance(given, Plan):
            raise ConfigError("this is a plan already", hint="pass it to ar.rewrite or ar.distribute")
        return resolve_plan(flat, with_processes(given), batch)


def rewrite(
    item: TrainingGraph,
    config: ConfigLike | Plan | None = None,
    *,
    verify_each: bool = True,
    observers: Sequence[Observer] = (),
    training: bool = True,
    task: int | None = None,
    batch: int | None = None,
) -> GraphItem:
    """Return the distributed item: it has the same inputs, outputs and variables, and computes the same numbers.

    The process joins no job and opens no port. In a parameter server's process this returns the graph of worker 0; the
    server starts when it opens a session of that graph (`new.session()`).

    Args:
        item: a training graph; it is not changed.
        config: a config, or a plan made by `build_plan` for this graph; default: as for `build_plan`.
        verify_each: check the graph's invariants after every pass.
        observers: called with (pass name, folded graph) after every pass.
        training: refuse a graph that updates nothing.
        task: the process of the job that the graph is for; default: this process, as TF_CONFIG says.
        batch: examples of all devices together, for which `report.coverage` is computed; default: the size in the
            graph, else 32 for each replica.

    Raises:
        ConfigError: the configuration is wrong, or nothing says which process this is.
        PlanError: the plan does not fit the graph or was made for another one.
        GraphError: the graph cannot be distributed; the message says why.
        PassError: an edge cannot be lowered, or the coverage is below `semantics.min_coverage`.
    """
    with no_garbage_collection():
        flat = normalise_original(item)
        job = Job.of(chosen(config), task)
        plan = request(flat, job.given, batch)
        looking = Instrumentation(verify_each, observers)
        new = compile_item(flat, plan, job, training=training, batch=batch, instrumentation=looking)
        if training:
            coverage.require(new.report.covered)
            coverage.warn_below(new.report.covered)
        return GraphItem.of(new)


def distribute(
    target: T,
    config: ConfigLike | Plan | None = None,
    *specs: Any,
    batch_inputs: Mapping[str, int | None] | None = None,
    **named_specs: Any,
) -> T:
    """Return a function or Keras model that trains on many devices.

    Args:
        target: a compiled Keras model (the same object is returned), or a function that runs one training step.
        config: as for `rewrite`.
        specs: tf.TensorSpecs of the function's arguments; without them it is traced at the first call.
        batch_inputs: axis of the examples by input; None: an input has none.
        named_specs: tf.TensorSpecs of keyword arguments.

    Raises:
        ClusterError: TensorFlow's runtime has started with fewer devices than the config names.
        RewriteError: as for `rewrite`.
    """
    from autograph_rewrite.runtime.distribute import distribute as run

    distributed: T = run(target, config, *specs, batch_inputs=batch_inputs, **named_specs)
    return distributed


def join(config: ConfigLike | None = None) -> None:
    """Make this process a worker of the job that the configuration and the environment describe.

    Importing the package and TensorFlow does the same where the environment (TF_CONFIG, for example) describes the job
    completely. A program whose configuration gives the addresses calls this before its first TensorFlow operation. For
    one process alone nothing happens. A parameter server serves inside this call until all workers have ended, and then
    ends the program. It does so too in `distribute`, in `shard_dataset`, and where it opens a session of a rewritten
    item.

    Raises:
        ConfigError: nothing says which process this is.
        ClusterError: TensorFlow has started already.
    """
    from autograph_rewrite.runtime.job.parameter_server import take_part
    from autograph_rewrite.runtime.job.tf_server import join as run

    _, member = take_part(config)
    if member is not None:
        run(member)


def shard_dataset(
    dataset: Any, global_batch_size: int | None = None, *, policy: Any = None, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part of a tf.data.Dataset that all workers build alike; one process alone gets all of it.

    The batch of a step is the blocks of all workers, in worker order. The first workers get the remainder rows; the
    last may get none. The part is a dataset, except where workers might run out of data at different times: then it can
    only be iterated over, and gives empty batches until all have ended.

    Args:
        dataset: batched with the global batch size.
        global_batch_size: batch the dataset by this first.
        policy: a tf.data.experimental.AutoShardPolicy, or its name; default: that of the dataset's options. FILE: each
            worker reads its files. DATA: each worker reads everything and takes its rows of every batch, so that the
            batches are those of one process. AUTO: FILE for a dataset that reads files, else DATA. OFF: each worker
            brings different data, and only the size of the batch is divided.
        config: gives the addresses of the processes, if the environment does not, and `timeout_seconds`.

    Raises:
        ConfigError: the policy does not exist.
        GraphError: the dataset is not batched, or cannot be split by its files.
        ClusterError: the workers give different datasets, or a worker is missing.
    """
    from autograph_rewrite.runtime.data import shard_dataset as run

    return run(dataset, global_batch_size, policy=policy, config=config)


def on_resize(function: Callable[[int], None]) -> None:
    """Let a training loop continue at its step after an elastic job has lost or gained workers.

    The job then runs the program again with the new number of workers. Before the first step, the variables get the
    values of the last snapshot. Programs that take all their data from `shard_dataset` need not call this.

    Args:
        function: called at once with the number of steps that are done, if any; the loop must begin at that step.
    """
    from autograph_rewrite.runtime.job.own_loop import OwnLoop

    _require_callable(function, "on_resize")
    loop = OwnLoop.here()
    if loop is not None:
        loop.on_resize(function)


def on_preemption(function: Callable[[], Any]) -> None:
    """Call a function that saves state before a signal (SIGTERM, Ctrl-C, SIGHUP) ends the process.

    All workers of a job then finish the same step, even if only one got the signal. In place of the next step each
    calls its functions, in order, and raises `Preempted` (for Ctrl-C: KeyboardInterrupt). This works in a job, in
    programs that `run` and `launch` start, and wherever AUTOGRAPH_GRACE is set to the seconds between the signal and
    the kill. A `CheckpointManager` saves by itself where it can tell the step.

    Args:
        function: called without arguments in the main thread, as `lambda: manager.save(step)`. It may return a text,
            which the process prints as what it has saved.
    """
    from autograph_rewrite.runtime.job.stop import Stop

    _require_callable(function, "on_preemption")
    Stop.here().add(function)


def _require_callable(function: object, taker: str) -> None:
    if not callable(function):
        problem = f"ar.{taker} takes a function, not {type(function).__name__}"
        raise ConfigError(problem, hint=f"pass what is to be called later, as in ar.{taker}(save) or a lambda")


def distribute_datasets_from_function(
    dataset_fn: Callable[[Any], Any], options: Any = None, *, config: ConfigLike | None = None
) -> Any:
    """Return this worker's part of the data, which a function makes for the part that it is given.

    The function is called once, with a `tf.distribute.InputContext`: the number of workers (`num_input_pipelines`), the
    number of this worker (`input_pipeline_id`), and the number of all replicas (`num_replicas_in_sync`). It returns
    batches of one replica (`context.get_per_replica_batch_size(global_batch_size)`); a step takes one for each replica
    of this process. Workers that run out of data give empty batches until all have ended.

    Args:
        dataset_fn: takes the context, returns a batched `tf.data.Dataset`.
        options: `tf.distribute.InputOptions`.
        config: names devices and processes, if the environment does not, and `timeout_seconds`.

    Raises:
        ConfigError: the options ask for a pipeline for each replica.
        GraphError: the function returns no dataset, or one without batches.
        ClusterError: workers have different numbers of replicas, or a worker is missing.
    """
    from autograph_rewrite.runtime.data import distribute_datasets_from_function as run

    return run(dataset_fn, options, config=config)


def register_compressor(name: str, codec: Codec) -> None:
    """Let configurations name a user's codec as a compressor; a later one of the same name replaces it.

    Args:
        name: as in `compressor: NAME`.
        codec: an instance of a class derived from `autograph_rewrite.codecs.codec.Codec` (docs/writing_compressors.md).

    Raises:
        ConfigError: the name is malformed or is that of a built-in compressor, or `codec` is no codec.
    """
    compressor_names.register_compressor(name, codec)


def register_pass(name: str, function: Callable[[Any], None], *, after: str) -> None:
    """Run a function as a pass in every later rewrite of this process; a later one of the same name replaces it.

    Args:
        name: words joined by hyphens, as in `fold-bias`.
        function: called with the `Rewrite` (docs/writing_passes.md), whose graph it edits.
        after: the pass that it follows; `autograph-rewrite opt --list` names them.

    Raises:
        ConfigError: the name is malformed, or no user's pass can run after that pass.
    """
    user_extensions.register_pass(name, function, after=after)


def register_op(
    name: str,
    *,
    factors: str,
    linear: Sequence[int] = (),
    additive: bool = False,
    fragile: str = "",
    work: str = "",
) -> None:
    """Describe how a custom op (`tf.load_op_library`) divides, for every later rewrite of this process.

        ar.register_op("Scaled", factors="n d, d -> n d", linear=(0, 1))
        ar.register_op("Gram", factors="n a, n b -> a b | n", linear=(0, 1), work="2 n a b")

    An op without a description runs whole, which is correct but slow. The description itself is not checked, so try it
    with `ar.verify`. A configuration may name the file that calls this: `ops: [{file: my_ops.py}]`.

    Args:
        name: of the op type; a later description of the same op replaces an earlier one.
        factors: operands and results, with a name for each dimension. Dimensions of one name have one size and are
            split together. `.` cannot be split, `...` is any number of dimensions, `*` is an operand that is read
            whole, `# n d` a vector of the sizes n and d, `| n` says that the op sums over n.
        linear: operands in each of which the op is linear while the others stay fixed.
        additive: the op is linear in all its operands together, as a sum of them is.
        fragile: dimensions along which the kernel refuses a block without rows.
        work: floating-point operations of one call, as a product of numbers and names: `2 n a b`.

    Raises:
        ConfigError: the description contradicts itself or TensorFlow's, or this package has a rule for the op.
    """
    user_extensions.register_op(OpEntry(name, factors, tuple(linear), additive, fragile, work))


def allow_code(path: str | Path) -> None:
    """Let configurations that name a Python file (`strategy: {name: file.py:Class}`) run it.

    A configuration may come from somebody else, so the files that it names run only after this call, or with
    `--allow-code` on the command line. Objects that the program itself makes, a Plan for example, need no permission.

    Raises:
        ConfigError: the file does not exist.
    """
    user_code.allow_code(path)
