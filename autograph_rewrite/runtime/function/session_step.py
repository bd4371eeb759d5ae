"""Run a step whose variables live in several processes in a session, which can reach them.

    user's tf.Variable ──► copy on this worker, and on the server if this is worker 0      when somebody else wrote it
    arguments ──► session: forward, backward, push, update on the server ──► results
    user's tf.Variable ◄── what server and worker hold                                     when it is read

With stages or replicas over several hosts, worker 0 runs the session for all (`driven`), and each worker reads the
variables itself. TensorFlow's functions cannot reach another process's devices from every worker. The program always
sees the values after the last step: in checkpoints, callbacks and `model.save`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import PASS_ATTR, Node
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.load.variables import Capture, FunctionBinding, SavedBinding, SavedCapture
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.parameter_server import turns
from autograph_rewrite.passes.sharding.shard_variables import pieces_of
from autograph_rewrite.plan.parts.messages import Server, VariableRequest
from autograph_rewrite.plan.parts.names import proxy_of
from autograph_rewrite.plan.parts.notes import stays_whole
from autograph_rewrite.plan.parts.residence import REPLICATED, placed
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import moved
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.engine.native import Reader
from autograph_rewrite.runtime.engine.session import DistributedSession
from autograph_rewrite.runtime.engine.variable_copies import Copy, copies_of, is_apart
from autograph_rewrite.runtime.function.mirrored_variables import Mirrored, Mirrors, adopt, is_equal, is_same
from autograph_rewrite.runtime.function.served_variables import Served, bring, served, table_flags
from autograph_rewrite.runtime.function.step import batch_axes, most_examples
from autograph_rewrite.runtime.job.digests import described, session_name, written_between
from autograph_rewrite.runtime.job.exchanges import WRITE, Rendezvous, stay_for_others
from autograph_rewrite.runtime.job.job_memory import JobMemory
from autograph_rewrite.training_graph import TrainingGraph, Variable

TARGET = "autograph_step"
OUT_OF_REACH = "micro-batches, and several steps of one run, reach no shards in other processes"


def stand_alone(item: TrainingGraph) -> TrainingGraph:
    """Return a function's item for a session: with captures turned into variables of the graph, and one target."""
    alone, _ = unbind(item)
    graph = alone.graph.clone()
    target = Builder(graph, graph.unique_name(TARGET)).node(
        "NoOp", controls=[graph.nodes[name] for name in alone.targets]
    )
    return replace(alone, source=graph, targets=(target.name,))


def with_proxies(plan: Plan) -> Plan:
    """Return the plan in which workers wait until worker 0 has written the program's values between two steps.

    Every worker has a cached copy of the variables on servers that it reads as a whole. Lookups of rows, and of other
    workers' shards, are not cached.
    """
    lookups = not plan.is_asynchronous

    def shared(request: VariableRequest) -> VariableRequest:
        if request.server is not None:
            return replace(request, server=replace(request.server, proxy=True, lookups=lookups))
        is_part = request.over_replicas and not plan.has_shards_of_replicas
        return replace(request, server=Server(lookups=True)) if is_part else request

    return replace(plan, variables=tuple(map(shared, plan.variables)))


def without_servers(plan: Plan) -> Plan:
    """Return the plan for a step that only reads variables: each worker has all of them."""
    return moved(plan, [_on_every_worker(request) for request in plan.variables])


def _on_every_worker(request: VariableRequest) -> VariableRequest:
    options = replace(request.options, synchronizer="all_reduce")
    return placed(replace(request, server=None, options=options), REPLICATED)


def without_shards(plan: Plan) -> Plan:
    """Return the plan with full variables on every worker in place of shards that steps cannot reach on servers.

    A loop of steps is in the graph of one process, and micro-batches do not wait for servers.

    Raises:
        PlanError: the servers are asynchronous: with variables on every worker, the result would be another one.
    """
    found = {one.name for one in plan.variables if one.sizes and one.servers and not one.over_replicas}
    if not found or max(plan.microbatches, plan.steps_per_run) < 2:
        return plan
    if plan.is_asynchronous:
        problem = f"'{min(found)}' is in shards on servers that do not wait for all workers"
        raise PlanError(problem, hint="leave out microbatches and steps_per_run, or leave the variable whole")
    requests = [_on_every_worker(request) if request.name in found else request for request in plan.variables]
    new = moved(plan, requests)
    return replace(new, notes=(*new.notes, *(stays_whole(name, OUT_OF_REACH) for name in sorted(found))))


