"""Reduce a graph as far as possible while its rewrite still fails in the same way.

    variables begin as constants ► halves, ... single nodes are left out or made simpler, while it fails

Delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.check import compression
from autograph_rewrite.check.report import FAILED_STEP
from autograph_rewrite.check.side_by_side import TrainedGraph, TrialSettings
from autograph_rewrite.check.values import FirstRefusal, ends_of, has_value, values_of_step
from autograph_rewrite.check.verify import checked, compare, incomparable, prepare
from autograph_rewrite.compile import Instrumentation, compile_task
from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.errors import RewriteError, VerifyError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.format.printer import render
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import dense_inputs, handle_node, is_handle, is_update, touching_nodes
from autograph_rewrite.load.inputs import tensor_name
from autograph_rewrite.notebook import NotebookView
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Observer, RewriteObserver
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

Item = TypeVar("Item", bound=TrainingGraph)
NUMBERS, FAILS, REFUSED = "the numbers differ", "the rewritten graph fails", "the rewritten graph is refused"


@dataclass(frozen=True, repr=False)
class Reduction(NotebookView, Generic[Item]):
    """A reduced graph.

    Attributes:
        item: the reduced graph, flat; the given item if nothing fails.
        kind: how its rewrite fails; empty if it does not.
        before: nodes of the original in normal form.
        tries: how many graphs were rewritten.
    """

    item: Item
    kind: str
    before: int
    tries: int

    def __str__(self) -> str:
        if not self.kind:
            return "ok: the rewrite of this graph does not fail"
        count = f"{len(self.item.graph)} of {self.before} nodes, after {self.tries} rewrites"
        return f"{self.kind}: {count}\n{render(self.item.graph)}"


@dataclass
class Judge:
    """Tells how the rewrite of a graph fails."""

    config: ConfigLike
    trial: TrialSettings
    observers: Sequence[Observer]
    tries: int = field(default=0, init=False)

    def kind(self, item: TrainingGraph, looked_for: str = "") -> str:
        """Return how the rewrite of an item fails; empty if it does not, or if one device cannot run the item.

        Args:
            looked_for: the only kind that counts; "": all kinds.
        """
        self.tries += 1
        refusal = FirstRefusal() if looked_for != NUMBERS else None
        try:
            ready = prepare(item, self.config, self.trial)
            plan = compression.without(ready.plan)
            looking = Instrumentation(observers=self.observers, certificate=refusal)
            rewritten = checked(ready.flat, plan, looking)
            refused = refusal is not None and refusal.error is not None
            if looked_for == REFUSED:
                return REFUSED if refused else ""
            apart = incomparable(ready.flat, rewritten)
            report = compare(ready.original, rewritten, ready.training(self.trial), self.trial.allowed, apart)
        except VerifyError:
            return REFUSED
        except (RewriteError, ValueError, KeyError, IndexError, TypeError):
            return ""  # it cannot be rewritten, or one device cannot run it
        if any(row.name == FAILED_STEP for row in report.wrong):
            return FAILS
        if refused:
            return REFUSED  # rather than by its numbers, which differ only now and then if nodes race
        return NUMBERS if report.wrong else ""


class _BatchAxes(RewriteObserver):
    """Records the dimension along which propagation splits each value."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Record the placements that `propagate` has found."""
        if name == "propagate":
            facts = rewrite.get(Propagation).facts
            self.found = {tensor_name(v): fact.placement.dim for v, fact in facts.items() if fact.placement.is_split}


def reduce(
    item: TrainingGraph, config: ConfigLike, trial: TrialSettings, observers: Sequence[Observer] = ()
) -> Reduction[TrainingGraph]:
    """Return a small graph whose rewrite fails in the same way as an item's, on random feeds.

    Args:
        item: a training graph; it is not changed.
        trial: with random feeds.
        observers: called with (pass name, folded graph) after every pass, as in `rewrite`.

    Raises:
        RewriteError: the item cannot be rewritten, or one device cannot run it.
    """
    judge = Judge(config, trial, observers)
    ready = prepare(item, config, trial)
    kind = judge.kind(ready.original)
    if not kind:
        return Reduction(item, "", len(ready.flat.graph), judge.tries)
    axes = _BatchAxes()
    plan = compression.without(ready.plan)
    try:
        compile_task(ready.flat, plan, instrumentation=Instrumentation(verify=False, observers=[axes]))
    except RewriteError:
        axes.found = {}
    feeds = ready.training(trial).feeds_of(0)
    names = [tensor_name(value) for value in values_of_step(ready.flat)]
    with TrainedGraph(ready.flat, plan.timeout_seconds) as trainee:
        trainee.initialise()
        trainee.write(ready.values)
        starts = {name: copies[0] for name, copies in trainee.read()}
        known = Known(dict(zip(names, trainee.observe(feeds, names), strict=True)), axes.found)
    small = ready.flat
    for simpler in (plain, lambda item: with_constant_starts(item, starts)):
        small = other if judge.kind(other := simpler(small), kind) == kind else small
    return Reduction(_shrunk(small, known, judge, kind), kind, len(ready.flat.graph), judge.tries)


