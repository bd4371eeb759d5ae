"""Call one rewritten step of a traced function with flat tensors.

The captures of the function are bound once, with the copies of variables on other devices; a call adds the arguments.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from autograph_rewrite.codecs.builtin import NONE
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ir.types.dtypes import DOUBLE, NUMBERS
from autograph_rewrite.load.variables import FunctionBinding
from autograph_rewrite.plan.parts.batch_split import DIGEST
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.parts.names import named_exchanges
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import first_devices, run_devices
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.resolve.buckets import BucketFiller
from autograph_rewrite.runtime.engine import native
from autograph_rewrite.runtime.engine.batch_sizes import check_batch_sizes, may_refuse
from autograph_rewrite.runtime.engine.native import ReadAfter, Stack, Stacked, run_steps
from autograph_rewrite.runtime.engine.variable_copies import copies_of, instances_of
from autograph_rewrite.runtime.function.mirrored_variables import Mirrored, MirrorGuard, Mirrors, added_to, adopt
from autograph_rewrite.runtime.function.served_variables import bring
from autograph_rewrite.runtime.job import digests
from autograph_rewrite.runtime.job.coordinator import Coordinator, FailedSteps, SingleProcess, Workers
from autograph_rewrite.runtime.job.digests import CARRY_ON, COMPARE, require_consensus
from autograph_rewrite.runtime.job.exchanges import Rendezvous, replica_means
from autograph_rewrite.runtime.job.liveness import PeerMonitor
from autograph_rewrite.runtime.job.tf_server import abort_when_lost
from autograph_rewrite.runtime.job.watchdog import Watchdog, may_wait
from autograph_rewrite.training_graph import TrainingGraph

COMPARED = frozenset(NUMBERS) - {"resource", "variant"}
"""The types of captured constants that workers compare: a table's handle is each worker's own."""


class BoundStep:
    """A rewritten item (or an original one, which runs as it is) as a function of its flat arguments.

    Args:
        item: made from a function; its binding holds the captures of the function.
        what: the function, for messages.
        telling: returns the account of other values that must be equal in all workers in a step.
    """

    def __init__(
        self,
        item: TrainingGraph,
        mirrors: Mirrors,
        what: str = "the function",
        telling: digests.Telling = digests.nothing,
    ) -> None:
        self._what, self._telling = what, telling
        self._tf = tensorflow()
        self.item = item
        if not isinstance(item.binding, FunctionBinding):
            raise GraphError("this item was not made from a function, so it has no arguments to call it with")
        self.binding = item.binding
        self._member = item.report.member if item.report is not None else None
        self._number = 0
        self._plan = item.report.plan if item.report is not None else None
        self._batches, self._may_refuse = batch_axes(item, self.binding), may_refuse(item)
        self._digests = item.report.digests if self._member is not None else None
        self._shared = digests.Inputs(item, {f"{node}:0": i for i, node in enumerate(self.binding.inputs)}.get)
        self._account = digests.StepAccount("")
        self._told: tuple[dict[str, str], Any] = {}, None
        self._captures = BoundCaptures(item, self.binding, mirrors, self._is_compared)
        self._guard = self._captures.guard
        devices = run_devices(self._plan, item.report.task) if self._plan is not None else ()
        self._on_cpu = native.on_cpu(devices)
        function = self._make_function()
        self._calls = [native.Call(function, on_cpu=self._on_cpu)]
        along = self._captures.along
        firsts = first_devices(self._plan, item.report.task, along) if self._plan is not None else ()
        self._fixed = self._captures.values(function.arguments, firsts)
        mirrors.held.add_binding(self.binding)
        mirrors.held.add(self._fixed, *([self._guard] if self._guard is not None else []))
        if self._digests is not None:
            self._digest_at = function.arguments.index(self._digests[0].partition(":")[0])
            self._fixed[self._digest_at] = self._tf.zeros([DIGEST], self._tf.int32)
        position = {name: i for i, node in enumerate(self.binding.inputs) for name in instances_of(item, node)}
        self._inputs = [(at, position[name]) for at, name in enumerate(function.arguments) if name in position]
        self._coordinator = self._make_coordinator(function)
        self._ready_order = ready_order(item)
        if self._member is not None:
            self._agree()

    def _make_function(self, attempt: int = 0, timed: bytes | None = None) -> native.EncodedFunction:
        """Make the function of the item.

        Args:
            attempt: how many of its steps have failed in all workers: each gives the collectives new groups.
            timed: the graph of the same step with one more result (`ReadyOrder.timed_graph`).
        """
        item, binding = self.item, self.binding
        own, everyones = self._digests or ("", "")
        signature = native.FunctionSignature(
            arguments=[
                *(name for node in binding.inputs for name in instances_of(item, node)),
                *self._captures.nodes,
                *([own.partition(":")[0]] if own else []),
            ],
            outputs=[*binding.outputs, *([everyones] if everyones else []), *([f"{TIMES}:0"] if timed else [])],
            targets=item.targets,
            read_after=self._captures.watched,
        )
        data = serde.to_bytes(item.graph) if item.report is None else timed or item.graph_bytes
        is_alone = self._plan is None or len(self._plan.processes) == 1
        salt = None if is_alone else b"attempt %d" % attempt if attempt else b""
        return native.build(data, native.new_name("step"), signature, salt=salt)

    def _agree(self, *, after_error: bool = False) -> None:
        """Require that all workers are about to run the same graph, and give new variables the values of worker 0.

        Args:
            after_error: whether a step has failed: then all variables get the values of worker 0.

        Raises:
            ClusterError: they would run different graphs, or a worker is missing.
        """
        assert self._member is not None
        assert self._plan is not None
        constants = [c.value for c in self.binding.captures if c.name is None]
        numbers = [np.asarray(value) for value in constants if value.dtype.name in COMPARED]
        what = CARRY_ON if after_error else COMPARE
        require_consensus(self._member, self._plan, self.item.report.contents, numbers, what=what)
        new = [variable for variable in self._captures.variables if variable.adopts or after_error]
        adopt(new, self._member, self._plan.timeout_seconds)

    def _carry_on(self) -> None:
        """Go on after an error with all other workers, from the values of worker 0.

        Each worker may have made other updates. TensorFlow does not cancel the requests of a failed step to other
        processes: they would take values of the next step from their receivers. So the collectives get new groups.
        """
        assert self._member is not None
        self._ready_order = None  # its timed step uses the old groups
        self._agree(after_error=True)
        attempt = len(self._calls)  # earlier calls are kept: traced functions may call them by name
        self._calls.append(native.Call(self._make_function(attempt), on_cpu=self._on_cpu))

    @property
    def _call(self) -> native.Call:
        return self._calls[-1]

    def _is_compared(self, name: str) -> bool:
        """Return whether the workers compare the values of a variable that Python code writes."""
        variable = self.item.variables[name]
        return self._digests is not None and variable.dtype in NUMBERS and variable.shards is None

    def _make_coordinator(self, function: native.EncodedFunction) -> Coordinator:
        """Return the coordinator of replicas that wait for each other; in one process, none if steps wait for input."""
        if self._plan is None:
            return Coordinator()
        waits, seconds = may_wait(function.definition), self._plan.timeout_seconds
        if self._member is not None:
            lookout = functools.partial(PeerMonitor, self._member, seconds)
            exchanges, failed = functools.partial(named_exchanges, self._plan.edges), FailedSteps(self._member)
            watchdog = Watchdog(seconds, lookout, may_idle=waits, ahead=failed.ahead, exchanges=exchanges)
            return Workers(self._member, watchdog, self._carry_on, failed)
        if waits or len(set(self._plan.devices)) == 1 or self._plan.mode != "mirrored":
            return Coordinator()
        return SingleProcess(Watchdog(seconds))

    def __call__(self, flat: Sequence[Any], rows: Sequence[bool] = ()) -> list[Any]:
        """Run the step, or several of them in a loop inside the graph.

        Args:
            flat: one tensor per flat argument.
            rows: for several steps, whether each argument has one row per step; empty: one step.

        Returns:
            One tensor per flat result.

        Raises:
            GraphError: a batch input has another number of examples than it states, or than other inputs.
            ClusterError: the step stands still, a worker is missing, or the workers' inputs differ.
        """
        first = self._first_of(flat, rows)
        if self._may_refuse:
            check_batch_sizes({name: first[index].shape[axis] for name, index, axis in self._batches}, self.item)
        self._captures.bring()
        args, stacked = self._fixed.copy(), self._stacked(rows)
        for at, index in self._inputs:
            args[at] = flat[index]
        self._number += 1
        self._coordinator.before_step()
        if self._member is not None and self._plan is not None and not self._tf.executing_eagerly():
            abort_when_lost(self._member, self._plan.timeout_seconds)  # no watchdog sees the outer function run
        if not self._tf.executing_eagerly():
            return self._run_in_graph(args, stacked)
        written = self._guard.before() if self._guard is not None else []
        if self._digests is not None:
            self._tell(args, first, written, str(flat[rows.index(True)].shape[0]) if True in rows else "")
        try:
            results = self._run(args, stacked)
        except BaseException:  # updates that a failed step has made stay, as on one device
            if self._guard is not None:
                self._guard.failed()
            raise
        count = len(self.binding.outputs)
        if self._guard is not None:
            self._guard.after(results[count + (self._digests is not None) :])
        if self._digests is not None:
            self._coordinator.require_equal(self._account, results[count].numpy())
        return results[:count]

    def average_variables(self) -> None:
        """Average the variables that replicas have trained by themselves; all workers call it together.

        Raises:
            ClusterError: a worker is missing.
        """
        report = self.item.report
        if report is None or not report.averaged:
            return
        variables = self._captures.named(report.averaged)
        rows = [[np.asarray(value) for value in variable.held()] for variable in variables]
        means = replica_means(rows, self._member, report.plan.timeout_seconds)
        for variable, mean in zip(variables, means, strict=True):
            variable.write(mean)
            variable.refresh(variable.value())

    def _called(self, args: list[Any], stacked: Stacked | None, cancellation: Any = None) -> list[Any]:
        learns = self._ready_order
        if learns is not None and stacked is None and cancellation is not None and learns.measures(self._number):
            return self._measured(learns, args, cancellation)
        if stacked is None:
            return self._call(args, cancellation)
        return self._call.looped(args, stacked, cancellation)

    def _measured(self, learns: ReadyOrder, args: list[Any], cancellation: Any) -> list[Any]:
        """Run a timed step, keep the times, and return its other results."""
        if learns.call is None:
            function = self._make_function(len(self._calls) - 1, learns.timed_graph())
            learns.call = native.Call(function, on_cpu=self._on_cpu)
        results = list(learns.call(args, cancellation))
        learns.times.append(results.pop(len(self.binding.outputs) + (self._digests is not None)))
        return results

    def learnt_order(self) -> tuple[str, ...]:
        """Return the order in which gradients are ready, once all workers have agreed on it; () unless it pays off.

        Raises:
            ClusterError: a worker is missing.
        """
        if self._ready_order is None or self._number < LAST:
            return ()
        self._coordinator.before_step()  # if the last step has failed, all carry on, which drops the order
        learnt, self._ready_order = self._ready_order, None
        return learnt.agreed() if learnt is not None else ()

    def follow(self, other: BoundStep) -> None:
        """Continue the count of steps of `other`, which this step replaces."""
        self._number = other._number

    def _stacked(self, rows: Sequence[bool]) -> Stacked | None:
        """Return the arguments of the function that have rows; None for one step."""
        if not rows or self._plan is None:
            return None
        having = {at for at, index in self._inputs if rows[index]}
        return Stacked(tuple(at in having for at in range(len(self._fixed))), self._plan.steps_per_run)

    def _first_of(self, flat: Sequence[Any], rows: Sequence[bool]) -> Sequence[Any]:
        """Return the arguments of the first step; those without examples keep all their rows."""
        if True not in rows:
            return flat
        batches = {index for _, index, _ in self._batches}
        return [x[0] if rows[index] and index in batches else x for index, x in enumerate(flat)]

    def _run_in_graph(self, args: list[Any], stacked: Stacked | None) -> list[Any]:
        """Call the function from one that is being traced.

        Raises:
            GraphError: replicas train separate variables, which the call would overwrite with the first one's.
        """
        if self.item.report is not None and self.item.report.alone:
            raise GraphError(
                f"{self._what} trains each replica by itself (local_sgd), and a function that calls it gives all the "
                "variables of the first one",
                hint="call it from Python; steps_per_run runs several steps in one call",
            )
        with self._tf.control_dependencies(self._guard.in_graph() if self._guard is not None else []):
            if stacked is None:
                return self._add_step(args)[0]
            return run_steps(self._add_step, self._call.types[: len(self.binding.outputs)], args, stacked)[1]

    def _add_step(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Add one step to the function that is being traced; return its results, and its last operation."""
        results, done = self._call.add_op(args)
        count = len(self.binding.outputs)
        if self._guard is not None:
            done = self._tf.group(done, *self._guard.after_in_graph(results[count + (self._digests is not None) :]))
        return results[:count], done

    def _tell(self, args: list[Any], flat: Sequence[Any], written: Iterable[tuple[Any, Any]], steps: str) -> None:
        """Add the digest of all values that must be equal in all workers to the arguments of the step."""
        given = self._shared.given(flat) | ({"the number of steps": steps} if steps else {})
        for variable, value in written:
            given[digests.written_between(str(self._captures.names[id(variable.handle)]))] = digests.described(value)
        told = self._telling() or digests.StepAccount("")
        given |= told.given
        self._account = digests.StepAccount(f"step {self._number} of {self._what}", given, hint=told.hint)
        if given and given != self._told[0]:
            self._told = given, self._tf.constant(digests.digest_of(given))
        if given:
            args[self._digest_at] = self._told[1]

    def _run(self, args: list[Any], stacked: Stacked | None) -> list[Any]:
        """Run the function; if it fails, the mirrors are refreshed before the next step, as they may differ."""
        watchdog = self._coordinator.watchdog
        if watchdog is None:
            return self._called(args, stacked)
        failed, watchdog.doing = True, f"step {self._number} of {self._what}"
        try:
            results = self._called(args, stacked, watchdog.start())
            failed = False
        except self._tf.errors.OpError as error:
            translated = self._coordinator.failure(error, f"finish step {self._number}", self._account)
            self._coordinator.step_failed(translated or error)
            if translated is None:
                raise
            raise translated from error
        finally:
            watchdog.stop(failed=failed)
        return results

    def examples(self, flat: Sequence[Any], rows: Sequence[bool] = ()) -> int | None:
        """Return how many examples flat arguments hold in one step; None if unknown."""
        return most_examples(self._batches, self._first_of(flat, rows))