class SessionStep:
    """A rewritten item without captures (`stand_alone`), as a function of its flat arguments."""

    def __init__(self, item: TrainingGraph, mirrors: Mirrors) -> None:
        assert isinstance(item.binding, FunctionBinding)
        self._tf = tensorflow()
        self.item, self.binding = item, item.binding
        config = self._tf.compat.v1.ConfigProto()
        options = config.graph_options.rewrite_options
        options.constant_folding = options.OFF  # TensorFlow 2.21 loops for ever in some of these graphs
        self._session = DistributedSession(item, config, all_read=JobMemory.here() is None)
        self._session.first.done()
        self._batches = batch_axes(item, self.binding)
        self._variables = SessionVariables(item, self.binding, mirrors, self._session)

    def examples(self, flat: Sequence[Any], _: Sequence[bool] = ()) -> int | None:
        """Return how many examples flat arguments hold; None if unknown."""
        return most_examples(self._batches, flat)

    def __call__(self, flat: Sequence[Any], _: Sequence[bool] = ()) -> list[Any]:
        """Run one step; plans with several steps per run are refused.

        Args:
            flat: one tensor per flat argument.

        Returns:
            One tensor per flat result.

        Raises:
            GraphError: batch inputs hold different numbers of examples, or another function calls this one.
            ClusterError: a worker is missing.
        """
        if not self._tf.executing_eagerly():
            raise GraphError(
                "a step that uses variables in other processes cannot be part of another tf.function",
                hint="call it from Python, or use strategy AllReduce without stages",
            )
        variables, results = self._variables, self.binding.outputs
        feeds = {f"{node}:0": value.numpy() for node, value in zip(self.binding.inputs, flat, strict=True)}
        changed, reads = variables.before_step(), variables.fetches
        fetches = [list(results), list(reads.values()), list(self.item.targets)]
        try:
            outputs, values, _ = self._session.run(fetches, feeds, changed=changed, besides=variables.feeds())
        finally:
            variables.ended()
        variables.after_step(reads, values)
        return [self._tf.constant(value) for value in outputs]


# The user's variables in the session of a step: written into it before a step, and read back after it.
#
#     written from Python since the last step ──► copy on this worker, and on the server if this is worker 0
#     the step has run ──► not here any more: read from the session when Python asks    (`served_variables`)
#                      └─► or fetched with the step, where who asks cannot be seen
#
# A variable on a server does not change from the end of a step here until this worker begins the next step: its update
# waits for all workers, and so do writes of worker 0. So each worker may read it at any time in between.


