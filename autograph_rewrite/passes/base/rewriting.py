"""A rewrite under way: the current graph, item and plan, and the results of passes, one of each type.

    propagate         rewrite.put(state)                        a Propagation
    insert-reshards   rewrite.get(Propagation).transfers[node]  asked for by its type

A result that no pass has found yet is an error that names the pass to run first, so no result is ever half there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.passes.base.anchors import anchor_outputs, digest_nodes, outputs_of
from autograph_rewrite.passes.base.report import PassRecord
from autograph_rewrite.plan.parts.messages import VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph

Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """What a rewrite was asked for; it never changes.

    Attributes:
        item: the normalised item.
        plan: of the whole job.
        task: which of the plan's processes the graph is for.
        training: whether a graph that updates nothing is refused.
        batch: examples of all replicas together, of which the coverage is told; None: what the graph says.
        certificate: compares the rewrite with the original.
    """

    item: TrainingGraph
    plan: Plan
    task: int = 0
    training: bool = True
    batch: int | None = None
    certificate: Certifier | None = None


@dataclass
class Rewrite:
    """What every pass reads and edits.

    Attributes:
        request: what was asked for.
        graph: the folded graph.
        job: the plan of the whole job.
        item: the item as it is now: its variables in shards, the state that was added.
        plan: of this process's part of the job, as it is now: in the end with its edges.
        task: which of `plan.processes` this is.
        feeds: the placeholders of the original graph, also those that no step needs.
        asked: what the plan asked for of each variable.
        nodes_before: how many nodes there were.
        is_rolled: whether micro-batches are iterations of a loop by now.
        verified: the graph's edits when it was verified last; -1: never.
        records: what each pass took.
        began: when, on the clock of `time.perf_counter`.
    """

    request: Request
    graph: Graph
    job: Plan
    item: TrainingGraph
    plan: Plan
    task: int = 0
    feeds: frozenset[str] = frozenset()
    asked: tuple[VariableRequest, ...] = ()
    nodes_before: int = 0
    is_rolled: bool = False
    verified: int = -1
    records: list[PassRecord] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    _results: dict[type, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, graph: Graph) -> Rewrite:
        """Begin to rewrite a graph, which becomes the result's."""
        job, task = request.plan, request.task
        if not request.training:  # there is nothing to accumulate, and no gradient that tells where stages are
            job = job.without_stages()
        plan = job
        if plan.is_asynchronous and len(plan.processes) > 1:  # workers do not wait for each other: each is a job
            plan, task = plan.alone(task), 0
        if plan.stage_hosts:  # all have the whole graph, which worker 0 runs
            task = 0
        anchor_outputs(graph, request.item)
        feeds = frozenset(node.name for node in graph if node.op.startswith("Placeholder"))
        return cls(request, graph, job, request.item, plan, task, feeds, plan.variables, len(graph))

    def put(self, result: object) -> None:
        """Keep what a pass has found; it takes the place of an earlier result of its type."""
        self._results[type(result)] = result

    def has(self, kind: type[Result]) -> bool:
        """Return whether some pass has found this."""
        return kind in self._results

    def get(self, kind: type[Result]) -> Result:
        """Return what some pass has found.

        Raises:
            PassError: none of those that have run finds it.
        """
        if kind not in self._results:
            raise PassError(f"nothing has found the {kind.__name__} of this graph yet", hint="run the passes before it")
        result: Result = self._results[kind]
        return result

    def replace(self, old: Value, new: Value) -> None:
        """Let everybody who reads a value, the outside among them, read another one.

        Raises:
            PassError: they are of different types.
        """
        if old.dtype != new.dtype:
            raise PassError(f"'{new.name}' cannot take the place of '{old.name}': its type is another", node=old.node)
        old.replace_all_uses_with(new, keep=[new.node])
        self.graph.move_anchors(old, new)

    @property
    def instances(self) -> int:
        """How many instances an EACH node has in this process: those of micro-batches, too, until a loop has them."""
        return self.plan.replicas_each if self.is_rolled else self.job.instances_each

    @property
    def micro(self) -> int:
        """How many of them belong to one replica."""
        return 1 if self.is_rolled else self.plan.microbatches

    @property
    def outputs(self) -> list[Value]:
        """The declared outputs, wherever they are now."""
        return outputs_of(self.graph, self.item)

    @property
    def targets(self) -> list[Node]:
        """The nodes that a step runs for their effects."""
        return [self.graph.nodes[name] for name in self.item.targets if name in self.graph.nodes]

    @property
    def roots(self) -> list[Node]:
        """The nodes that the outside needs."""
        graph, item = self.graph, self.item
        names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
        names += [item.init_op] if item.init_op else []
        names += [info.tensor.partition(":")[0] for info in item.inputs.values()]
        names += item.keep
        for variable in item.variables.values():
            names += [variable.handle, *([variable.initializer] if variable.initializer else [])]
        return [*(graph.nodes[name] for name in dict.fromkeys(names) if name in graph.nodes), *digest_nodes(graph)]