def _shrunk(item: TrainingGraph, known: Known, judge: Judge, kind: str) -> TrainingGraph:
    """Remove halves, quarters, ... of the nodes, then simplify single nodes, while the rewrite still fails."""

    def smaller(nodes: Sequence[str]) -> Iterator[TrainingGraph | None]:
        yield without(item, frozenset(nodes), known)
        if len(nodes) == 1:
            yield with_simpler(item, nodes[0], known)

    length = -(-len(removable(item)) // 2)
    while length:
        at, shorter = 0, False
        while at < len(nodes := removable(item)):
            for other in smaller(nodes[at : at + length]):
                if other is not None and _size(other) < _size(item) and judge.kind(other, kind) == kind:
                    item, shorter = other, True
                    break
            else:
                at += length
        if length > 1 or not shorter:
            length //= 2
    return item


def _size(item: TrainingGraph) -> tuple[int, int]:
    """Return how many nodes an item has, and how many of them can be replaced by something smaller."""
    return len(item.graph), len(removable(item))


# Simpler nodes: an operand replaces a node, a plain subtraction replaces an optimizer's update.
#
# Minimum(x, limit) ► x            ResourceApplyMomentum(w, slot, rate, gradient, momentum) ► AssignSub(w, gradient)


PLAIN = "AssignSubVariableOp"


def with_simpler(item: TrainingGraph, name: str, known: Known) -> TrainingGraph | None:
    """Return a flat item with a node replaced by something simpler; None if there is nothing simpler.

    Args:
        item: flat; it is not changed.
    """
    graph = item.graph.clone()
    node = graph.nodes[name]
    if is_update(node):
        return _ordered(item, graph) if _is_plain_now(node) else None
    read = [value for value in node.read_outputs if value.uses]
    if len(read) != 1 or not has_value(read[0]):
        return None
    operand = next((value for value in node.inputs if _stands_for(value, read[0], known)), None)
    if operand is None:
        return None
    read[0].replace_all_uses_with(operand)
    for user in node.control_users:
        user.add_control(operand.node)
        user.remove_control(node)
    return _ordered(item, graph)


def _ordered(item: TrainingGraph, graph: Graph) -> TrainingGraph:
    """Return an item with a smaller graph, pruned, whose accesses to variables keep their order."""
    smaller = pruned(replace(item, source=graph))
    keep_order(item.graph, graph)
    return smaller


def _stands_for(operand: Value, value: Value, known: Known) -> bool:
    """Return whether an operand has the type of a value, and its shape as far as both shapes are known."""
    shapes = {array.shape for one in (operand, value) if (array := known.values.get(tensor_name(one))) is not None}
    return operand.dtype == value.dtype and len(shapes) <= 1


def _is_plain_now(update: Node) -> bool:
    """Replace an update by a plain subtraction of its dense operand; return whether it was another op before."""
    dense = dense_inputs(update)
    if update.op == PLAIN or len(dense) != 1 or update.read_outputs:
        return False
    kept = (update.inputs[0], update.inputs[dense[0]])
    for key in update.attrs:
        update.drop_attr(key)
    update.op = PLAIN
    update.set_attr("dtype", kept[1].dtype)
    update.set_inputs(kept)
    return True


# Cuts: a training graph without some of its nodes; their readers get a constant or a fed batch instead.
#
# x ─► MatMul ─► Tanh ─► Sum        without MatMul, Tanh:     cut ─► Sum      cut: a batch input, or a constant


Array = np.ndarray[Any, Any]
MOST_BYTES = 1 << 16
"""The largest constant that may replace a value."""


@dataclass(frozen=True)
class Known:
    """The values of one step of a graph.

    Attributes:
        values: by tensor.
        batch_axes: the dimension that counts examples, by tensor; only of values that have one.
    """

    values: Mapping[str, Array]
    batch_axes: Mapping[str, int]


def without(item: TrainingGraph, dropped: Collection[str], known: Known) -> TrainingGraph | None:
    """Return a flat item without some nodes and the nodes that only they need; None if a value is not known.

    Args:
        item: flat; it is not changed.
        known: the values that replace those of the dropped nodes.
    """
    graph, inputs = item.graph.clone(), dict(item.inputs)
    for name in dropped:
        node = graph.nodes[name]
        for value in node.read_outputs:
            readers = [use for use in value.uses if use.node.name not in dropped]
            source = _source(graph, value, known, inputs) if readers else value
            if source is None:
                return None
            for use in readers:
                use.node.set_input(use.index, source)
        for user in node.control_users:
            user.remove_control(node)
    outputs = {name: one for name, one in item.outputs.items() if one.tensor.partition(":")[0] not in dropped}
    return _ordered(replace(item, inputs=inputs, outputs=outputs), graph)


def keep_order(before: Graph, after: Graph) -> None:
    """Keep the order of accesses to each variable: a read that races with an update would differ without any fault.

    Args:
        after: the reduced graph; it is edited.
    """
    frames = frames_of(topological_order(before))
    accesses = [node for node in touching_nodes(before) if node.name in after.nodes and node not in frames]
    for late in accesses:
        was, now = ancestors([late]), ancestors([after.nodes[late.name]])
        handles = {handle_node(value) for value in late.inputs if is_handle(value)}
        for early in accesses:
            if early is late or early not in was or after.nodes[early.name] in now:
                continue
            if not handles.isdisjoint(handle_node(value) for value in early.inputs if is_handle(value)):
                after.nodes[late.name].add_control(after.nodes[early.name])


def _source(graph: Graph, value: Value, known: Known, inputs: dict[str, TensorInfo]) -> Value | None:
    """Add the replacement of a value: a batch input if the value counts examples, else a constant."""
    tensor = tensor_name(value)
    array = known.values.get(tensor)
    if array is None or array.nbytes > MOST_BYTES or array.dtype == object:
        return None
    name, axis = f"cut/{value.node.name}/{value.index}", known.batch_axes.get(tensor)
    if axis is None:
        return Builder(graph, name).op("Const", value=_stated_once(array), dtype=value.dtype)
    shape = tuple(None if at == axis else size for at, size in enumerate(array.shape))
    node = Builder(graph, name).node("Placeholder", dtype=value.dtype, shape=shape)
    inputs[node.name] = TensorInfo(node.name, f"{node.name}:0", dtypes.dtype_name(value.dtype), shape, axis)
    return node.output()


def pruned(item: TrainingGraph) -> TrainingGraph:
    """Remove the inputs and variables that no step needs from a flat item; its graph is edited."""
    graph = item.graph
    ends = ends_of(item)
    step = {node.name for node in ancestors(graph.nodes[name] for name in ends)}
    variables = {name: one for name, one in item.variables.items() if one.handle in step}
    if item.init_op is not None:
        for name, one in item.variables.items():
            if name not in variables and one.initializer in graph.nodes:
                graph.node(item.init_op).remove_control(graph.node(one.initializer))
    inputs = {name: one for name, one in item.inputs.items() if one.tensor.partition(":")[0] in step}
    roots = [graph.node(name) for name in (*ends, *([item.init_op] if item.init_op else ()))]
    eliminate_dead_code(graph, roots)
    return replace(item, source=graph, inputs=inputs, variables=variables, keep=(), stated_placements=None)


def plain(item: TrainingGraph) -> TrainingGraph:
    """Return a flat item without colocations and without nodes that only pass on an order.

    Args:
        item: flat; it is not changed.
    """
    graph = item.graph.clone()
    ends = {*item.targets, item.init_op}
    for node in list(graph):
        node.drop_attr("_class")  # may name a node that a cut removes
        if has(node.op, "orders") and node.name not in ends:
            for user in node.control_users:
                user.remove_control(node)
                for control in node.controls:
                    user.add_control(control)
            graph.erase(node)
    return pruned(replace(item, source=graph))


def with_constant_starts(item: TrainingGraph, starts: Mapping[str, Array]) -> TrainingGraph:
    """Return a flat item whose variables are initialised from constants."""
    graph, variables = item.graph.clone(), {}
    assigns = []
    for name, one in item.variables.items():
        handle = graph.node(one.handle).output()
        array = starts[name]
        build = Builder(graph, f"{one.handle}/start")
        start = build.op("Const", value=_stated_once(array), dtype=dtypes.NUMBERS[one.dtype])
        assigns.append(build.node("AssignVariableOp", handle, start, what="assign"))
        variables[name] = replace(one, initializer=assigns[-1].name)
    init = Builder(graph, "start").node("NoOp", controls=assigns)
    return pruned(replace(item, source=graph, variables=variables, init_op=init.name))


def _stated_once(array: Array) -> Array:
    """Return an array as a broadcast of one element if all its bits repeat, so that its text is short."""
    splat = np.broadcast_to(array.ravel()[:1].reshape(()), array.shape) if array.size else array
    return splat if splat.tobytes() == array.tobytes() else array


def removable(item: TrainingGraph) -> Sequence[str]:
    """Return the nodes of a step that can be replaced by something smaller, producers first."""
    step = ancestors(item.graph.nodes[name] for name in ends_of(item))
    nodes = (node for node in topological_order(item.graph) if node in step and not has(node.op, "orders"))
    return [node.name for node in nodes if not has(node.op, "constants")]
