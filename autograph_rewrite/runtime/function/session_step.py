"""A step whose variables live in several processes: it runs in a session, which can reach them.

    user's tf.Variable ──► copy on this worker, and on the server if this is worker 0      when somebody else wrote it
    arguments ──► session: forward, backward, push, update on the server ──► results
    user's tf.Variable ◄── what server and worker hold                                     after every step

With stages on several hosts, worker 0 runs that session, and all are given what it holds (`driven`). TensorFlow's
functions cannot reach another process's devices from every worker. The user's variables stay the truth: checkpoints,
callbacks and `model.save` see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.item import GraphItem, Variable
from autograph_rewrite.load.signature.captures import FunctionBinding
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.names import proxy_name
from autograph_rewrite.plan.parts.residence import REPLICATED, placed
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.consensus.agreement import adopt_from_chief, common_name
from autograph_rewrite.runtime.consensus.step_digest import described, written_between
from autograph_rewrite.runtime.function.lift_captures import unbind
from autograph_rewrite.runtime.function.mirrored_variables import Mirrored, Mirrors, is_equal, is_same
from autograph_rewrite.runtime.function.step import batch_axes, most_examples
from autograph_rewrite.runtime.native import call_by_name, function_def
from autograph_rewrite.runtime.session.session import DistributedSession
from autograph_rewrite.runtime.session.variable_copies import Copy, copies_of

TARGET = "autograph_step"
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"))


def stand_alone(item: GraphItem) -> GraphItem:
    """Return a function's item as a session runs it: with variables of its own, and one target."""
    alone = unbind(item).item
    graph = alone.graph.clone()
    target = graph.add("NoOp", name=graph.unique_name(TARGET), controls=[graph.nodes[name] for name in alone.targets])
    return alone.with_(graph=graph, targets=(target.name,))


def with_proxies(plan: Plan) -> Plan:
    """Return the plan in which every worker has a copy of all that it reads."""
    requests = [
        replace(request, server=replace(request.server, proxy=True)) if request.server is not None else request
        for request in plan.variables
    ]
    return replace(plan, variables=tuple(requests))


def without_servers(plan: Plan) -> Plan:
    """Return the plan for a step that only reads variables: each worker has them all."""
    return replace(plan, variables=tuple(_on_every_worker(request) for request in plan.variables))


def _on_every_worker(request: VariableRequest) -> VariableRequest:
    options = replace(request.options, synchronizer="all_reduce")
    return placed(replace(request, server=None, options=options), REPLICATED)


def without_shards(plan: Plan) -> Plan:
    """Return the plan in which variables whose shards would be in several processes are whole on every worker.

    Raises:
        PlanError: their servers do not wait for all workers, which would compute something else.
    """
    found = {request.name for request in plan.variables if request.sizes and request.servers}
    if not found:
        return plan
    if plan.is_asynchronous:
        problem = f"a function cannot train '{min(found)}' in shards on servers that do not wait for all workers"
        raise PlanError(problem, hint="leave it whole, or train the graph in a session")
    requests = [_on_every_worker(request) if request.name in found else request for request in plan.variables]
    notes = [f"'{name}' is whole on every worker: a function reaches no shards of other processes" for name in found]
    return replace(plan, variables=tuple(requests), notes=(*plan.notes, *sorted(notes)))