def batch_axes(item: TrainingGraph, binding: FunctionBinding) -> list[tuple[str, int, int]]:
    """Return name, position and axis of the flat arguments that count examples."""
    position = {f"{node}:0": index for index, node in enumerate(binding.inputs)}
    return [
        (info.name, position[info.tensor], info.batch_axis)
        for info in item.inputs.values()
        if info.batch_axis is not None and info.tensor in position
    ]


def most_examples(batches: Iterable[tuple[str, int, int]], flat: Sequence[Any]) -> int | None:
    """Return the size of the largest batch among flat arguments; None where there is none, or it is not known."""
    return max((size for _, index, axis in batches if (size := flat[index].shape[axis]) is not None), default=None)


# Ready order: the order in which gradients are ready; worker 0 measures it in the first steps, and all adopt it.
#
#     step 1, 2         as planned: buckets filled in the order that the graph lets expect
#     step 3, 4, 5      worker 0 runs the same step with a Timestamp behind each gradient; the others do not notice
#     before step 6     all take the order of worker 0, if buckets would leave earlier; the step is rewritten with it
#
# Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020), section 3.2.3: buckets in
# the order of the first backward pass.


FIRST, LAST = 3, 5
"""The steps that are measured; the times of the first are not used, as TensorFlow optimises the function in it."""
EARLIER = 0.05
"""Share of the time from the first to the last gradient by which the mean byte must leave earlier."""
SCOPE = "autograph_ready"
TIMES = f"{SCOPE}/times"
"""The node with the times at which values are ready, in seconds."""
_DRAWS = re.compile(
    rb"\x12.(Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson|PoissonV2|Crop)|Multinomial"
    rb"|(Parameterized)?TruncatedNormal|SampleDistortedBoundingBox(V2)?|\w+CandidateSampler)[\x1a\x22\x2a]"
)
"""An op, as encoded in a node, that keeps its random state in its kernel: another function would start it again."""


