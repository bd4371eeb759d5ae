"""Graph mode: run a rewritten graph in a Session that takes the original names of feeds, fetches and variables.

A split tensor is fetched as its blocks, which are concatenated; a partial one is combined. Variables are read as full
values, and written in all their copies.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError, GraphError
from autograph_rewrite.ir.traversal import reachable
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.passes.base.instance_order import GATE
from autograph_rewrite.passes.emit.tensor_map import View
from autograph_rewrite.plan.parts.names import proxy_of
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine import connect
from autograph_rewrite.runtime.engine.batch_sizes import FirstBatch, check_batch_sizes
from autograph_rewrite.runtime.engine.fetches import Fetch, assemble, name_of, variable_of
from autograph_rewrite.runtime.engine.staleness_clock import (
    BoundedStaleness,
    FinishTogether,
    StalenessBound,
    drain_stores,
)
from autograph_rewrite.runtime.engine.step_observers import StepObserver, observers
from autograph_rewrite.runtime.engine.steps_loop import StepsLoops
from autograph_rewrite.runtime.engine.variable_copies import Copy, copies_of, instances_of, is_apart
from autograph_rewrite.runtime.job.coordinator import Coordinator, FailedSteps, Workers
from autograph_rewrite.runtime.job.digests import CARRY_ON, SessionDigest, ancestors, producers, require_consensus
from autograph_rewrite.runtime.job.exchanges import WRITE, Rendezvous, abandon, replica_means
from autograph_rewrite.runtime.job.job_memory import require_alike
from autograph_rewrite.runtime.job.own_loop import OwnLoop, keep_steps, kept_loop
from autograph_rewrite.runtime.job.parameter_server import serve_if_server
from autograph_rewrite.runtime.job.tf_server import counts
from autograph_rewrite.training_graph import RewrittenTrace, TrainingGraph, Variable


class DistributedSession:
    """A tf.compat.v1.Session that takes the original names. Use it as a context manager.

    Args:
        item: rewritten, or an original to run as it is.
        target: address of a server; "": this process, or its job.
        all_read: whether each worker reads variables by itself where worker 0 runs the steps for all.

    Attributes:
        whole_variables: reads and writes the variables as full values.
        driven: the session that worker 0 runs for all workers, which make the same calls; None: each runs its part.
    """

    def __init__(self, item: TrainingGraph, config: Any = None, target: str = "", *, all_read: bool = False) -> None:
        tf = tensorflow()
        self._tf = tf
        self._member = connect.joined(item)
        connect.require_devices(tf, item)
        self.item = item
        self._steps = 0
        self.observer: StepObserver | None = observers()
        self.graph = tf.Graph()
        plan = item.report.plan if item.report is not None else None
        graph_def, container = connect.graph_of(item, self._member, all_read=all_read)
        connect.imported(tf, graph_def, self.graph, is_rewritten=item.report is not None)
        self._session = connect.connected(tf, item, self.graph, config, target, all_read=all_read)
        self.driven = self._session if isinstance(self._session, connect.ChiefDrivenSession) else None
        self.first = FirstBatch(item, warned=True)
        self._gates = GateFeeds(self.graph, item.targets)
        self._names = OriginalNames(item, self.graph)
        self.whole_variables = NamedVariables(item, self.graph)
        limit = plan.timeout_seconds if plan is not None and (plan.mode == "mirrored" or self._member) else 0.0
        self._timeout_ms = int(limit * 1e3) if self._member is None else 0
        self._digest = SessionDigest(item, self.graph) if self._member is not None and item.report.digests else None
        self._coordinator = self._make_coordinator(limit)
        self._numbers = StepNumbers(self.graph, self._member, is_driven=self.driven is not None)
        targets = [name for name in item.targets if _has_all(self.graph, [name])]
        self._targets = set(map(self.graph.get_operation_by_name, targets))
        if isinstance(self._coordinator, BoundedStaleness) and self._member is not None:
            clock = StalenessBound(self._session, self.run_ops, item.report.plan, self._member, container)
            self._coordinator.clock = clock
        self._finish = FinishTogether(item, self._member, self.graph) if self._member is not None else None
        self._loops: StepsLoops | None = None
        if plan is not None and plan.steps_per_run > 1:
            own = f"/job:worker/replica:0/task:{self._member.task}" if self._member is not None else ""
            self._loops = StepsLoops(item, self.graph, f"{own}/device:CPU:0")
        added = [v.initializer for v in item.state.values() if v.initializer is not None]
        if added:  # restoring a checkpoint of the original would leave these without a value
            self.run_ops([self.graph.get_operation_by_name(name) for name in added])

    def _make_coordinator(self, seconds: float) -> Coordinator:
        """Return the coordinator with the other workers."""
        if self._member is None:
            return Coordinator()
        plan, session = self.item.report.plan, self._session
        alone = plan.is_asynchronous or plan.is_driven  # workers go on by themselves, or as worker 0 tells them
        failed = None if alone else FailedSteps(self._member)
        watchdog = connect.watchdog_of(self._member, self.item, session, seconds, failed)
        leave = self.driven.abandon if self.driven is not None else functools.partial(abandon, session)
        kind = BoundedStaleness if plan.is_asynchronous and plan.staleness else Workers
        return kind(self._member, watchdog, self._carry_on, failed, leave)

    def __enter__(self) -> DistributedSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.driven is not None:
            self.driven.leave()
        else:
            self.close()

    def fetch_apart(self, operations: Iterable[Any]) -> None:
        """Let workers differ in whether they fetch some operations, which exchange nothing."""
        if self._digest is not None:
            self._digest.apart.update(operations)

    def take_no_more_part(self) -> None:
        """Tell worker 0, if it runs for all, that this worker takes part in no run any more."""
        if self.driven is not None:
            self.driven.take_no_more_part()

    def close(self) -> None:
        """Release the session's resources."""
        self._coordinator.close()
        self._session.close()

    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        timeout_ms: int | None = None,
        changed: Mapping[str, str] | None = None,
        besides: Mapping[Any, Any] | None = None,
    ) -> Any:
        """Run one step.

        Args:
            fetches: an original name, tensor or operation, or a nest of them; None for nothing.
            feed_dict: values by original name or tensor.
            timeout_ms: give up after this long; by default after `timeout_seconds` in one process with mirrored
                variables, and never else: several processes have a watchdog.
            changed: descriptions of other values that must be equal in all workers, by name.
            besides: further feeds, by tensor of `graph`.

        Raises:
            GraphError: a name is unknown or was pruned, batch sizes differ, or the run would write other variables.
            ClusterError: the step did not finish in time, or the inputs of the workers differ.
        """
        names = [name_of(fetch) for fetch in self._tf.nest.flatten(fetches)]
        found = [self._names.fetch(name) for name in names]
        self._names.require_same_writes(names)
        wanted = [element for fetch in found for element in fetch.elements]
        given = {self._names.feed(key): value for key, value in (feed_dict or {}).items()}
        feeds = {key: value for key, value in given.items() if key is not None}
        rows = self._loops.stacked(feeds) if self._loops is not None and self._loops.repeats(wanted) else ()
        sizes = self._check_batch({k: v[0] if k in rows else v for k, v in feeds.items()})
        self.first.of_run(sizes, names)
        examples = max(sizes.values(), default=0)
        if rows:
            count = len(feeds[rows[0]])
            changed, examples = {**(changed or {}), "the number of steps": str(count)}, examples * count
        feeds |= {**self._gates.feeds(wanted), **(besides or {})}
        limit = self._timeout_ms if timeout_ms is None else timeout_ms
        options = self._tf.compat.v1.RunOptions(timeout_in_ms=limit)
        known = self.read_variables(fetch.variable for fetch in found if fetch.variable and not fetch.late)
        self._steps += 1
        try:
            got = iter(self._run(wanted, examples, feeds, options, changed or {}) if wanted or not found else ())
        except self._tf.errors.OpError as error:
            if not isinstance(error, self._tf.errors.DeadlineExceededError):
                raise
            raise ClusterError(
                f"the step did not finish within {limit / 1e3:.0f} s",
                hint="a replica is missing or stuck; if a step really takes longer, raise timeout_seconds",
            ) from error
        parts = [[next(got) for _ in fetch.elements] for fetch in found]
        known |= self.read_variables(fetch.variable for fetch in found if fetch.late)
        values = [
            known[fetch.variable] if fetch.variable else assemble(fetch.view, part)
            for fetch, part in zip(found, parts, strict=True)
        ]
        return self._tf.nest.pack_sequence_as(fetches, values)

    def _run(self, wanted: list[Any], examples: int, *given: Any) -> Any:
        """Run the step, and report it to the observer if it updates variables.

        Args:
            examples: of all its steps.
            *given: feeds, options and changes.

        Raises:
            ClusterError: a worker is missing, or was in an earlier run, or the inputs of the workers differ.
        """
        updates = not self._targets.isdisjoint(wanted)
        self._coordinator.before_step(updates=updates)
        try:
            trace = RewrittenTrace(self.item, self.item)
            with self.observer.step(trace, examples) if self.observer is not None and updates else nullcontext():
                got = self._run_steps(wanted, *given)
        except self._tf.errors.OpError as error:
            self._coordinator.step_failed(error)
            raise
        self._coordinator.after_step(updates=updates)
        return got

    def _carry_on(self) -> None:
        """Go on after an error, together with all workers; refuse if their variables differ.

        Variables are compared after all have met, when no step writes them any more: a worker that comes late to a step
        which has failed elsewhere may still update variables on servers, as decayed slots.
        """
        assert self._member is not None
        plan = self.item.report.plan
        Rendezvous(self._member, plan.timeout_seconds).meet(CARRY_ON)
        values = list(self.read_variables().values())
        require_consensus(self._member, plan, captured=values, what=CARRY_ON)
        self._numbers.renew(self._session, plan.timeout_seconds)
        self._clear_servers()

    def _run_steps(self, wanted: list[Any], feeds: Mapping[str, Any], options: Any, changed: Mapping[str, str]) -> Any:
        """Run one step, or several in a loop (`steps_per_run`), and compare the inputs of all workers."""
        if self.driven is not None:
            self.driven.changed = changed
        digest = self._digest.before(wanted, feeds, changed) if self._digest is not None else None
        if self._digest is not None and digest is not None:
            wanted, feeds = [*wanted, self._digest.fetch], {**feeds, self._digest.feed: digest}
        count = len(wanted)
        in_loop = self._loops is not None and self._loops.repeats(wanted)
        if self._loops is not None and in_loop:
            wanted, feeds = self._loops.of(wanted, feeds)
        if self._finish is not None:
            wanted = self._finish.of(wanted)
        is_numbered = self._numbers.is_numbered(wanted, options, in_loop=in_loop)
        got = self.run_ops(wanted, feeds, options)[:count]
        if is_numbered:
            counts().numbers += 1
        if self._digest is not None and digest is not None:
            *got, table = got
            self._coordinator.require_equal(self._digest.account, table)
        return got

    def run_ops(
        self, fetches: Any, feeds: Mapping[Any, Any] | None = None, options: Any = None, *, alone: bool = False
    ) -> Any:
        """Run a part of the graph; in a job of several processes, watch the others meanwhile.

        Args:
            fetches: tensors and operations of `graph`, as for a tf.compat.v1.Session.
            alone: whether only this worker calls this, even if worker 0 drives them all.

        Raises:
            ClusterError: a worker is missing, or was in an earlier run.
        """
        watchdog = self._coordinator.watchdog
        if watchdog is None:
            return self._session.run(fetches, feeds, options=options)
        self._coordinator.check()
        session = self.tf_session if alone else self._session
        self._numbers.move_on(self.tf_session)
        try:
            watchdog.doing = f"run {self._steps} of the session"
            wanted = tuple(getattr(fetch, "name", "") for fetch in self._tf.nest.flatten(fetches))
            return watchdog.run(lambda: session.run(fetches, feeds, options=options), wanted)
        except ClusterError as error:  # raised by `ChiefDrivenSession.run`
            self._coordinator.end(error)
            raise
        except self._tf.errors.OpError as error:
            self._numbers.step_failed()
            account = self._digest.account if self._digest is not None else None
            problem = self._coordinator.failure(error, f"finish run {self._steps} of the session", account)
            if problem is None:
                raise
            raise problem from error

    def _clear_servers(self) -> None:
        """Empty the stores on servers, together with all workers."""
        plan = self.item.report.plan
        if self._member is None or not plan.homes or plan.is_asynchronous:
            return
        drain_stores(self._session, own=not self._member.is_chief)
        Rendezvous(self._member, plan.timeout_seconds).meet(CARRY_ON)  # no worker begins a step before 0 is done

    def _check_batch(self, feeds: Mapping[str, Any]) -> dict[str, int]:
        sizes = {}
        for info in self.item.inputs.values():
            axis = info.batch_axis
            if axis is not None and info.tensor in feeds and np.ndim(feeds[info.tensor]) > axis:
                sizes[info.name] = np.shape(feeds[info.tensor])[axis]
        check_batch_sizes(sizes, self.item)
        return sizes

    def read_variable(self, name: str) -> np.ndarray[Any, Any]:
        """Return the value of a variable by its original name; for one in `item.state`, one row per replica.

        Raises:
            GraphError: there is no such variable.
        """
        return self.read_variables([name])[name]

    def read_variables(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of many variables in one run, by original name; None for all of the original graph.

        Raises:
            GraphError: there is no such variable, or each replica has a component of it without an aggregation.
        """
        wanted = list(self.item.variables) if names is None else list(names)
        self.whole_variables.require_readable(wanted if names is not None else ())
        reads = {name: self.whole_variables.reads(name) for name in wanted}
        values = dict(zip(reads, self.run_ops(list(reads.values())), strict=True)) if reads else {}
        return {name: np.stack(rows) if name in self.item.state else rows[0] for name, rows in values.items()}

    def write_variable(self, name: str, value: Any) -> None:
        """Set a variable, in all its copies; one in `item.state` takes one row per replica.

        Raises:
            GraphError: there is no such variable, or not one row per replica.
        """
        self.write_variables({name: value})

    def write_variables(self, values: Mapping[str, Any]) -> None:
        """Set many variables in one run, by original name, as `write_variable` does."""
        writes = [self.whole_variables.writes(name, value) for name, value in values.items()]
        fed = {source: value for _, feeds in writes for source, value in feeds.items()}
        meeting = None
        if self._member is not None and any(map(is_apart, map(self.item.variables.get, values))):
            meeting = Rendezvous(self._member, self.item.report.plan.timeout_seconds)
            meeting.meet(WRITE)  # no other worker still reads the shards of this one
        self.run_ops([ops for ops, _ in writes], fed)
        if meeting is not None:
            meeting.meet(WRITE)  # all workers have written their shards before any reads those of others
        if self._digest is not None:
            self._digest.wrote({name: v for name, v in values.items() if name not in self.item.state})

    def average_variables(self) -> None:
        """With `local_sgd`, average the variables that replicas have trained by themselves; all workers call this.

        Raises:
            ClusterError: a worker is missing.
        """
        report = self.item.report
        names = report.averaged if report is not None else ()
        rows = self.run_ops([self.whole_variables.copies(name) for name in names])
        means = replica_means(rows, self._member, report.plan.timeout_seconds) if names else []
        self.write_variables(dict(zip(names, means, strict=True)))

    @property
    def state(self) -> dict[str, Any]:
        """The variables that the rewrite has added, by name and replica, for `tf.compat.v1.train.Saver`."""
        return {
            f"{name}/replica_{replica}": read
            for name in self.item.state
            for replica, read in enumerate(self.whole_variables.reads(name), self.item.report.first_replica)
        }

    @property
    def tf_session(self) -> Any:
        """The tf.compat.v1.Session that runs the graph, for code that needs this type, as a Saver does."""
        return self.driven.session if self.driven is not None else self._session


# Feed the barriers between micro-batches in runs that update no variable, so that no gradient is computed.
#
# run(["loss", "train"])       each micro-batch waits for the gradients of the one before
# run("prediction")            the gates are fed: neither gradients nor labels are needed


class GateFeeds:
    """The gates of one graph."""

    def __init__(self, graph: Any, targets: Collection[str]) -> None:
        ops = (op for op in graph.get_operations() if op.type == "PlaceholderWithDefault")
        self._names = {op.name for op in ops if f"/{GATE}" in op.name}
        self._targets = targets
        self._known: dict[str, bool] = {}

    def feeds(self, fetched: Iterable[Any]) -> dict[str, float]:
        """Return the feeds to add for a run of some tensors and operations."""
        if not self._names or any(self._trains(getattr(element, "op", element)) for element in fetched):
            return {}
        return dict.fromkeys((f"{name}:0" for name in self._names), 0.0)

    def _trains(self, root: Any) -> bool:
        """Return whether an operation depends on one that trains, by any path without a gate."""
        if root.name not in self._known:
            needed = reachable([root], lambda op: [one for one in producers(op) if one.name not in self._names])
            self._known[root.name] = any(op.name in self._targets for op in needed)
        return self._known[root.name]


# Step numbers: a run with collectives has the same number in all workers; after an error, a number that no run has had.
#
#     worker 0   run 7 done      number 78     worker 1   run 7 done       number 78
#                run 8 fails     number 79                run 8 is done    number 79
#                carries on      runs nothing, twice      carries on       runs nothing, once
#                run 9           number 81                run 9            number 81
#
# TensorFlow numbers the runs of a key consecutively in each process, and a run that fails does not use its number up
# (`RetireStepId`). If the next run had the same number, a request of the failed run to another process would take a
# value of the next run, and the cleanup of the failed run would end it. A key belongs to a graph, not to a run:
# TensorFlow keeps the key with which fetches first ran. It does not look for collectives in the functions of a loop.


_OF_ALL, _OF_ONE = 0x5745, 0x5746
"""The keys of runs with collectives that all workers make, and that one makes, for all of them or for itself.

With one key for both, worker 0 would count runs that the others do not, and they would wait for each other.
"""


class StepNumbers:
    """Numbers the runs of one session.

    Args:
        is_driven: whether the session of worker 0 runs for all workers.
    """

    def __init__(self, graph: Any, member: Membership | None, *, is_driven: bool = False) -> None:
        self._graph, self._member, self._is_driven = graph, member, is_driven
        self._is_chief = member is not None and member.is_chief
        self._key = _OF_ONE if member is None or is_driven else _OF_ALL
        self._known: dict[tuple[str, ...], bool] = {}
        self._loops_meet = any(is_collective(one.type) for one in graph.get_operations())
        if member is not None and (self._is_chief or not is_driven):
            tf = tensorflow()
            with graph.as_default(), tf.device(f"/job:{member.job}/replica:0/task:{member.task}/device:CPU:0"):
                self._nothing = tf.no_op()

    def is_numbered(self, fetches: Iterable[Any], options: Any, *, in_loop: bool) -> bool:
        """Set the key of a run with collectives; return whether the run uses up a number that all workers count.

        Args:
            fetches: tensors and operations, or names of them.
        """
        if self._is_driven and not self._is_chief:  # this worker runs nothing: it takes the results of worker 0
            return False
        meets = self._loops_meet if in_loop else self._member is not None and self._meets(fetches)
        if meets:
            options.experimental.collective_graph_key = self._key
        return meets and self._member is not None and not self._is_driven

    def step_failed(self) -> None:
        """Note that a run has failed: TensorFlow gives the next the same number, also in another session."""
        if self._is_driven and self._is_chief:
            counts().has_failed = True

    def move_on(self, session: Any) -> None:
        """Use up the number of a failed run: the cleanup of that run in other processes would end the next one.

        Workers that each run a session agree on a new number instead (`renew`).
        """
        if self._is_driven and self._is_chief and counts().has_failed:
            session.run(self._nothing, options=self._options())
            counts().has_failed = False

    def _meets(self, fetches: Iterable[Any]) -> bool:
        names = tuple(getattr(one, "name", one) for one in fetches)
        if names not in self._known:
            elements = [self._graph.as_graph_element(name) for name in names]
            step = ancestors(getattr(element, "op", element) for element in elements)
            self._known[names] = any(is_collective(one.type) for one in step)
        return self._known[names]

    def renew(self, session: Any, seconds: float) -> None:
        """Go on with a number that no worker has used; all workers call this.

        Raises:
            ClusterError: a worker is missing.
        """
        if self._member is None:
            return
        mine = counts().numbers
        used = Rendezvous(self._member, seconds).rows(np.array(mine, np.int64), CARRY_ON)
        for _ in range(mine, int(used.max()) + 1):
            session.run(self._nothing, options=self._options())
            counts().numbers += 1

    def _options(self) -> Any:
        options = tensorflow().compat.v1.RunOptions()
        options.experimental.collective_graph_key = self._key
        return options


# The original names of a session: map fetches and feeds to tensors and operations of the rewritten graph.
#
# "loss"       output    -> loss:0 of the first replica
# "logits:0"   split(0)  -> its block on each replica, concatenated
# "train"      target    -> the operation on each replica
# "w"          variable  -> read whole, before the run


class OriginalNames:
    """Finds original names in a graph."""

    def __init__(self, item: TrainingGraph, graph: Any) -> None:
        self._tf = tensorflow()
        self._item, self._graph = item, graph
        self._known: dict[str, Fetch] = {}

    def fetch(self, name: str) -> Fetch:
        """Return the elements to run for an original name, and how their values combine.

        Raises:
            GraphError: the rewritten graph does not have it.
        """
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def require_same_writes(self, names: Sequence[str]) -> None:
        """Refuse fetches that write other variables than in the original graph.

        Raises:
            GraphError: they write more variables, or fewer.
        """
        if self._item.layout is None or not self._item.layout.writes.changed:
            return
        outputs = self._item.outputs
        tensors = [outputs[name].tensor if name in outputs else name for name in names]
        more, less = self._item.layout.writes.differences(tensor.partition(":")[0] for tensor in tensors)
        if more or less:
            what = f"would write '{more[0]}', which it does not" if more else f"would not write '{less[0]}', as it does"
            raise GraphError(
                f"a run of {', '.join(map(repr, names))} {what} in the original graph",
                hint="declare what runs by itself (train_op=[..., name], outputs=[..., name]), or fetch the train op",
            )

    def _find(self, name: str) -> Fetch:
        output = self._item.outputs.get(name)
        name = output.tensor if output is not None else name
        variable, late = variable_of(self._item.variables, name)
        if not variable or (not late and self._is_value(name)):
            return self._instances(name)
        own = name.partition(":")[0] in (variable, f"{variable}/read")
        is_there = late and (not own or _has_all(self._graph, [name.partition(":")[0]]))
        elements = self._instances(name).elements if is_there else ()  # they may wait for updates, which have to run
        return Fetch(elements, variable=variable, late=late)

    def _instances(self, name: str) -> Fetch:
        """Return the instances of an original tensor or operation."""
        layout = self._item.layout
        is_tensor = ":" in name
        node = name.partition(":")[0]
        try:
            if is_tensor or (self._has_value(node) and node not in self._item.targets and node != self._item.init_op):
                view = layout.find(name) if layout is not None else None
                if view is None and layout is not None and name.removesuffix(":0") in layout.blocked:
                    raise GraphError(
                        f"'{name}' is in blocks on the model axis, which are not all within reach",
                        hint=f"declare it, so that it is joined: outputs=[..., '{node}']",
                    )
                view = view or View((name if is_tensor else f"{name}:0",), REPLICATED)
                elements = tuple(self._graph.get_tensor_by_name(t) for t in view.tensors)
                return Fetch(elements, view)
            names = instances_of(self._item, node)
            return Fetch(tuple(self._graph.get_operation_by_name(n) for n in names))
        except (KeyError, ValueError):
            raise GraphError(
                f"'{name}' is not in the rewritten graph: no declared output or target needs it",
                hint=f"declare it: outputs=[..., '{node}']",
            ) from None

    def _is_value(self, name: str) -> bool:
        """Return whether the graph has a tensor of this name that is no handle."""
        try:
            found = self._graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        except (KeyError, ValueError):
            return False
        return bool(found.dtype != self._tf.resource)

    def _has_value(self, node: str) -> bool:
        name = instances_of(self._item, node)[0]
        return _has_all(self._graph, [name]) and bool(self._graph.get_operation_by_name(name).outputs)

    def feed(self, key: Any) -> str | None:
        """Return the tensor to feed; None for a placeholder of the original graph that no step needs.

        Raises:
            GraphError: there is no input or tensor of this name.
        """
        name = name_of(key)
        info = self._item.inputs.get(name)
        if info is not None:
            return info.tensor
        tensor = name if ":" in name else f"{name}:0"
        try:
            self._graph.get_tensor_by_name(tensor)
        except (KeyError, ValueError):
            if self._item.layout is not None and name.partition(":")[0] in self._item.layout.feeds:
                return None
            known = ", ".join(self._item.inputs)
            raise GraphError(f"there is no '{name}' to feed", hint=f"the inputs are: {known}") from None
        return tensor


# The variables of a session's graph by original name, read and assigned as full values.
#
# All reads are added when the session opens: a graph that grew with every read would be sent to the runtime each time.


class NamedVariables:
    """Reads and writes the variables of an item, by original name.

    Args:
        graph: the tf.Graph of the item; reads are added at once, a variable's writes when first asked.
    """

    def __init__(self, item: TrainingGraph, graph: Any) -> None:
        self._tf = tensorflow()
        self._item = item
        self._graph = graph
        self._known: Mapping[str, Variable] = {**item.state, **item.variables}
        self._held: dict[str, list[Any]] = {}
        self._writes: dict[str, tuple[list[Any], list[Any]]] = {}
        with graph.as_default():
            self._reads = {name: self._read(name) for name in self._known if self._is_there(name)}

    def reads(self, name: str) -> list[Any]:
        """Return the tensors with the value of a variable: one, or for a variable in `item.state` one per replica.

        Raises:
            GraphError: there is no such variable.
        """
        if name not in self._reads:
            close = difflib.get_close_matches(name, self._reads, n=3)
            raise GraphError(f"there is no variable '{name}'", hint=f"closest: {', '.join(close)}" if close else None)
        return self._reads[name]

    def copies(self, name: str) -> list[Any]:
        """Return the tensors with the value of each copy of a variable in this process, made once."""
        if name not in self._held:
            with self._graph.as_default():
                self._held[name] = [copy.read() for copy in self._copies(name)]
        return self._held[name]

    @property
    def readable(self) -> dict[str, Variable]:
        """The variables of the original graph that have a single value."""
        unreadable = self._unreadable()
        return {n: v for n, v in self._item.variables.items() if n in self._reads and n not in unreadable}

    def require_readable(self, names: Iterable[str]) -> None:
        """Refuse variables of which each replica has a component, without an aggregation to a single value.

        Raises:
            GraphError: one of them has no aggregation.
        """
        unreadable = self._unreadable()
        for name in names:
            if name in unreadable:
                raise GraphError(
                    f"each replica has a component of '{name}', and nothing makes one value of them",
                    hint=f"give its policy an aggregation, or read '{name}/autograph_component', a row per replica",
                )

    def _unreadable(self) -> set[str]:
        report = self._item.report
        return {p.variable for p in report.plan.policies if p.is_unreadable} if report is not None else set()

    def writes(self, name: str, value: Any) -> tuple[list[Any], dict[Any, Any]]:
        """Return the ops that set a variable in all its copies, and their feeds.

        Raises:
            GraphError: there is no such variable, or not one value per replica.
        """
        self.reads(name)
        if name not in self._writes:
            with self._graph.as_default():
                self._writes[name] = self._write(name)
        sources, writes = self._writes[name]
        rows = value if name in self._item.state else [value]
        if len(rows) != len(sources):
            raise GraphError(
                f"'{name}' has a value for each of {len(sources)} replicas, not {len(rows)}",
                hint="pass zeros of the shape that read_variable returns to start anew",
            )
        return writes, dict(zip(sources, rows, strict=True))

    def _read(self, name: str) -> list[Any]:
        copies = self._copies(name)
        return [copy.read() for copy in (copies if name in self._item.state else copies[:1])]

    def _write(self, name: str) -> tuple[list[Any], list[Any]]:
        dtype = self._tf.as_dtype(self._known[name].dtype)
        sources: list[Any] = []
        writes: list[Any] = []
        for copy in self._copies(name):
            if not sources or name in self._item.state:
                sources.append(self._tf.compat.v1.placeholder(dtype))
            writes.append(copy.write(sources[-1]))
        return sources, writes

    def _copies(self, name: str) -> list[Copy]:
        copies = [*copies_of(self._item, self._known[name])]
        if copies:  # the cached copy that this worker reads of a variable on a server
            proxies = tuple(map(proxy_of, copies[0]))
            copies += [proxies] if _has_all(self._graph, proxies) else []
        return [Copy(self._graph, handles, self._known[name]) for handles in copies]

    def _is_there(self, name: str) -> bool:
        copies = copies_of(self._item, self._known[name])
        return bool(copies) and all(_has_all(self._graph, handles) for handles in copies)


def _has_all(graph: Any, names: Iterable[str]) -> bool:
    """Return whether a graph has operations of all these names."""
    try:
        return all(graph.get_operation_by_name(name) for name in names)
    except KeyError:
        return False


# Open a session: a plain one, one of an elastic job, or, in the process of a parameter server, none.


def open_session(item: TrainingGraph, *, config: Any = None, target: str = "") -> DistributedSession:
    """Return a session that holds the item's graph.

    In a parameter server this returns no session: it serves the workers until they have ended, and ends the program.

    Args:
        target: a server that the caller has started on the devices; "": this process, or its job.

    Raises:
        GraphError: variables live outside the graph.
        ConfigError: the job is elastic, and its workers train by themselves (`local_sgd`).
    """
    if outside := [name for name, variable in item.variables.items() if variable.captured]:
        raise GraphError(
            f"a session cannot reach '{outside[0]}': {len(outside)} of the graph's variables live in the program that "
            "it was traced from",
            hint="train the model with ar.distribute(model, config), and a function with ar.function(step, config)",
        )
    report, loop = item.report, None
    if report is not None:
        serve_if_server(report.member, report.plan.timeout_seconds)
        loop = kept_loop()
        keep_steps(report.snapshot_steps)
    require_alike(trains_alone=report is not None and bool(report.alone))
    if loop is None:
        return DistributedSession(item, config, target)
    return _ElasticSession(item, config, target, loop)


# A session in an elastic job: save its variables between steps, and restore them before the first step.


class _ElasticSession(DistributedSession):
    """A session whose steps are counted by the loop of this process; see `DistributedSession`."""

    def __init__(self, item: TrainingGraph, config: Any, target: str, loop: OwnLoop) -> None:
        super().__init__(item, config, target)
        self._loop, self._name, self._begins = loop, loop.unique("a session"), True

    def _run(self, wanted: list[Any], *given: Any) -> Any:
        """Run the step; restore all variables from the snapshot before the first step that updates."""
        if self._targets.isdisjoint(wanted):
            return super()._run(wanted, *given)
        self._loop.before(self._name, self.read_variables)
        if self._begins:
            self._begins = False
            self.write_variables(self._loop.values(self._name, self.item.variables))
        got = super()._run(wanted, *given)
        self._loop.after(self._name)
        return got