class SessionStep:
    """A rewritten item, which stands alone, as a function of its flat arguments.

    Args:
        item: the rewritten item; its binding is that of the function.
        mirrors: what is known of the user's variables.
    """

    def __init__(self, item: GraphItem, mirrors: Mirrors) -> None:
        assert isinstance(item.binding, FunctionBinding)
        self._tf = tensorflow()
        self.item, self.binding = item, item.binding
        self._session = DistributedSession(item)
        self._session.first.done()
        self._batches = batch_axes(item, self.binding)
        self._is_chief = item.report.member.is_chief
        self._is_driven = bool(item.report.plan.stage_hosts)
        self._variables = {
            capture.name: mirrors.of(capture.value, item.variables[capture.name].dtype, None)
            for capture in self.binding.captures
            if capture.name is not None
        }
        self._seen: dict[str, Any] = {}
        self._writes = {name: self._writer(item.variables[name]) for name in self._variables}
        self._reads = self._readers()
        self._values = _reader(list(self._variables.values()))
        self._written = _reader([self._variables[name] for name in self._reads])
        self._start()

    def _start(self) -> None:
        """Let all workers begin with what worker 0 has."""
        report = self.item.report
        seconds = report.plan.timeout_seconds
        if len(report.member.workers) > 1:
            new = [variable for variable in self._variables.values() if variable.adopts]
            values = [np.asarray(variable.value()) for variable in new]
            for variable, value in zip(new, adopt_from_chief(report.member, seconds, values), strict=True):
                variable.write(value)
                variable.adopts = False
        self._write_changes()
        common_name(report.member, seconds)  # nobody reads from a server before worker 0 has written

    def _handles(self, variable: Variable) -> list[Any]:
        """Return what has to be written when the user's variable was."""
        graph, item = self._session.graph, self.item
        names = list(item.layout.instances(variable.handle))
        if variable.name in item.report.homes:
            names = [*(names if self._is_chief else ()), proxy_name(variable)]
        found = []
        for name in names:
            try:
                found.append(graph.get_tensor_by_name(f"{name}:0"))
            except KeyError:
                continue  # this process does not read it
        return found

    def _writer(self, variable: Variable) -> tuple[Any, list[Any]]:
        """Return a placeholder and the ops that write it."""
        raw, v1 = self._tf.raw_ops, self._tf.compat.v1
        with self._session.graph.as_default():
            source = v1.placeholder(self._tf.as_dtype(variable.dtype))
            writes = []
            if variable.shards is not None:
                writes += [
                    Copy(self._session.graph, one, variable).write(source) for one in copies_of(self.item, variable)
                ]
                return source, writes
            for handle in self._handles(variable):
                with self._tf.device(handle.device):
                    writes.append(raw.AssignVariableOp(resource=handle, value=source))
        return source, writes

    def _readers(self) -> dict[str, Any]:
        """Return what reads each variable after the step: this worker's copy, where it has one."""
        graph, item, raw = self._session.graph, self.item, self._tf.raw_ops
        done = [graph.get_operation_by_name(name) for name in item.targets]
        reads = {}
        with graph.as_default(), self._tf.control_dependencies(done):
            for name in self._variables:
                variable = item.variables[name]
                if variable.shards is not None:
                    reads[name] = Copy(graph, copies_of(self.item, variable)[0], variable).read()
                    continue
                handles = {handle.op.name: handle for handle in self._handles(variable)}
                if self._is_driven and self._is_only_read(name, handles.values()):
                    continue
                handle = handles.get(proxy_name(variable))
                if handle is None:
                    try:
                        handle = graph.get_tensor_by_name(f"{item.layout.instances(variable.handle)[0]}:0")
                    except (KeyError, IndexError):
                        continue  # the step has nothing to do with it
                with self._tf.device(handle.device):
                    reads[name] = raw.ReadVariableOp(resource=handle, dtype=self._tf.as_dtype(variable.dtype))
        return reads

    def _is_only_read(self, name: str, handles: Iterable[Any]) -> bool:
        """Return whether a step leaves a variable as it is: nobody has to send it back."""
        own = set(self._writes[name][1])
        users = {op for handle in handles for op in handle.consumers()} - own
        return all(op.type in _READS for op in users)

    def _write_changes(self) -> dict[str, str]:
        """Hand over what somebody else has written since the last step; return what has changed, for the others."""
        feeds: dict[Any, Any] = {}
        writes: list[Any] = []
        changed: dict[str, str] = {}
        for (name, variable), now in zip(self._variables.items(), self._values(), strict=True):
            seen = self._seen.get(name)
            if seen is not None and _is_known(variable, seen, now):
                continue
            source, ops = self._writes[name]
            if ops:
                feeds[source] = now.numpy()
                writes += ops
            if seen is None or not is_equal(seen, now):
                changed[written_between(name)] = described(now)
            self._seen[name] = now
        if writes and (self._is_chief or not self._is_driven):
            self._session.run_ops(writes, feeds, alone=self._is_driven)
        return changed

    def examples(self, flat: Sequence[Any], _: Sequence[bool] = ()) -> int | None:
        """Return how many examples flat arguments hold, where that is known."""
        return most_examples(self._batches, flat)

    def __call__(self, flat: Sequence[Any], _: Sequence[bool] = ()) -> list[Any]:
        """Run the step: one, as a plan for several per run is refused.

        Args:
            flat: one tensor per flat argument.

        Returns:
            One tensor per flat result.

        Raises:
            GraphError: batch inputs hold different numbers of examples, or another function calls this one.
            ClusterError: somebody is missing.
        """
        if not self._tf.executing_eagerly():
            raise GraphError(
                "a step that uses variables in other processes cannot be part of another tf.function",
                hint="call it from Python, or use strategy AllReduce without stages",
            )
        changed = self._write_changes()
        feeds = {f"{node}:0": value.numpy() for node, value in zip(self.binding.inputs, flat, strict=True)}
        fetches = [list(self.binding.outputs), list(self._reads.values()), list(self.item.targets)]
        outputs, values, _ = self._session.run(fetches, feeds, changed=changed)
        for name, value in zip(self._reads, values, strict=True):
            self._variables[name].write(value)
        self._seen.update(zip(self._reads, self._written(), strict=True))
        return [self._tf.constant(value) for value in outputs]


def _reader(variables: Sequence[Mirrored]) -> Callable[[], Sequence[Any]]:
    """Return what reads the user's variables, all in one call: one by one they would cost as much as a small step."""
    if not variables:
        return list
    types = [variable.dtype.as_datatype_enum for variable in variables]
    call = call_by_name.Call(function_def.reader(call_by_name.new_name("read"), types))
    return lambda: call([variable.handle for variable in variables])


def _is_known(variable: Mirrored, seen: Any, now: Any) -> bool:
    return variable.watchable and is_same(seen, now)