class ReadyOrder:
    """Learns the order in which the members of buckets are ready; every worker of a job has one.

    Attributes:
        call: runs the timed step, once it is made.
        times: of each timed step.
    """

    def __init__(self, item: TrainingGraph, edges: Sequence[EdgePlan]) -> None:
        self._item, self._edges = item, edges
        self._member, self._plan = item.report.member, item.report.plan
        self.times: list[Any] = []
        self.call: native.Call | None = None

    def measures(self, number: int) -> bool:
        """Return whether this process measures a step."""
        return bool(self._member.is_chief) and FIRST <= number <= LAST

    def timed_graph(self) -> bytes:
        """Return the graph of the step with `TIMES`."""
        graph = serde.from_bytes(self._item.graph_bytes)
        stamps = []
        for at, edge in enumerate(self._edges):
            names = instances_of(self._item, edge.node)
            controls = [node for name in names if (node := graph.nodes.get(name)) is not None]
            stamps.append(Builder(graph, f"{SCOPE}/{at}").op("Timestamp", controls=controls))
        Builder(graph, TIMES).node("Pack", *stamps, T=DOUBLE, N=len(stamps), axis=0)
        return serde.to_bytes(graph)

    def agreed(self) -> tuple[str, ...]:
        """Return the order for all later steps, by worker 0, after step LAST; () to keep the planned order.

        Raises:
            ClusterError: a worker is missing.
        """
        values = tuple(dict.fromkeys(edge.value for edge in self._edges))
        order = [-1] * len(values)
        if len(self.times) > 1:  # else these steps ran in a loop, or in another function, and were not measured
            rows = zip(*(np.asarray(times).tolist() for times in self.times[1:]), strict=True)
            ready = {edge.value: median(row) for edge, row in zip(self._edges, rows, strict=True)}
            if leave_earlier(self._plan, self._edges, ready):
                order = [values.index(value) for value in sorted(values, key=ready.__getitem__)]
        meeting = Rendezvous(self._member, self._plan.timeout_seconds)
        (chosen,) = meeting.of_chief([np.asarray(order, np.int32)], "agree on the order of gradients")
        return tuple(values[at] for at in chosen.tolist() if at >= 0)


