"""Bounded staleness: keep any worker from running ahead of another by more steps than a limit.

    server    autograph_clock/0 = 17    autograph_clock/1 = 15    ...      one counter for each worker
    worker 0  staleness 2: waits before step 18 until worker 1 has done 16

Counters only grow, so reading them and then going on is no race. The others do not wait for a worker that has ended; an
error names a worker that was killed.

Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (2013).
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.errors import ClusterError
from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.passes.collectives.key_operands import salted
from autograph_rewrite.plan.parts.collective_keys import group_key
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.job.coordinator import Workers
from autograph_rewrite.runtime.job.digests import ancestors, session_name
from autograph_rewrite.runtime.job.liveness import PeerMonitor, missing, name_of
from autograph_rewrite.training_graph import TrainingGraph

ENDED = np.int64(2**62)
_LOOK = 0.001
"""Seconds between two looks at the counters, at first."""
_RARELY = 0.05
_ASK = 1.0
"""Seconds of waiting between two questions whether the others are still there."""
_LAST = 2_000
"""Milliseconds that a program which ends takes at most to say so."""


class StalenessBound:
    """The step counters of one session's workers.

    Args:
        run: runs fetches in the session, and watches the others meanwhile.
        container: of the session's resources on servers.

    Attributes:
        counts: the steps that each worker had done at the last look.
    """

    def __init__(self, session: Any, run: Callable[..., Any], plan: Plan, member: Membership, container: str) -> None:
        tf = tensorflow()
        self._run, self._member = run, member
        self._seconds, self._bound = plan.timeout_seconds, plan.staleness or 0
        self._done = 0
        raw = tf.raw_ops
        with session.graph.as_default(), tf.device(min(plan.homes.values())):
            handles = [
                raw.VarHandleOp(dtype=tf.int64, shape=[], shared_name=f"autograph_clock/{task}", container=container)
                for task in range(len(member.workers))
            ]
            self._number = tf.compat.v1.placeholder(tf.int64, [])
            self._write = raw.AssignVariableOp(resource=handles[member.task], value=self._number)
            self._read = tf.stack([raw.ReadVariableOp(resource=handle, dtype=tf.int64) for handle in handles])
        self._set(0)
        options = tf.compat.v1.RunOptions(timeout_in_ms=_LAST)
        self._end = weakref.finalize(self, _end, session, self._write, {self._number: ENDED}, options)
        session_name(member, plan.timeout_seconds)  # an exchange, after which all workers have set their counters
        self.counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(len(handles), np.int64)

    def _set(self, number: int) -> None:
        self._run(self._write, {self._number: number})

    def wait(self) -> None:
        """Wait until this worker may do another step.

        Raises:
            ClusterError: another worker does not advance in time, or is gone.
        """
        began = asked = time.monotonic()
        pause, lookout = _LOOK, PeerMonitor(self._member, self._seconds)
        while self._is_ahead():
            now = time.monotonic()
            if now - began > self._seconds:
                raise self._left_behind()
            if now - asked > _ASK:
                asked, lost = now, lookout.lost()
                if self._is_ahead() and self._slowest in lost:
                    what = f"do step {self.counts.min() + 1}"
                    raise missing(self._member, what, self._seconds, lost=[self._slowest])
            time.sleep(pause)
            pause = min(2 * pause, _RARELY)

    def _is_ahead(self) -> bool:
        """Return whether another step would be too far ahead; look again only if the last look says so."""
        if self._done + 1 - self.counts.min() > self._bound:
            self.counts = self._run(self._read)
        return bool(self._done + 1 - self.counts.min() > self._bound)

    @property
    def _slowest(self) -> str:
        task = int(self.counts.argmin())
        return name_of("worker", task, self._member.workers[task])

    def _left_behind(self) -> ClusterError:
        steps = self.counts.min()
        problem = (
            f"{self._member.name} waited {self._seconds:g} s for {self._slowest}, "
            f"which has done {steps} steps, {self._done - steps} fewer"
        )
        return ClusterError(problem, hint="look at what it printed last; a larger staleness waits later")

    def step(self) -> None:
        """Count a step that is done."""
        self._done += 1
        self._set(self._done)

    def close(self) -> None:
        """Let the others wait for this worker no more."""
        self._end()


class BoundedStaleness(Workers):
    """Workers that update servers independently, none too far ahead of another; `clock` has the counters of all."""

    clock: StalenessBound

    def before_step(self, *, updates: bool = True) -> None:
        """Wait for the slower workers."""
        if updates:
            self.clock.wait()

    def after_step(self, *, updates: bool = True) -> None:
        """Count a step."""
        if updates:
            self.clock.step()

    def close(self) -> None:
        """Let the others wait for this worker no more."""
        with suppress(ClusterError):  # the job has ended: there is nobody to tell
            self.check()
            self.clock.close()


def _end(session: Any, write: Any, feeds: Any, options: Any) -> None:
    """Say that this worker has ended; if the server is gone, no worker waits."""
    with suppress(Exception):
        session.run(write, feeds, options)


# Drain server-side stores after a failed step: contributions of that step must not enter the next.
#
#     step 7   worker 0 pushes its gradients ──► accumulators = 1      worker 1 fails before it pushes
#     after    worker 0 takes what is left                             all go on with empty stores
#
# Otherwise the next step would add the gradients of the failed step to its own. Each worker empties the stores that
# count its runs (`passes.parameter_server.turns`), as each may have come to another number.


_QUEUE, _ACCUMULATOR, _COUNTS = "FIFOQueueV2", "ResourceConditionalAccumulator", "ResourceAccumulatorNumAccumulated"


def drain_stores(session: Any, *, own: bool = False) -> None:
    """Empty the stores of a session's graph between two steps.

    Args:
        own: whether to empty only the stores that count the runs of this worker.
    """
    raw, graph = tensorflow().raw_ops, session.graph
    counts, takes = [], []
    for op in list(graph.get_operations()):
        if op.type not in (_QUEUE, _ACCUMULATOR) or not _is_ours(op) or (own and not _counts_runs(op)):
            continue
        handle = op.outputs[0]
        with graph.as_default(), graph.device(handle.device):
            if op.type == _QUEUE:
                counts.append(raw.QueueSizeV2(handle=handle))
                taken = raw.QueueDequeueV2(handle=handle, component_types=op.get_attr("component_types"))
                takes.append(taken[0].op)  # not fetched: NumPy has no variants
            else:
                counts.append(raw.ResourceAccumulatorNumAccumulated(handle=handle))
                dtype = op.get_attr("dtype")
                taken = raw.ResourceAccumulatorTakeGradient(handle=handle, num_required=1, dtype=dtype)
                takes.append(taken.op)
    while True:
        held = session.run(counts)
        left = [take for take, count in zip(takes, held, strict=True) if count]
        if not left:
            return
        session.run(left)


def _counts_runs(operation: Any) -> bool:
    """Return whether a store is a counter: its size is read, and nothing is taken out."""
    return any(user.type == _COUNTS and _is_ours(user) for user in operation.outputs[0].consumers())


def _is_ours(operation: Any) -> bool:
    return PASS_ATTR in operation.node_def.attr


# Finish together: a run that meets other workers by collectives and on servers is over for all of them at once.
#
#     before   loss, train ──► done                                        another worker's part on the server: deleted
#     after    loss, train ──^──► ControlTrigger ──^──► CollectiveReduceV2 ──► done
#
# TensorFlow gives a run with collectives one number in all processes. When the first worker is done, servers delete all
# data of that number, also data for a worker that is not done. So one more collective runs after all fetches. A value
# that a server computes is fetched through an op of this worker, so it has arrived before that collective. No process
# sends into a branch or loop (`resolve.edges.lowering_choice`): if it is not taken, nothing would wait for the value.


INSTANCE = 0
"""Instance key of that collective: edges have others (`plan.parts.collective_keys`)."""


class FinishTogether:
    """Adds the last collective to the fetches of one session's runs.

    Args:
        graph: the tf.Graph of the session, to which nodes are added.
    """

    def __init__(self, item: TrainingGraph, member: Membership, graph: Any) -> None:
        plan = item.report.plan
        self._tf, self._graph, self._workers = tensorflow(), graph, len(plan.processes)
        self._group = salted(group_key(plan.hosts), plan.digest())
        self._process = f"/job:{member.job}/replica:0/task:{member.task}"
        self._known: dict[tuple[str, ...], list[Any]] = {}
        operations = graph.get_operations()
        meets = any(is_collective(one.type) for one in operations)
        self._is_needed = bool(plan.homes) and meets and not plan.is_driven  # driven: only worker 0 has a run
        self._behind: dict[str, list[Any]] = defaultdict(list)
        if not self._is_needed:
            return
        # At once: a control edge from an operation after its first run changes it, of which TensorFlow warns.
        for name in item.targets:
            operation = graph.get_operation_by_name(name)
            if not operation.outputs:
                self._behind[name].append(self._once(operation, operation.device))

    def of(self, fetches: Sequence[Any]) -> list[Any]:
        """Return the fetches to run instead: as many elements, and possibly one more.

        Args:
            fetches: tensors and operations, or names of them.
        """
        if not self._is_needed:
            return list(fetches)
        names = tuple(getattr(one, "name", one) for one in fetches)
        if names not in self._known:
            self._known[names] = self._joined([self._graph.as_graph_element(one) for one in fetches])
        return self._known[names]

    def _joined(self, fetches: Sequence[Any]) -> list[Any]:
        tf = self._tf
        roots = [getattr(one, "op", one) for one in fetches]
        step = ancestors(roots)
        if not any(is_collective(one.type) for one in step):
            return list(fetches)
        with self._graph.as_default(), tf.device(f"{self._process}/device:CPU:0"):
            here = [tf.identity(one) if hasattr(one, "op") and self._is_away(one.op) else one for one in fetches]
            awaited = [one for one in here if hasattr(one, "op")]
            awaited += [one for operation in step for one in self._behind.get(operation.name, ())]
            last = [self._once(one, one.device).op for one in awaited]
            last += [root for root in roots if not root.outputs and root.name not in self._behind]
            with tf.control_dependencies(last):
                trigger = tf.raw_ops.ControlTrigger()  # unlike NoOp, it also runs after branches that are not taken
            with tf.control_dependencies([trigger]):
                over = tf.raw_ops.CollectiveReduceV2(
                    input=tf.ones([1]),
                    group_size=self._workers,
                    group_key=self._group,
                    instance_key=INSTANCE,
                    ordering_token=[],
                    merge_op="Add",
                    final_op="Id",
                )
        return [*here, over.op]

    def _once(self, source: Any, device: str) -> Any:
        """Return a tensor that is available once another one is, or an operation is done."""
        with self._graph.as_default(), self._tf.device(device or f"{self._process}/device:CPU:0"):
            if hasattr(source, "op"):
                return self._tf.identity(source)
            with self._tf.control_dependencies([source]):
                return self._tf.constant(True)

    def _is_away(self, operation: Any) -> bool:
        return process_of(operation.device) not in ("", self._process)
