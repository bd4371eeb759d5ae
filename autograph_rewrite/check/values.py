"""Compare values of the original with those of a rewritten graph: which exist, and how instances combine to one value.

h   original h:0   rewritten replica_0/h:0, replica_1/h:0 @ split(0)   compared joined; sums added; replicated ones each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autograph_rewrite.certify.certificate import Certificate
from autograph_rewrite.check.report import Array, Deviation
from autograph_rewrite.check.side_by_side import Tolerance, first_line
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.load.inputs import tensor_name
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.traits import SWITCHES
from autograph_rewrite.passes.base.pass_manager import RewriteObserver
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.tensor_map import View
from autograph_rewrite.passes.sharding.shard_variables import WholeVariables
from autograph_rewrite.runtime.engine.fetches import assemble
from autograph_rewrite.training_graph import TrainingGraph

_WITHOUT_VALUES = (dtypes.RESOURCE, dtypes.VARIANT)


class Tap(NamedTuple):
    """An original value, and the tensors of another graph that hold it.

    Attributes:
        name: of the original tensor, with its output.
        view: the instances in the other graph, and how they combine.
    """

    name: str
    view: View

    def deviation(self, got: Sequence[Array], expected: Array, allowed: Tolerance) -> Deviation:
        """Return the error of the combined instances; of replicated instances, the largest error.

        It is infinite if they cannot be combined.

        Args:
            got: of the instances, in order.
        """
        if self.view.placement.differs or any(placement.differs for placement, _ in self.view.joins):
            try:
                got = [assemble(self.view, got)]
            except ValueError as error:
                return Deviation(float("inf"), 0.0, first_line(error))
        found = [allowed.deviation(one, expected) for one in got]
        return max(found, key=lambda one: one.error)


def has_value(value: Value) -> bool:
    """Return whether a value is an array that a step can fetch."""
    return value.dtype not in _WITHOUT_VALUES and value.dtype < dtypes.REF_OFFSET


def values_of_step(item: TrainingGraph) -> Iterator[Value]:
    """Yield the values that every step of a flat item computes, producers first; none are in loops or branches."""
    graph = item.graph
    step = ancestors(graph.nodes[name] for name in ends_of(item) if name in graph.nodes)
    order = [node for node in topological_order(graph) if node in step]
    frames = frames_of(order)
    guards = guards_of(order, frames)
    outputs = {graph.value(info.tensor) for info in item.outputs.values()}
    for node in order:
        if node in frames or node in guards or node.op in SWITCHES:
            continue
        read = [value for value in node.read_outputs if value in outputs or any(u.node in step for u in value.uses)]
        yield from (value for value in read if has_value(value))


def ends_of(item: TrainingGraph) -> list[str]:
    """Return the targets of a step and the producers of its outputs."""
    return [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]


def tap(item: TrainingGraph, value: Value) -> Tap | None:
    """Return the tensors of a rewritten item that hold a value of the flat original; None if it cannot be compared.

    Args:
        item: a rewritten item, or a flat one that passes have edited.
    """
    name, layout = tensor_name(value), item.layout
    if layout is None:
        node = item.graph.nodes.get(value.node.name)
        is_there = node is not None and value.index < len(node.output_dtypes)
        return Tap(name, View((name,), REPLICATED)) if is_there else None
    view = layout.find(name)
    if view is None or not all(one.partition(":")[0] in item.graph.nodes for one in view.tensors):
        return None
    if len(view.tensors) > 1 and not view.placement.differs and not _is_replicated(item, value):
        return None
    return Tap(name, view)


def _is_replicated(item: TrainingGraph, value: Value) -> bool:
    """Return whether the instances of a value are known to be equal; sizes of blocks, for example, are not."""
    node = item.layout.graph.nodes.get(value.node.name)
    if node is None:
        return False
    facts, raw = item.layout.state
    found = node.output(value.index)
    fact = raw.get(found, facts.get(found))
    return fact is not None and fact.placement == REPLICATED


# The graphs after each pass: those that one device can run, and the first that the certificate refuses.
#
#   eliminate-dead-code ► propagate ► own passes ► decompose ► ... ► insert-reshards ► ... ► expand
#   └───────── each state is a graph of one device ─────────────┘    └── folded: the certificate runs it on samples ─┘
#
# The user's passes run among the passes after which one device can run the graph.

CUTS = "partition-model"
"""The pass that writes the program of one device of a model axis."""
CONVERTS = "assign-spans"
"""The first pass after which one device cannot run the graph, because its nodes belong to several replicas."""
MEANS_BLOCKS = frozenset(
    ("slice-batch-inputs", "partition-model", "localize-indices", "localize-kept-rows", "local-batch-norm")
)
"""Passes after which one device cannot run the graph, because it computes on blocks or on devices of a replica."""


@dataclass(frozen=True)
class PassState:
    """The item after a pass, which `behind` names."""

    behind: str
    item: TrainingGraph


class PlainStates(RewriteObserver):
    """Records the graph after every pass that has changed it, as long as one device can run it."""

    def __init__(self, flat: TrainingGraph) -> None:
        self.states = [PassState("normalise", flat)]
        self._edits = -1
        self._is_over = False

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Record the graph if the pass has edited it."""
        edited = rewrite.graph.edits != self._edits
        self._edits = rewrite.graph.edits
        self._is_over = self._is_over or name == CONVERTS or (name in MEANS_BLOCKS and edited)
        if not edited or self._is_over:
            return
        graph, item = rewrite.graph.clone(), rewrite.item
        for node in graph:
            node.drop_attr("_class")  # the nodes that it names may be gone; devices are assigned later
        variables = rewrite.get(WholeVariables).variables if rewrite.has(WholeVariables) else item.variables
        values = dict(zip(item.outputs, rewrite.outputs, strict=True))
        outputs = {name: replace(info, tensor=tensor_name(values[name])) for name, info in item.outputs.items()}
        self.states.append(
            PassState(name, replace(item, source=graph, outputs=outputs, variables=variables, stated_placements=None))
        )


class FirstRefusal(Certificate):
    """A certificate that records its first refusal and lets the rewrite continue, so that the result can be run.

    Attributes:
        pass_name: the first pass after which the graph is refused; empty if no graph is.
        claims: the claims of propagation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pass_name = ""
        self.error: VerifyError | None = None
        self.claims: Claims | None = None

    def placed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph, and the claims on how the devices of a replica share its values."""
        self._note(CUTS, super().placed, graph, claims)

    def written(self, before: Graph, graph: Graph, claims: Claims) -> None:
        """Take the program of one device, and the graph that it was written from."""
        self._note(CUTS, super().written, before, graph, claims)

    def claimed(self, graph: Graph, claims: Claims) -> None:
        """Take the graph, and the placements that are claimed for its values."""
        self.claims = claims
        self._note(CONVERTS, super().claimed, graph, claims)

    def check(self, after: str, graph: Graph) -> None:
        """Check the graph after a pass, unless a graph was refused before."""
        self._note(after, super().check, after, graph)

    def _note(self, name: str, check: Callable[..., None], *args: object) -> None:
        if self.error is not None:
            return
        try:
            check(*args)
        except VerifyError as error:
            self.pass_name, self.error = name, error
