"""A step whose variables live in several processes: it runs in a session, which can reach them.

    user's tf.Variable ──► copy on this worker, and on the server if this is worker 0      when somebody else wrote it
    arguments ──► session: forward, backward, push, update on the server ──► results
    user's tf.Variable ◄── what server and worker hold                                     when it is read

With stages on several hosts, worker 0 runs that session, and all are given what it holds (`driven`). TensorFlow's
functions cannot reach another process's devices from every worker. To the program its variables are as the step has
left them: checkpoints, callbacks and `model.save` see that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autograph_rewrite.errors import GraphError, PlanError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.load.signature.captures import FunctionBinding
from autograph_rewrite.passes.parameter_server.await_writes import PREFIX
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.parts.notes import stays_whole
from autograph_rewrite.plan.parts.residence import REPLICATED, placed
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import moved
from autograph_rewrite.requires import tensorflow
from autograph_rewrite.runtime.function.lift_captures import unbind
from autograph_rewrite.runtime.function.mirrored_variables import Mirrors
from autograph_rewrite.runtime.function.session_variables import SessionVariables
from autograph_rewrite.runtime.function.step import batch_axes, most_examples
from autograph_rewrite.runtime.session.session import DistributedSession
from autograph_rewrite.training_graph import TrainingGraph

TARGET = "autograph_step"
OUT_OF_REACH = "functions and Keras models reach no shards in other processes; a session does"


def stand_alone(item: TrainingGraph) -> TrainingGraph:
    """Return a function's item as a session runs it: with variables of its own, and one target."""
    alone = unbind(item).item
    graph = alone.graph.clone()
    target = Builder(graph, graph.unique_name(TARGET)).node(
        "NoOp", controls=[graph.nodes[name] for name in alone.targets]
    )
    return replace(alone, source=graph, targets=(target.name,))


def with_proxies(plan: Plan) -> Plan:
    """Return the plan in which every worker has a copy of all that it reads as a whole, and looks up the rest."""
    lookups = not plan.is_asynchronous
    requests = [
        replace(request, server=replace(request.server, proxy=True, lookups=lookups)) if request.server else request
        for request in plan.variables
    ]
    return replace(plan, variables=tuple(requests))


def without_servers(plan: Plan) -> Plan:
    """Return the plan for a step that only reads variables: each worker has them all."""
    return moved(plan, [_on_every_worker(request) for request in plan.variables])


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
    new = moved(plan, requests)
    return replace(new, notes=(*new.notes, *(stays_whole(name, OUT_OF_REACH) for name in sorted(found))))


class SessionStep:
    """A rewritten item, which stands alone, as a function of its flat arguments.

    Args:
        item: the rewritten item; its binding is that of the function.
        mirrors: what is known of the user's variables.
    """

    def __init__(self, item: TrainingGraph, mirrors: Mirrors) -> None:
        assert isinstance(item.binding, FunctionBinding)
        self._tf = tensorflow()
        self.item, self.binding = item, item.binding
        config = self._tf.compat.v1.ConfigProto()
        if PREFIX.encode() in item.graph_bytes:  # TensorFlow 2.21 goes round for ever in some graphs with such lookups
            options = config.graph_options.rewrite_options
            options.constant_folding = options.OFF
        self._session = DistributedSession(item, config)
        self._session.first.done()
        self._batches = batch_axes(item, self.binding)
        self._variables = SessionVariables(item, self.binding, mirrors, self._session)

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
