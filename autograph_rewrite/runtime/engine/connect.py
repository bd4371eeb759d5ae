"""Open a session: on this process's devices, or on its job's server once all workers agree."""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError, GraphError, VerifyError
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ir.types.device_specs import parse as specification
from autograph_rewrite.ir.types.protos import proto
from autograph_rewrite.plan.parts.names import named_exchanges
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import needed_devices
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.coordinator import FailedSteps
from autograph_rewrite.runtime.job.digests import Beside, StepAccount, described, require_consensus, session_name
from autograph_rewrite.runtime.job.exchanges import Relay, abandon
from autograph_rewrite.runtime.job.liveness import PeerMonitor, all_answer, is_of_the_job
from autograph_rewrite.runtime.job.logical_devices import ensure_devices
from autograph_rewrite.runtime.job.tf_server import be_patient, configure, homes_of, join, meetings, target
from autograph_rewrite.runtime.job.watchdog import Closing, Watchdog, may_wait, users_may_wait
from autograph_rewrite.training_graph import TrainingGraph


def joined(item: TrainingGraph) -> Membership | None:
    """Let this process join its job as the worker that the graph was written for.

    Raises:
        ClusterError: the graph is for several processes, and nothing says which of them this is.
    """
    report = item.report
    if report is None or (len(report.plan.processes) == 1 and not report.plan.processes[0]):
        return None
    if report.member is None:
        raise ClusterError(
            f"this graph is for process {report.task} of {len(report.plan.processes)}, and nothing says where they are",
            hint="start it with `autograph-rewrite launch`, or set TF_CONFIG, and rewrite without `task`",
        )
    join(report.member)
    be_patient(report.member, report.plan.timeout_seconds)
    ensure_devices([parse(device).short for device in needed_devices(report.plan, report.task)])
    member: Membership = report.member
    return member


def connected(tf: Any, item: TrainingGraph, graph: Any, config: Any, own: str = "", *, all_read: bool = False) -> Any:
    """Return a session on this process's devices, on `own` server, or on the server of its job.

    Args:
        own: address of a server for this session alone; "": none.
    """
    result, report = _config(tf, item, config), item.report
    if report is None or report.member is None:
        return tf.compat.v1.Session(own, graph=graph, config=result)
    if report.plan.is_driven:
        return _driven(tf, report.plan, report.member, graph, result, all_read=all_read)
    configure(result, report.member, report.plan.homes.values())
    # Each session has separate variables, as in one process; those on servers are told apart by their container.
    result.isolate_session_state = not report.plan.homes
    return tf.compat.v1.Session(target(report.member), graph=graph, config=result)


def _driven(tf: Any, plan: Plan, member: Membership, graph: Any, config: Any, *, all_read: bool) -> ChiefDrivenSession:
    """Return a session on the devices of all workers, which hold its variables as long as it lives."""
    relay = Relay(member, f"autograph-{session_name(member, plan.timeout_seconds)}", holds=not all_read)
    if member.is_chief or all_read:
        configure(config, member, plan.part_devices)
        config.isolate_session_state = not all_read
        session = tf.compat.v1.Session(target(member), graph=graph, config=config)
    else:  # for code that needs a session, as a Saver does; it runs no step
        session = tf.compat.v1.Session(graph=graph, config=config)
    free = _freeing(tf, graph) if all_read else ()
    return ChiefDrivenSession(session, relay, member, plan.timeout_seconds, all_read=all_read, free=free)


def _freeing(tf: Any, graph: Any) -> list[Any]:
    """Add operations to a graph that free its resources, which outlive the session; return them."""
    found = []
    with graph.as_default():
        for op in graph.get_operations():
            if not op.inputs and op.outputs and op.outputs[0].dtype == tf.resource and "container" in op.node_def.attr:
                with tf.device(op.device):
                    found.append(tf.raw_ops.DestroyResourceOp(resource=op.outputs[0], ignore_lookup_error=True))
    return found


