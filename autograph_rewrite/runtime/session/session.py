"""Graph mode: a Session that takes the original names of feeds, fetches and variables.

A tensor that was split is fetched as its blocks and concatenated, a partial one is added up; variables are read and
written whole, in all their copies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from autograph_rewrite.errors import ClusterError
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.agreement import CARRY_ON, require_consensus
from autograph_rewrite.runtime.consensus.broadcast_queue import abandon
from autograph_rewrite.runtime.consensus.coordinator import Coordinator, Workers
from autograph_rewrite.runtime.consensus.failed_steps import FailedSteps
from autograph_rewrite.runtime.consensus.rendezvous import Rendezvous
from autograph_rewrite.runtime.consensus.replica_means import replica_means
from autograph_rewrite.runtime.consensus.session_digest import SessionDigest
from autograph_rewrite.runtime.job import tf_server
from autograph_rewrite.runtime.session.batch_sizes import check_batch_sizes
from autograph_rewrite.runtime.session.chief_driven import ChiefDrivenSession
from autograph_rewrite.runtime.session.connect import (
    connected,
    graph_of,
    imported,
    joined,
    require_devices,
    watchdog_of,
)
from autograph_rewrite.runtime.session.fetches import assemble, name_of
from autograph_rewrite.runtime.session.first_batch import FirstBatch
from autograph_rewrite.runtime.session.gate_feeds import GateFeeds
from autograph_rewrite.runtime.session.on_servers.drain_stores import StoreDrain
from autograph_rewrite.runtime.session.on_servers.finish_together import FinishTogether
from autograph_rewrite.runtime.session.on_servers.staleness_clock import BoundedStaleness, StalenessBound
from autograph_rewrite.runtime.session.original_names import OriginalNames
from autograph_rewrite.runtime.session.step_numbers import StepNumbers
from autograph_rewrite.runtime.session.steps_loop import StepsLoops
from autograph_rewrite.runtime.session.whole_variables import WholeVariables
from autograph_rewrite.runtime.tracing.observers import observers
from autograph_rewrite.runtime.tracing.tracer import StepObserver, observed
from autograph_rewrite.training_graph import TrainingGraph


class DistributedSession:
    """A tf.compat.v1.Session behind the original names. Use it as a context manager.

    Args:
        item: rewritten, or an original to run as it is.
        config: a `ConfigProto`, or None.
        target: address of a server; "": this process, or its job.
    """

    def __init__(self, item: TrainingGraph, config: Any = None, target: str = "") -> None:
        tf = tensorflow()
        self._tf = tf
        self._member = joined(item)
        require_devices(tf, item)
        self.item = item
        self._steps = 0
        self.observer: StepObserver | None = observers()
        self.graph = tf.Graph()
        plan = item.report.plan if item.report is not None else None
        opened = graph_of(item, self._member)
        imported(tf, opened.graph, self.graph, is_rewritten=item.report is not None)
        self._session = connected(tf, item, self.graph, config, target)
        self.first = FirstBatch(item, warned=True)
        self._gates = GateFeeds(self.graph, item.targets)
        self._names = OriginalNames(item, self.graph)
        self._variables = WholeVariables(item, self.graph)
        limit = plan.timeout_seconds if plan is not None and (plan.mode == "mirrored" or self._member) else 0.0
        self._timeout_ms = int(limit * 1e3) if self._member is None else 0
        self._digest = SessionDigest(item, self.graph) if self._member is not None and item.report.digests else None
        self._coordinator = self._make_coordinator(limit)
        self._targets = {self.graph.get_operation_by_name(name) for name in item.targets if self._names.has(name)}
        if self._member is not None and plan is not None and plan.is_asynchronous and plan.staleness:
            clock = StalenessBound(self._session, self.run_ops, plan, self._member, opened.container)
            self._coordinator = BoundedStaleness(self._coordinator, clock)
        self._finish = FinishTogether(item, self._member, self.graph) if self._member is not None else None
        is_driven = isinstance(self._session, ChiefDrivenSession)
        self._numbers = StepNumbers(self.graph, None if is_driven else self._member)
        self._loops: StepsLoops | None = None
        if plan is not None and plan.steps_per_run > 1:
            own = f"/job:worker/replica:0/task:{self._member.task}" if self._member is not None else ""
            self._loops = StepsLoops(item, self.graph, f"{own}/device:CPU:0")
        added = [v.initializer for v in item.state.values() if v.initializer is not None]
        if added:  # restoring a checkpoint of the original would leave these without a value
            self.run_ops([self.graph.get_operation_by_name(name) for name in added])
        self._batches = [(info, i.batch_axis) for i in item.inputs.values() if (info := i) and i.batch_axis is not None]

    def _make_coordinator(self, seconds: float) -> Coordinator:
        """Return what happens with the other workers when a run fails.

        Args:
            seconds: without progress, after which a run is ended.
        """
        if self._member is None:
            return Coordinator()
        plan, session = self.item.report.plan, self._session
        alone = plan.is_asynchronous or plan.stage_hosts  # they go on by themselves, or as worker 0 tells
        failed = None if alone else FailedSteps(self._member)
        watchdog = watchdog_of(self._member, self.item, session, seconds, failed)
        leave = session.abandon if isinstance(session, ChiefDrivenSession) else functools.partial(abandon, session)
        return Workers(self._member, watchdog, self._carry_on, failed, leave)

    def __enter__(self) -> DistributedSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and isinstance(self._session, ChiefDrivenSession):
            self._session.leave()
        else:
            self.close()

    def fetch_apart(self, operations: Iterable[Any]) -> None:
        """Let workers differ in whether they fetch some operations, which meet nobody: each decides what it reads."""
        if self._digest is not None:
            self._digest.apart.update(operations)

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
            timeout_ms: give up after this long; by default after `timeout_seconds` where replicas wait for each other:
                of mirrored variables in any case, of several processes only if nothing is computed meanwhile.
            changed: what else has to be equal in all workers, by name.
            besides: what else is fed, by tensor of `graph`.

        Raises:
            GraphError: a name is unknown or was pruned, batch sizes differ, or the run would write other variables.
            ClusterError: the step did not finish in time, or the workers were not given the same.
        """
        names = [name_of(fetch) for fetch in self._tf.nest.flatten(fetches)]
        found = [self._names.fetch(name) for name in names]
        self._names.require_same_writes(names)
        wanted = [element for fetch in found for element in fetch.elements]
        given = {self._names.feed(key): value for key, value in (feed_dict or {}).items()}
        feeds = {key: value for key, value in given.items() if key is not None}
        rows = self._loops.stacked(feeds) if self._loops is not None and self._loops.repeats(wanted) else ()
        self.first.of_run(self._check_batch({k: v[0] if k in rows else v for k, v in feeds.items()}), names)
        if rows:
            changed = {**(changed or {}), "the number of steps": str(len(feeds[rows[0]]))}
        feeds |= {**self._gates.feeds(wanted), **(besides or {})}
        limit = self._timeout_ms if timeout_ms is None else timeout_ms
        options = self._tf.compat.v1.RunOptions(timeout_in_ms=limit)
        known = self.read_variables(fetch.variable for fetch in found if fetch.variable and not fetch.late)
        self._steps += 1
        try:
            got = iter(self._run(wanted, feeds, options, changed or {}) if wanted or not found else ())
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
            known[fetch.variable] if fetch.variable else assemble(fetch, part)
            for fetch, part in zip(found, parts, strict=True)
        ]
        return self._tf.nest.pack_sequence_as(fetches, values)

    def _run(self, wanted: list[Any], feeds: Mapping[str, Any], options: Any, changed: Mapping[str, str]) -> Any:
        """Run the step.

        Raises:
            ClusterError: somebody is missing, or was in an earlier run, or the workers were not given the same.
        """
        updates = not self._targets.isdisjoint(wanted)
        self._coordinator.before_step(updates=updates)
        try:
            with observed(self.observer if updates else None, self.item, feeds):
                got = self._compared(wanted, feeds, options, changed)
        except self._tf.errors.OpError as error:
            self._coordinator.step_failed(error)
            raise
        self._coordinator.after_step(updates=updates)
        return got

    def _carry_on(self) -> None:
        """Go on after an error: so must all, and each may have updated something else.

        Variables are compared when no step writes them any more: who comes late to the step that has failed elsewhere
        may still update what is on servers, as decayed slots.
        """
        assert self._member is not None
        plan = self.item.report.plan
        Rendezvous(self._member, plan.timeout_seconds).meet(CARRY_ON)
        values = list(self.read_variables().values())
        require_consensus(self._member, plan, captured=values, what=CARRY_ON)
        self._numbers.renew(self._session, plan.timeout_seconds)
        self._clear_servers()

    def _compared(self, wanted: list[Any], feeds: Mapping[str, Any], options: Any, changed: Mapping[str, str]) -> Any:
        """Run the step, and compare what it was given with what the other workers' was."""
        if isinstance(self._session, ChiefDrivenSession):
            self._session.changed = changed
        digest = self._digest.before(wanted, feeds, changed) if self._digest is not None else None
        if self._digest is None or digest is None:
            return self._run_steps(wanted, feeds, options)
        fed = {**feeds, self._digest.feed: digest}
        *got, table = self._run_steps([*wanted, self._digest.fetch], fed, options)
        self._coordinator.require_equal(self._digest.account, table)
        return got

    def _run_steps(self, wanted: list[Any], feeds: Mapping[str, Any], options: Any) -> Any:
        """Run one step, or several in a loop (`steps_per_run`)."""
        count = len(wanted)
        in_loop = self._loops is not None and self._loops.repeats(wanted)
        if self._loops is not None and in_loop:
            wanted, feeds = self._loops.of(wanted, feeds)
        if self._finish is not None:
            wanted = self._finish.of(wanted)
        is_numbered = self._numbers.is_numbered(wanted, options, in_loop=in_loop)
        got = self.run_ops(wanted, feeds, options)[:count]
        if is_numbered:
            tf_server.use_number()
        return got

    def run_ops(
        self, fetches: Any, feeds: Mapping[Any, Any] | None = None, options: Any = None, *, alone: bool = False
    ) -> Any:
        """Run something of the graph; of several processes, watch the others meanwhile.

        Args:
            fetches: tensors and operations of `graph`, as for a tf.compat.v1.Session.
            feeds: values by tensor.
            options: a RunOptions.
            alone: this is worker 0, and others that it drives do not call this.

        Raises:
            ClusterError: somebody is missing, or was in an earlier run.
        """
        watchdog = self._coordinator.watchdog
        if watchdog is None:
            return self._session.run(fetches, feeds, options=options)
        self._coordinator.check()
        session = self.tf_session if alone else self._session
        try:
            watchdog.doing = f"run {self._steps} of the session"
            wanted = tuple(getattr(fetch, "name", "") for fetch in self._tf.nest.flatten(fetches))
            return watchdog.run(lambda: session.run(fetches, feeds, options=options), wanted)
        except ClusterError as error:  # of a run that worker 0 makes for all
            self._coordinator.end(error)
            raise
        except self._tf.errors.OpError as error:
            account = self._digest.account if self._digest is not None else None
            problem = self._coordinator.failure(error, f"finish run {self._steps} of the session", account)
            if problem is None:
                raise
            raise problem from error

    def _clear_servers(self) -> None:
        """Let all workers go on with empty servers; all have come here."""
        plan = self.item.report.plan
        if self._member is None or not plan.homes or plan.is_asynchronous:
            return
        StoreDrain(self._session, own=not self._member.is_chief).remove()
        Rendezvous(self._member, plan.timeout_seconds).meet(CARRY_ON)  # nobody begins before worker 0 is done

    def _check_batch(self, feeds: Mapping[str, Any]) -> dict[str, int]:
        sizes = {
            info.name: np.shape(feeds[info.tensor])[axis]
            for info, axis in self._batches
            if info.tensor in feeds and np.ndim(feeds[info.tensor]) > axis
        }
        check_batch_sizes(sizes, self.item)
        return sizes

    def read_variable(self, name: str) -> np.ndarray[Any, Any]:
        """Return the value of a variable by its original name; of one in `item.state`, one row per replica.

        Raises:
            GraphError: there is no such variable.
        """
        return self.read_variables([name])[name]

    def read_variables(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of many variables in one run, by original name; None for all of the original graph.

        Raises:
            GraphError: there is no such variable, or each replica has a component of it that comes to no one value.
        """
        wanted = list(self.item.variables) if names is None else list(names)
        self._variables.require_readable(wanted if names is not None else ())
        reads = {name: self._variables.reads(name) for name in wanted}
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
        writes = [self._variables.writes(name, value) for name, value in values.items()]
        fed = {source: value for _, feeds in writes for source, value in feeds.items()}
        self.run_ops([ops for ops, _ in writes], fed)
        if self._digest is not None:
            self._digest.wrote({name: v for name, v in values.items() if name not in self.item.state})

    def average_variables(self) -> None:
        """With `local_sgd`, average now what replicas have trained by themselves; in a job all workers call it.

        Raises:
            ClusterError: somebody is missing.
        """
        report = self.item.report
        names = report.averaged if report is not None else ()
        rows = self.run_ops([self._variables.copies(name) for name in names])
        means = replica_means(rows, self._member, report.plan.timeout_seconds) if names else []
        self.write_variables(dict(zip(names, means, strict=True)))

    @property
    def whole_variables(self) -> WholeVariables:
        """The variables, with what reads and writes them."""
        return self._variables

    @property
    def is_driven(self) -> bool:
        """Whether worker 0 runs everything for all, who make the same calls."""
        return isinstance(self._session, ChiefDrivenSession)

    @property
    def state(self) -> dict[str, Any]:
        """What `tf.compat.v1.train.Saver` takes to save and restore what the rewrite added, by name and replica."""
        return {
            f"{name}/replica_{replica}": read
            for name in self.item.state
            for replica, read in enumerate(self._variables.reads(name), self.item.report.first_replica)
        }

    @property
    def tf_session(self) -> Any:
        """The tf.compat.v1.Session that runs the graph, for what insists on one, as a Saver does."""
        return self._session.session if self.is_driven else self._session