def ready_order(item: TrainingGraph) -> ReadyOrder | None:
    """Return a `ReadyOrder` of a step; None where the order would change nothing, or cannot be measured.

    On accelerators a Timestamp shows when work was given to the device, not when it was done. A stateful random op
    continues its draws only in the function in which it began.
    """
    report = item.report
    if report is None or report.member is None or report.plan.bucket_order or report.plan.local_sgd is not None:
        return None
    plan: Plan = report.plan
    edges = [edge for edge in plan.edges if edge.bucket and edge.owner != STEP and edge.compressor == NONE]
    several = len({edge.bucket for edge in edges}) > 1
    is_plain = plan.microbatches == 1 and plan.pipeline is None and plan.steps_per_run <= 1
    on_cpu = all(parse(device).kind == "CPU" for device in plan.devices)
    if not (several and is_plain and on_cpu) or _DRAWS.search(item.graph_bytes):
        return None
    return ReadyOrder(item, edges)


def leave_earlier(plan: Plan, edges: Iterable[EdgePlan], ready: Mapping[str, float]) -> bool:
    """Return whether buckets that are filled in the measured order would leave earlier.

    Args:
        ready: the time at which each value is ready, in seconds.
    """
    now: dict[int, list[EdgePlan]] = {}
    then: dict[int, list[EdgePlan]] = {}
    filler = BucketFiller()
    for edge in sorted(edges, key=lambda one: ready[one.value]):
        options = plan.options_of(edge.owner)
        kind = (edge.dtype, options.hint, edge.logical, options.bucket_bytes)
        now.setdefault(edge.bucket, []).append(edge)
        then.setdefault(filler.put(kind, edge.bytes, options.bucket_bytes), []).append(edge)
    span = max(ready.values()) - min(ready.values())
    return _leaves(now.values(), ready) - _leaves(then.values(), ready) > EARLIER * span