def graph_of(item: TrainingGraph, member: Membership | None, *, all_read: bool = False) -> tuple[Any, str]:
    """Return a GraphDef, once all workers agree on it, and the container of its shared resources.

    Raises:
        ClusterError: they would run different graphs, or a worker is missing.
    """
    graph, container = item.graph_def, ""
    if member is None:
        return graph, container
    plan = item.report.plan
    if len(member.workers) > 1:
        require_consensus(member, plan, item.report.contents)
    if plan.is_driven and not member.is_chief and not all_read:
        for node in graph.node:
            node.device = ""  # a Saver that restores here must not write to other workers
    if plan.homes:
        hint = "start the parameter servers, too: the same program, as TF_CONFIG's ps"
        meetings().meet(homes_of(member, plan), plan.timeout_seconds, "hold variables", hint)
    if plan.homes or (plan.is_driven and all_read):
        container = f"autograph-{session_name(member, plan.timeout_seconds)}"
        for node in graph.node:
            if "container" in node.attr and not node.attr["container"].s:
                node.attr["container"].s = container.encode()
    return graph, container


def imported(tf: Any, graph: Any, into: Any, *, is_rewritten: bool) -> None:
    """Import a GraphDef into a tf.Graph.

    Raises:
        VerifyError: TensorFlow refuses a rewritten graph.
        GraphError: TensorFlow refuses an original graph.
    """
    try:
        with into.as_default():
            tf.graph_util.import_graph_def(graph, name="")
    except ValueError as error:
        said = str(error).strip().partition("\n")[0]
        if not is_rewritten:
            hint = "is it made by another version of TensorFlow, or edited by hand?"
            raise GraphError(f"TensorFlow cannot import the graph: {said}", hint=hint) from None
        hint = "the rewrite is wrong: `autograph-rewrite bisect` finds the pass, `reduce` a small graph to report"
        raise VerifyError(f"TensorFlow cannot import the rewritten graph: {said}", hint=hint) from None


def require_devices(tf: Any, item: TrainingGraph) -> None:
    """Refuse a graph whose accelerators this machine does not have; the session makes virtual CPUs.

    Raises:
        ClusterError: a device is missing.
    """
    devices = needed_devices(item.report.plan, item.report.task) if item.report is not None else ()
    for device in map(parse, devices):
        found = tf.config.list_physical_devices(device.kind)
        if device.kind != "CPU" and device.index >= len(found):
            raise ClusterError(
                f"there is no device {device.kind}:{device.index}; this machine has {len(found)} of kind {device.kind}",
                hint="name devices that exist in `devices`",
            )


def _config(tf: Any, item: TrainingGraph, config: Any) -> Any:
    """Return a session config with as many CPU devices as the graph names."""
    result = tf.compat.v1.ConfigProto()
    if config is not None:
        result.CopyFrom(config)
    if item.report is not None:
        devices = map(parse, needed_devices(item.report.plan, item.report.task))
        cpus = [device.index for device in devices if device.kind == "CPU"]
    else:
        specs = [spec for name in {node.device for node in item.graph} if (spec := specification(name)) is not None]
        cpus = [int(spec.number) for spec in specs if spec.kind == "CPU" and spec.number]
    result.device_count["CPU"] = max(result.device_count["CPU"], max(cpus, default=0) + 1)
    return result


def watchdog_of(
    member: Membership, item: TrainingGraph, session: Any, seconds: float, failed: FailedSteps | None
) -> Watchdog:
    """Return the watchdog over the runs of one of several processes.

    Args:
        seconds: without progress, after which a run is ended.
        failed: the failed steps of other workers; None: they do not concern this one.
    """
    plan = item.report.plan
    servers = bool(plan.homes)
    lookout = functools.partial(PeerMonitor, member, seconds, workers=not plan.is_asynchronous, servers=servers)
    waits = users_may_wait(item.graph) if servers else may_wait(item.graph_bytes)
    ends = (lambda: session) if isinstance(session, ChiefDrivenSession) else functools.partial(Closing, session)
    ahead = failed.ahead if failed is not None else None
    exchanges = functools.partial(named_exchanges, plan.edges)
    return Watchdog(seconds, lookout, ends, may_idle=waits, ahead=ahead, exchanges=exchanges)


