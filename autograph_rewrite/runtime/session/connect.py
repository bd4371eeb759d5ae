"""Open a session: on this process's devices, or on its job's server once all workers agree."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError, GraphError, VerifyError
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ir.types.device_specs import parse as specification
from autograph_rewrite.plan.parts.exchange_names import named_exchanges
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import needed_devices
from autograph_rewrite.runtime.consensus.agreement import common_name, require_consensus
from autograph_rewrite.runtime.consensus.broadcast_queue import Relay
from autograph_rewrite.runtime.consensus.failed_steps import FailedSteps
from autograph_rewrite.runtime.failures.liveness import PeerMonitor
from autograph_rewrite.runtime.failures.watchdog import Closing, Watchdog, may_wait, users_may_wait
from autograph_rewrite.runtime.job.handshake import homes_of
from autograph_rewrite.runtime.job.logical_devices import ensure_devices
from autograph_rewrite.runtime.job.tf_server import be_patient, configure, join, meetings, target
from autograph_rewrite.runtime.session.chief_driven import ChiefDrivenSession
from autograph_rewrite.training_graph import TrainingGraph


def joined(item: TrainingGraph) -> Membership | None:
    """Make this process the worker that the graph is for.

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


def connected(tf: Any, item: TrainingGraph, graph: Any, config: Any, own: str = "") -> Any:
    """Return a session on this process's devices, on `own` server, or on that of its job once all run the same.

    Args:
        tf: the module `tensorflow`.
        item: rewritten or original.
        graph: the tf.Graph of it.
        config: a `ConfigProto`, or None.
        own: address of a server for this session alone; "": none.
    """
    result, report = _config(tf, item, config), item.report
    if report is None or report.member is None:
        return tf.compat.v1.Session(own, graph=graph, config=result)
    if report.plan.is_driven:
        return _driven(tf, report.plan, report.member, graph, result)
    configure(result, report.member, report.plan.homes.values())
    # As sessions of one process, each has its own variables; those on servers are told apart by their container.
    result.isolate_session_state = not report.plan.homes
    return tf.compat.v1.Session(target(report.member), graph=graph, config=result)


def _driven(tf: Any, plan: Plan, member: Membership, graph: Any, config: Any) -> ChiefDrivenSession:
    """Return a session on the stages of all workers, of which each has its variables as long as this session lives."""
    relay = Relay(member, f"autograph-{common_name(member, plan.timeout_seconds)}")
    if member.is_chief:
        configure(config, member, plan.part_devices)
        config.isolate_session_state = True
        session = tf.compat.v1.Session(target(member), graph=graph, config=config)
    else:  # for what insists on a session, as a Saver does
        session = tf.compat.v1.Session(graph=graph, config=config)
    return ChiefDrivenSession(session, relay, member, plan.timeout_seconds)


class Opened(NamedTuple):
    """A GraphDef, and the container of what servers hold of it."""

    graph: Any
    container: str


def graph_of(item: TrainingGraph, member: Membership | None) -> Opened:
    """Return the graph, once all workers are about to run the same; what servers hold is in a container of its own.

    Raises:
        ClusterError: they are not, or somebody is missing.
    """
    graph, container = item.graph_def, ""
    if member is None:
        return Opened(graph, container)
    plan = item.report.plan
    if len(member.workers) > 1:
        require_consensus(member, plan, item.report.contents)
    if plan.is_driven and not member.is_chief:
        for node in graph.node:
            node.device = ""  # nothing is to happen elsewhere when a Saver restores
    if plan.homes:
        hint = "start the parameter servers, too: the same program, as TF_CONFIG's ps"
        meetings().meet(homes_of(member, plan), plan.timeout_seconds, "hold variables", hint)
        container = f"autograph-{common_name(member, plan.timeout_seconds)}"
        for node in graph.node:
            if "container" in node.attr and not node.attr["container"].s:
                node.attr["container"].s = container.encode()
    return Opened(graph, container)


def imported(tf: Any, graph: Any, into: Any, *, is_rewritten: bool) -> None:
    """Import a GraphDef into a tf.Graph.

    Args:
        tf: the module.
        is_rewritten: it has come out of a rewrite.

    Raises:
        VerifyError: TensorFlow refuses what a rewrite has made.
        GraphError: it refuses the original.
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
    """Refuse a graph whose accelerators this machine does not have; virtual CPUs are made by the session.

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
    result.device_count["CPU"] = max(result.device_count["CPU"], max(_cpus(item), default=0) + 1)
    return result


def _cpus(item: TrainingGraph) -> list[int]:
    """Return the numbers of the CPU devices that the graph names."""
    if item.report is not None:
        devices = map(parse, needed_devices(item.report.plan, item.report.task))
        return [device.index for device in devices if device.kind == "CPU"]
    specs = [spec for name in {node.device for node in item.graph} if (spec := specification(name)) is not None]
    return [int(spec.number) for spec in specs if spec.kind == "CPU" and spec.number]


def watchdog_of(
    member: Membership, item: TrainingGraph, session: Any, seconds: float, failed: FailedSteps | None
) -> Watchdog:
    """Return what watches over the runs of one of several processes.

    Args:
        member: this process.
        item: rewritten.
        seconds: without progress, after which a run is ended.
        failed: the steps that have failed on others; None: none concerns this one.
    """
    plan = item.report.plan
    servers = bool(plan.homes)
    lookout = functools.partial(PeerMonitor, member, seconds, workers=not plan.is_asynchronous, servers=servers)
    waits = users_may_wait(item.graph) if servers else may_wait(item.graph_bytes)
    ends = (lambda: session) if isinstance(session, ChiefDrivenSession) else functools.partial(Closing, session)
    ahead = failed.ahead if failed is not None else None
    exchanges = functools.partial(named_exchanges, plan.edges)
    return Watchdog(seconds, lookout, ends, may_idle=waits, ahead=ahead, exchanges=exchanges)