def _leaves(buckets: Iterable[Sequence[EdgePlan]], ready: Mapping[str, float]) -> float:
    """Return the mean time at which a byte leaves: when the last value of its bucket is ready."""
    listed = list(buckets)
    total = sum(edge.bytes for members in listed for edge in members)
    return sum(e.bytes * max(ready[m.value] for m in members) for members in listed for e in members) / max(total, 1)


# The captures of a function (variables, their copies, shards, constants), bound once to arguments of its new graph.
#
# captured tf.Variable w ──► w                       replica 0 reads the user's own
#                        └─► replica_1/w             the others a copy, which the guard keeps equal
#                        └─► w/part_0, w/part_1      or shards of it


class BoundCaptures:
    """The captures of a function in its rewritten graph.

    Args:
        is_compared: whether the workers compare the values of a variable that Python code writes.

    Attributes:
        nodes: the placeholders of captures, and of variables that the rewrite has added.
        guard: keeps the copies equal; None where there are no copies.
        watched: handles whose values are read after each step.
        along: how many devices of a replica have separate copies.
        names: of variables, by the id of their handles.
    """

    def __init__(
        self, item: TrainingGraph, binding: FunctionBinding, mirrors: Mirrors, is_compared: Callable[[str], bool]
    ) -> None:
        self._item, self._mirrors = item, mirrors
        self.along = item.layout.mesh.count(item.layout.mesh.along) if item.layout is not None else 1
        in_shards = {name for name, variable in item.variables.items() if variable.shards is not None}
        self._captured = [
            (capture, (capture.node,) if capture.name in in_shards else instances_of(item, capture.node))
            for capture in binding.captures
        ]
        self._copied = {
            names[0]: mirrors.of(capture.value, *kind_of(item, capture.name))
            for capture, names in self._captured
            if capture.name is not None and (len(names) > 1 or is_compared(capture.name))
        }
        for capture, names in self._captured:
            if item.report is not None and capture.name in item.report.alone and names[0] in self._copied:
                self._copied[names[0]].alone = True
        self.names = {id(capture.value): capture.name for capture, _ in self._captured}
        self._cut = [
            (mirrors.in_shards(capture.value, variable, variable.shards), copies_of(item, variable))
            for capture, _ in self._captured
            if capture.name is not None and (variable := item.variables[capture.name]).shards is not None
        ]
        cut = [sharded for sharded, _ in self._cut]
        self.guard = MirrorGuard(self._copied.values(), cut, mirrors) if self._copied or cut else None
        self.watched = self._watched()
        self._added = [(variable, instances_of(item, variable.handle)) for variable in item.state.values()]
        self.nodes = [name for _, names in self._captured for name in names]
        self.nodes += [name for _, names in self._added for name in names]
        self.nodes += [name for _, copies in self._cut for names in copies for name in names]
        self.nodes = list(dict.fromkeys(self.nodes))  # the first shard may have the name of the capture

    def bring(self) -> None:
        """Fetch the values of variables that are on a server between the steps of another function."""
        if self._mirrors.held.has_served:
            bring(one.served for one in self.variables if one.served is not None)

    def _watched(self) -> ReadAfter:
        """Return the variables whose values the guard takes after a step."""
        if self.guard is None:
            return ReadAfter()
        node_of = {id(mirrored): node for node, mirrored in self._copied.items()}
        single = {node_of[id(mirrored)]: mirrored.dtype.as_datatype_enum for mirrored in self.guard.single}
        single |= {node: sharded.dtype.as_datatype_enum for sharded, copies in self._cut for node in copies[0]}
        stacks = [
            [Stack(tuple(node_of[id(one)] for one in rows), rows[0].dtype.as_datatype_enum) for rows in device]
            for device in self.guard.stacks
        ]
        return ReadAfter(single, stacks)

    @property
    def variables(self) -> list[Mirrored]:
        """The captured variables."""
        return self.named([capture.name for capture, _ in self._captured if capture.name is not None])

    def named(self, names: Collection[str]) -> list[Mirrored]:
        """Return the captured variables that have one of these names."""
        return [
            self._mirrors.of(capture.value, *kind_of(self._item, capture.name))
            for capture, _ in self._captured
            if capture.name is not None and capture.name in names
        ]

    def values(self, arguments: Sequence[str], devices: Sequence[str]) -> list[Any]:
        """Return the value of each argument; None for arguments that are no captures.

        Args:
            arguments: names of placeholders.
            devices: the first device of each replica, or all where each has separate copies.
        """
        fixed = {}
        for capture, names in self._captured:
            for replica, name in enumerate(names):
                if name in arguments:
                    mirrored = self._copied.get(names[0]) if replica else None
                    fixed[name] = mirrored.copy_on(devices[replica]) if mirrored is not None else capture.value
        for variable, names in self._added:
            for replica, name in enumerate(names):
                index = self._item.report.first_replica + replica
                fixed[name] = added_to(self._mirrors.state, variable, index, devices[replica]).handle
        for sharded, copies in self._cut:
            for number, names in enumerate(copies):
                places = sharded.shards.places(number, devices[number])
                fixed |= dict(zip(names, sharded.copy_at(places), strict=True))
        return [fixed.get(name) for name in arguments]


def kind_of(item: TrainingGraph, name: str) -> tuple[str, Sequence[int | None] | None]:
    """Return the element type and the shape of a variable.

    Raises:
        GraphError: the type is unknown.
    """
    variable = item.variables[name]
    if variable.dtype not in NUMBERS:
        raise GraphError(f"the variable '{name}' has the unknown element type {variable.dtype}")
    return variable.dtype, variable.shape