# Chief-driven session over the stages of all workers: the others replay its calls and receive the results.
#
#     worker 0   session.run(["loss", "train"], feeds) ──► stages @ worker 0, worker 1 ──► values ──► relay
#     worker 1   session.run(["loss", "train"], feeds) ──────── waits ─────────────────────────────────┴──► values
#
# All workers feed the whole batch. Their fetches and feeds are compared while the run goes on (`Beside`). Where all
# workers read variables by themselves after a run, worker 0 begins the next run only when all have called it.

_WIDTH = 200
_LOOK = 1.0
"""Seconds between two looks which workers have left."""
_HINT = "stages are no replicas: every worker makes the same calls, and feeds the whole batch"
_HINT_GONE = "look at what it printed last: do all workers run the same program, and have equally many batches?"
_OF_FEEDS = (ValueError, TypeError)
"""Errors of a session for feeds that do not fit; the errors of operations are OpErrors."""


class ChiefDrivenSession:
    """A tf.compat.v1.Session that worker 0 runs for all workers.

    Args:
        session: on worker 0, one on the stages of all workers; on others, one that runs no step.
        all_read: whether each worker reads variables by itself after a run.
        free: operations that free the resources that outlive the session.

    Attributes:
        changed: descriptions of other values that must be equal in all workers in the next run, by name.
        writes: operations, with feeds, that worker 0 runs before the next run, once all workers have called it.
    """

    def __init__(
        self, session: Any, relay: Relay, member: Membership, seconds: float, *, all_read: bool, free: Sequence[Any]
    ) -> None:
        self._tf = tensorflow()
        self._beside = Beside(member, seconds)
        self._runs = 0
        self.changed: Mapping[str, str] = {}
        self.writes: list[tuple[Sequence[Any], Mapping[Any, Any]]] = []
        self._relay, self._member = relay, member
        self.session = self._running = session
        self._waits = all_read and member.is_chief
        self._end = None
        if member.is_chief or all_read:
            self._end = weakref.finalize(self, _close, session, relay, member, free)
            self._end.atexit = member.is_chief  # resources on other workers end with their processes

    @property
    def graph(self) -> Any:
        """The tf.Graph."""
        return self.session.graph

    def close(self) -> None:
        """Release the session's resources; the other workers wait until worker 0 has done so."""
        if self._end is not None:
            self._end()
        else:
            _close(self.session, self._relay, self._member, ())

    def leave(self) -> None:
        """Close the session of a program that has failed, without waiting for other workers."""
        if self._member.is_chief:
            self.close()
            return
        if self._end is not None:
            self._end.detach()
        self._relay.leave()

    def abandon(self) -> None:
        """Mark the sessions as closed, without closing them, until the process ends."""
        if self._end is not None:
            self._end.detach()
        abandon(self.session)
        self._relay.leave()

    def start_cancel(self) -> None:
        """End the present run by closing its session; called from another thread."""
        self._running.close()

    def run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None, options: Any = None) -> Any:
        """Run tensors and operations of the graph on worker 0, for all workers.

        Raises:
            ClusterError: the workers' calls differ, or a worker has left.
        """
        elements = self._tf.nest.flatten(fetches)
        names = [element.name for element in elements]
        self._runs += 1
        what = f"run {self._runs} of the session"
        self._beside.start(functools.partial(_account, what, names, dict(feeds or {}), self.changed))
        self.changed = {}
        try:
            if self._waits:
                self._await_others()
            while self.writes and self._member.is_chief:
                self.session.run(*self.writes.pop(0))
            values = (
                self._run_on_chief(names, elements, feeds, options) if self._member.is_chief else self._follow(options)
            )
        except EOFError as error:
            problem = self._beside.problem(failed=True) if self._beside.is_done(0) or not self._waits else None
            if problem is None:
                said = f"{self._member.name} runs {_listed(names)}, but {error} has closed its session"
                problem = ClusterError(said, hint=_HINT_GONE)
            raise self._diverged(problem) from None
        except (self._tf.errors.OpError, *_OF_FEEDS) as error:
            problem = self._beside.problem(failed=True)
            if problem is not None:
                raise self._diverged(problem) from error
            raise
        problem = self._beside.problem()
        if problem is not None:
            raise self._diverged(problem)
        return self._tf.nest.pack_sequence_as(fetches, [values[name] for name in names])

    def _await_others(self) -> None:
        """Wait until all workers have called the run: before, they may still read variables after the last one.

        Raises:
            EOFError: a worker has left; the message is its name.
            ClusterError: the workers' calls differ, or a worker is missing.
        """
        while not self._beside.is_done(_LOOK):
            if left := self._relay.left():
                raise EOFError(left[0])
        problem = self._beside.problem()
        if problem is not None:
            raise self._diverged(problem)

    def take_no_more_part(self) -> None:
        """Take part in no run any more, and tell worker 0."""
        if not self._member.is_chief:
            self._relay.leave()

    def _run_on_chief(self, names: Sequence[str], elements: Sequence[Any], feeds: Any, options: Any) -> dict[str, Any]:
        try:
            values: list[Any] = self.session.run(elements, feeds, options=options)
        except (self._tf.errors.OpError, *_OF_FEEDS) as error:
            if not is_of_the_job(error):  # the program's computation has failed: all workers raise this error
                code = getattr(error, "error_code", type(error).__name__)
                failed = {"fetches": names, "error": [code, getattr(error, "message", str(error))]}
                self._send([json.dumps(failed).encode()])
            raise
        self._send([json.dumps({"fetches": names}).encode(), *map(self._encoded, values)])
        return dict(zip(names, values, strict=True))

    def _send(self, texts: Sequence[bytes]) -> None:
        self._running = self._relay.session
        self._relay.send(texts)
        self._running = self.session

    def _follow(self, options: Any) -> dict[str, Any]:
        self._running = self._relay.session
        head, *texts = self._relay.take(options)
        self._running = self.session
        theirs = json.loads(head)
        if "error" in theirs:
            raise self._error(*theirs["error"])
        return dict(zip(theirs["fetches"], map(self._decoded, texts), strict=True))

    def _error(self, code: int | str, message: str) -> Exception:
        """Return the error of the program's computation that worker 0 has sent."""
        for kind in _OF_FEEDS:
            if code == kind.__name__:
                return kind(message)
        made: Exception = self._tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)
        return made

    def _diverged(self, problem: ClusterError) -> ClusterError:
        """Leave the relay, to end without worker 0, and return the error of workers whose calls differ."""
        if not self._member.is_chief:
            self._relay.leave()
        return problem

    def _encoded(self, value: Any) -> bytes:
        return b"" if value is None else bytes(self._tf.make_tensor_proto(value).SerializeToString())

    def _decoded(self, text: bytes) -> Any:
        if not text:
            return None
        value = self._tf.make_ndarray(proto("TensorProto").FromString(text))
        return value if value.ndim else value[()]


def _close(session: Any, relay: Relay, member: Membership, free: Sequence[Any]) -> None:
    """Close a session, unless TensorFlow would wait for a worker that is gone, or the program of worker 0 ends."""
    others_are_there = not member.is_chief or all_answer(member.workers[1:])
    if others_are_there and (not member.is_chief or threading.main_thread().is_alive()):
        with suppress(Exception):
            if free and relay.leave_as_one_of_all():  # only the last: others may still read variables
                session.run(free)
        session.close()
    else:
        abandon(session)
    relay.end() if others_are_there and not free else relay.leave()


def _account(what: str, names: Sequence[str], feeds: Mapping[Any, Any], changed: Mapping[str, str]) -> StepAccount:
    fed = {f"'{key if isinstance(key, str) else key.name}'": described(value) for key, value in feeds.items()}
    return StepAccount(what, {"what is fetched": _listed(sorted(set(names))), **fed, **changed}, hint=_HINT)


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(f"'{name}'" for name in names)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