class SessionVariables:
    """The captured variables of a function, in the session of its step.

    Attributes:
        began: waits until the other workers have begun the next step.
    """

    def __init__(
        self, item: TrainingGraph, binding: FunctionBinding, mirrors: Mirrors, session: DistributedSession
    ) -> None:
        self._tf = tensorflow()
        self._item, self._session = item, session
        self._is_chief = item.report.member.is_chief
        self._is_driven = item.report.plan.is_driven
        named = {capture.name: capture for capture in binding.captures if capture.name is not None}
        self._variables = {
            name: mirrors.of(capture.value, item.variables[name].dtype, None) for name, capture in named.items()
        }
        self._seen: dict[str, Any] = {}
        self._writes = {name: self._writer(item.variables[name]) for name in self._variables}
        targets = [session.graph.get_operation_by_name(name) for name in item.targets]
        # A driven step does not return the variables that it only reads: their values have not changed.
        written = [name for name in self._variables if not (self._is_driven and self._is_only_read(name))]
        self._reads = self._readers(targets, written)
        self._asks = self._readers((), self._variables)
        session.fetch_apart(read.op for read in self._reads.values())
        mirrors.held.add_binding(binding)
        self._workers_stay = self._others_ask_later()
        self._served: dict[str, Served] = {}
        for name, capture in named.items():
            if self._can_wait(name) and (one := served(capture, mirrors.held)) is not None:
                self._served[name] = self._variables[name].served = one
        mirrors.held.add_served(self._served.values())
        self._names = {id(one): name for name, one in self._served.items()}
        self._holders = mirrors.held
        self._held = self._holders.others(self._served)
        # Variables with shards on several workers are read when the step has ended on all of them.
        self._apart = [name for name in self._reads if is_apart(item.variables[name])]
        self._fixed = [name for name in self._variables if name not in self._served]
        self._values = _reader([self._variables[name] for name in self._fixed])
        self._lock = threading.RLock()
        self._runs, self._at_once = False, 1
        self.began = OthersBegan(session)
        self._flags = table_flags(session)
        self._written: set[str] = set()
        self._start()

    def _others_ask_later(self) -> bool:
        """Return whether workers hold variables that others may read after the last step, so that none may leave.

        In an elastic job, which may lose workers, each fetches all variables with every step instead.
        """
        plan = self._item.report.plan
        on_workers = plan.is_driven or any("/job:worker/" in device for device in plan.homes.values())
        return on_workers and JobMemory.here() is None

    def _start(self) -> None:
        """Let all workers begin with the values of worker 0."""
        report = self._item.report
        seconds = report.plan.timeout_seconds
        if len(report.member.workers) > 1:
            new = [variable for variable in self._variables.values() if variable.adopts]
            adopt(new, report.member, seconds)
        self._hand_over(self._changes({}))
        name = session_name(report.member, seconds)  # an exchange: no read from a server before worker 0 has written
        if self._workers_stay:
            stay_for_others(report.member, name, self._session.take_no_more_part)

    def _copies(self, variable: Variable) -> list[Copy]:
        """Return the copies of a variable that this worker writes after the user's variable was written."""
        handles = list(copies_of(self._item, variable))
        if any(piece.name in self._item.report.homes for piece in pieces_of(variable)):
            handles = [*(handles if self._is_chief else ()), tuple(map(proxy_of, handles[0]))]
        return self._there(handles, variable)

    def _there(self, copies: Iterable[Sequence[str]], variable: Variable) -> list[Copy]:
        """Return those copies of a variable that this process reads."""
        found = []
        for handles in copies:
            with suppress(KeyError):
                found.append(Copy(self._session.graph, handles, variable))
        return found

    def _writer(self, variable: Variable) -> tuple[Any, list[Any]]:
        """Return a placeholder, and the ops that write its value to the copies of a variable."""
        with self._session.graph.as_default():
            source = self._tf.compat.v1.placeholder(self._tf.as_dtype(variable.dtype))
            return source, [copy.write(source) for copy in self._copies(variable)]

    def _read_from(self, name: str) -> Copy | None:
        """Return the copy from which a variable is read, that on this worker if there is one; None: it is not used."""
        item, variable = self._item, self._item.variables[name]
        if variable.shards is not None:
            return Copy(self._session.graph, copies_of(item, variable)[0], variable)
        own = [proxy_of(variable.handle)] if name in item.report.homes else []
        handles = (*own, *item.layout.instances(variable.handle)[:1])
        return next(iter(self._there([(handle,) for handle in handles], variable)), None)

    def _readers(self, done: Iterable[Any], names: Iterable[str]) -> dict[str, Any]:
        """Return a tensor for each variable that reads it once operations are done."""
        with self._session.graph.as_default(), self._tf.control_dependencies(list(done)):
            return {name: copy.read() for name in names if (copy := self._read_from(name)) is not None}

    def _is_only_read(self, name: str) -> bool:
        """Return whether a step only reads a variable, so that its value need not come back."""
        variable = self._item.variables[name]
        if variable.shards is not None:
            return False
        own = set(self._writes[name][1])
        handles = [handle for copy in self._copies(variable) for handle in copy.handles]
        users = {op for handle in handles for op in handle.consumers()} - own
        return all(has(op.type, "reads", "inspects") for op in users)

    def _can_wait(self, name: str) -> bool:
        """Return whether a variable can be read later: from this process, or from one that stays until then.

        Servers stay to the end, and so do workers that hold shards (`stay_for_others`), except in elastic jobs.
        """
        copy = self._read_from(name)
        if copy is None or not self._variables[name].watchable:
            return False
        if self._is_driven and not self._workers_stay:
            return False
        staying = ["/job:ps/", f"/job:worker/replica:0/task:{self._item.report.member.task}/"]
        if self._workers_stay:
            staying.append("/job:worker/")
        return all(any(host in f"{one.device}/" for host in staying) for one in copy.handles if one.device)

    def before_step(self) -> dict[str, str]:
        """Write the program's new values into the session; describe the changes, for the digest."""
        bring(one for one in self._served.values() if one.source is not self)  # fetch values in another step's session
        changed: dict[str, str] = {}
        new = self._changes(changed)
        if new:
            self.began.wait()  # before that, the others may still read the values on the server
            if any(written_between(name) in changed and is_apart(self._item.variables[name]) for name in new):
                report = self._item.report  # others may still read the shards that are here
                Rendezvous(report.member, report.plan.timeout_seconds).meet(WRITE)
            self._hand_over(new, later=self._is_driven)
        written = [self._item.variables[name] for name in new if written_between(name) in changed]
        self._written = {piece.handle for variable in written for piece in pieces_of(variable)}
        self._runs = True
        for name in self._served:
            self._variables[name].leave_to(self, free=name not in self._held)
            self._seen.pop(name, None)
        return changed

    def feeds(self) -> dict[Any, Any]:
        """Return the feeds to add to the next step: which others and writes it has to wait for."""
        return self.began.feeds() | {flag: handle in self._written for handle, flag in self._flags.items()}

    def _changes(self, changed: dict[str, str]) -> dict[str, Any]:
        """Return the values that the session does not have, by name.

        Args:
            changed: gets the descriptions of values that differ from those in the session added.
        """
        found = dict(zip(self._fixed, self._values(), strict=True))
        found |= {name: self._variables[name].value() for name, one in self._served.items() if one.source is None}
        new = {}
        for name, now in found.items():
            seen = self._seen.get(name)
            if seen is not None and self._variables[name].watchable and is_same(seen, now):
                continue
            new[name] = now
            if seen is None or not is_equal(seen, now):
                changed[written_between(name)] = described(now)
            self._seen[name] = now
        return new

    def _hand_over(self, new: dict[str, Any], *, later: bool = False) -> None:
        """Write new values into the session.

        Args:
            later: whether others may still read the old values: then write once all have called the next run.
        """
        feeds = {self._writes[name][0]: now.numpy() for name, now in new.items() if self._writes[name][1]}
        writes = [op for name in new for op in self._writes[name][1]]
        driven = self._session.driven
        if writes and later and self._is_chief and driven is not None:
            driven.writes.append((writes, feeds))
        elif writes and not later and (self._is_chief or not self._is_driven):
            self._session.run_ops(writes, feeds, alone=self._is_driven)

    @property
    def fetches(self) -> dict[str, Any]:
        """The reads that a step fetches after its updates, by name."""
        return {name: read for name, read in self._reads.items() if self._comes_back(name) and name not in self._apart}

    def _comes_back(self, name: str) -> bool:
        return name not in self._served or name in self._held

    def after_step(self, names: Iterable[str], values: Sequence[Any]) -> None:
        """Write the user's variables, or leave their values in the session."""
        self.ended()
        self._give(list(names), values)
        held = self._holders.others(self._served)
        late = [name for name in held - self._held if self._served[name].source is self]
        late += [name for name in self._apart if self._comes_back(name) and name not in late]
        self._held = held
        if late:
            self._bring(late)

    def ended(self) -> None:
        """Note that no step runs any more."""
        self._runs, self._at_once = False, 1

    def _give(self, names: Sequence[str], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            variable = self._variables[name]
            variable.write(value)
            self._seen[name] = variable.value()

    def bring(self, wanted: Sequence[Served]) -> None:
        """Fetch the values of variables; successive reads of single variables fetch more and more at once."""
        with self._lock:
            names = [self._names[id(one)] for one in wanted if one.source is self]
            if not names:
                return  # another thread has brought them
            if len(names) == 1:
                known = list(self._served)
                at = known.index(names[0])
                away = [name for name in (*known[at:], *known[:at]) if self._served[name].source is self]
                names, self._at_once = away[: self._at_once], 2 * self._at_once
            self._bring(names)

    def _bring(self, names: Sequence[str]) -> None:
        reads = [self._asks[name] for name in names]
        # Another thread may ask while a step runs: the watchdog cannot watch two runs.
        session = self._session
        values = session.tf_session.run(reads) if self._runs else session.run_ops(reads, alone=self._is_driven)
        with self._tf.__internal__.eager_context.eager_mode():
            self._give(names, values)
        if self._runs:  # the running step may change the value: fetch it again at the next read
            for name in names:
                self._served[name].source = self


def _reader(variables: Sequence[Mirrored]) -> Callable[[], Sequence[Any]]:
    """Return a reader of the user's variables in one call: separate reads cost as much as a small step."""
    if not variables:
        return list
    return Reader([variable.handle for variable in variables], [v.dtype.as_datatype_enum for v in variables])


# Worker 0 waits until the other workers have begun the next step before it writes on a server.
#
# Until then, they may still read the values of the last step there. Each sends a token when it begins a step
# (`passes.parameter_server.turns`). Worker 0 takes the tokens in the step, or before it if it has values to write.


_TAKE = "QueueDequeueManyV2"


class OthersBegan:
    """Takes the tokens of the other workers; does nothing where a step does not wait for them."""

    def __init__(self, session: DistributedSession) -> None:
        self._session = session
        self._has_waited = False
        takes = (op for op in session.graph.get_operations() if op.type == _TAKE and PASS_ATTR in op.node_def.attr)
        found = next((op for op in takes if op.name.startswith(f"{turns.PREFIX}/")), None)
        self._count, self._take = None, None
        if found is None:
            return
        queue, self._count = found.inputs
        # Not `tf.get_static_value`: it forbids to feed the constant from then on.
        self._others = int(tensorflow().make_ndarray(self._count.op.node_def.attr["value"].tensor))
        with session.graph.as_default(), tensorflow().device(queue.device):
            taken = tensorflow().raw_ops.QueueDequeueManyV2(
                handle=queue, n=self._others, component_types=found.get_attr("component_types")
            )
        self._take = taken[0].op

    def wait(self) -> None:
        """Wait until the others have begun the next step.

        Raises:
            ClusterError: a worker is missing.
        """
        if self._take is not None and not self._has_waited:
            self._session.run_ops([self._take])
            self._has_waited = True

    def feeds(self) -> dict[Any, int]:
        """Return the feeds to add to a step: how many tokens it still has to wait for."""
        if self._count is None:
            return {}
        still = 0 if self._has_waited else self._others
        self._has_waited = False
        return {self._count: still}


# Lift captures: turn captured variables into variables of a function's graph, and captured constants into constants.
#
#     captured     w = Placeholder(dtype=resource)            the user's tf.Variable is passed in
#     stand-alone  w = VarHandleOp(shared_name="captured/w")  a variable of the graph, and the value it starts from
#
# The user's variables are only read.


def unbind(item: TrainingGraph) -> tuple[TrainingGraph, Mapping[str, Any]]:
    """Return the item without captures, and the initial values of its variables; one without captures is unchanged.

    Raises:
        GraphError: it captures a resource that is no variable (a table, an iterator).
    """
    binding = item.binding
    if not isinstance(binding, (FunctionBinding, SavedBinding)):
        return item, {}
    graph = item.graph.clone()
    values: dict[str, Any] = {}
    for capture in binding.captures:
        node = graph.nodes.get(capture.node)
        if capture.name is not None:
            values[capture.name] = capture.value if isinstance(capture, SavedCapture) else capture.variable.numpy()
            if node is not None:
                _make_variable(node, item, capture.name, values[capture.name])
        elif node is not None:
            _make_constant(node, capture)
    variables = {
        name: replace(variable, captured=False) if name in values else variable
        for name, variable in item.variables.items()
    }
    return replace(item, source=graph, variables=variables, binding=None), values


def _make_variable(node: Node, item: TrainingGraph, name: str, value: Any) -> None:
    variable = item.variables[name]
    shape = variable.shape if variable.shape is not None else tuple(value.shape)
    attrs = {
        "dtype": dtypes.NUMBERS[variable.dtype],
        "shape": shape,
        "shared_name": f"captured/{node.name}",
        "container": "",
    }
    become(node, "VarHandleOp", (), attrs)
    node.drop_attr("_user_specified_name")


def _make_constant(node: Node, capture: Capture | SavedCapture) -> None:
    dtype = node.attr("dtype")
    if dtype in (dtypes.RESOURCE, dtypes.VARIANT):
        raise GraphError(
            f"the function captures '{capture.node}', a resource that is no variable, so it cannot be run elsewhere",
            node=node,
            hint="pass it to the function as an argument, or verify the step without it",
        )
    value = capture.value if isinstance(capture, SavedCapture) else capture.value.numpy()
    become(node, "Const", (), {"dtype": dtype, "value": value})
    node.drop_attr("_user_specified_name")
