"""reduce: a graph as small as can be found whose rewrite still fails in the same way.

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
from autograph_rewrite.check.side_by_side import Tolerance, TrainedGraph, Training
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
        item: it, flat; as it was where nothing fails.
        kind: how its rewrite fails; empty where it does not.
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
    steps: int
    seed: int
    batch: int | None
    rtol: float
    observers: Sequence[Observer]
    tries: int = field(default=0, init=False)

    def kind(self, item: TrainingGraph, looked_for: str = "") -> str:
        """Return how the rewrite of an item fails; empty where it does not, or cannot be told.

        Args:
            looked_for: the only kind that counts, if one does.
        """
        self.tries += 1
        refusal = FirstRefusal() if looked_for != NUMBERS else None
        try:
            ready = prepare(item, self.config, self.seed)
            plan = compression.without(ready.plan)
            looking = Instrumentation(observers=self.observers, certificate=refusal)
            rewritten = checked(ready.flat, plan, looking)
            if looked_for != REFUSED:
                feeds = ready.random_feeds(self.steps, self.batch, self.seed)
                training = Training(feeds, self.steps, ready.values, self.seed)
                apart = incomparable(ready.flat, rewritten)
                report = compare(ready.original, rewritten, training, Tolerance(self.rtol), apart)
                if report.wrong:
                    return FAILS if any(row.name == FAILED_STEP for row in report.wrong) else NUMBERS
        except VerifyError:
            return REFUSED
        except (RewriteError, ValueError, KeyError, IndexError, TypeError):
            return ""  # it cannot be rewritten, or one device cannot run it
        return REFUSED if refusal is not None and refusal.error is not None else ""


class _BatchAxes(RewriteObserver):
    """Keeps the dimension along which propagation splits each value."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def after_pass(self, name: str, rewrite: Rewrite) -> None:
        """Look at what `propagate` has found."""
        if name == "propagate":
            facts = rewrite.get(Propagation).facts
            self.found = {tensor_name(v): fact.placement.dim for v, fact in facts.items() if fact.placement.is_split}


def reduce(
    item: TrainingGraph,
    config: ConfigLike,
    *,
    steps: int = 1,
    seed: int = 0,
    batch: int | None = None,
    rtol: float = 1e-5,
    observers: Sequence[Observer] = (),
) -> Reduction[TrainingGraph]:
    """Return a small graph whose rewrite fails as that of an item does, on random feeds.

    Args:
        item: a training graph; it is not changed.
        seed: of random feeds, and of random ops that have none.
        observers: called with (pass name, folded graph) after every pass, as in `rewrite`.

    Raises:
        RewriteError: the item cannot be rewritten, or one device cannot run it.
    """
    judge = Judge(config, steps, seed, batch, rtol, observers)
    ready = prepare(item, config, seed)
    kind = judge.kind(ready.original)
    if not kind:
        return Reduction(item, "", len(ready.flat.graph), judge.tries)
    axes = _BatchAxes()
    plan = compression.without(ready.plan)
    try:
        compile_task(ready.flat, plan, instrumentation=Instrumentation(verify=False, observers=[axes]))
    except RewriteError:
        axes.found = {}
    feeds = ready.random_feeds(1, batch, seed)[0]
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
    """Leave out halves, quarters, ... of the nodes, then make single ones simpler, while the rewrite still fails."""

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
    """Return how large an item is: its nodes, and of these what something smaller may take the place of."""
    return len(item.graph), len(removable(item))


# Simpler nodes: an operand in the place of a node, a plain subtraction in the place of an optimizer.
#
# Minimum(x, limit) ► x            ResourceApplyMomentum(w, slot, rate, gradient, momentum) ► AssignSub(w, gradient)


PLAIN = "AssignSubVariableOp"


def with_simpler(item: TrainingGraph, name: str, known: Known) -> TrainingGraph | None:
    """Return a flat item with something simpler in the place of a node; None where there is nothing.

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
    smaller = pruned(replace(item, source=graph))
    keep_order(item.graph, graph)
    return smaller


def _stands_for(operand: Value, value: Value, known: Known) -> bool:
    """Tell whether an operand has the type of a value, and its shape as far as that is known."""
    shapes = {array.shape for one in (operand, value) if (array := known.values.get(tensor_name(one))) is not None}
    return operand.dtype == value.dtype and len(shapes) <= 1


def _is_plain_now(update: Node) -> bool:
    """Let an update subtract what it is given; return whether it did something else before."""
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


# Cuts: a training graph without some of its nodes, whose readers get a constant or a fed batch instead.
#
# x ─► MatMul ─► Tanh ─► Sum        without MatMul, Tanh:     cut ─► Sum      cut: a batch input, or a constant


Array = np.ndarray[Any, Any]
MOST_BYTES = 1 << 16
"""A constant that takes the place of a value is no larger than this."""


@dataclass(frozen=True)
class Known:
    """What is known of the values of a graph.

    Attributes:
        values: of one step, by tensor.
        batch_axes: the dimension that counts examples, by tensor; of other values there is none.
    """

    values: Mapping[str, Array]
    batch_axes: Mapping[str, int]


def without(item: TrainingGraph, dropped: Collection[str], known: Known) -> TrainingGraph | None:
    """Return a flat item without some nodes and what only they need; None where a value is not known.

    Args:
        item: flat; it is not changed.
        known: what takes the places of their values.
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
    smaller = pruned(replace(item, source=graph, inputs=inputs, outputs=outputs))
    keep_order(item.graph, graph)
    return smaller


def keep_order(before: Graph, after: Graph) -> None:
    """Order accesses to a variable as they were: a read that races with an update would differ by itself.

    Args:
        after: what is left of it; it is edited.
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
    """Add what stands for a value: a batch input where it counts examples, else a constant."""
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
    """Return a flat item without the inputs and variables that no step needs; its graph is edited."""
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
    """Return a flat item without colocations and without what only hands on an order.

    Args:
        item: flat; it is not changed.
    """
    graph = item.graph.clone()
    ends = {*item.targets, item.init_op}
    for node in list(graph):
        node.drop_attr("_class")  # may name a node that a cut takes away
        if has(node.op, "orders") and node.name not in ends:
            for user in node.control_users:
                user.remove_control(node)
                for control in node.controls:
                    user.add_control(control)
            graph.erase(node)
    return pruned(replace(item, source=graph))


def with_constant_starts(item: TrainingGraph, starts: Mapping[str, Array]) -> TrainingGraph:
    """Return a flat item whose variables begin as constants."""
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
    """Return an array as one element for all where all are the same, bit by bit, so that it can be read and pasted."""
    splat = np.broadcast_to(array.ravel()[:1].reshape(()), array.shape) if array.size else array
    return splat if splat.tobytes() == array.tobytes() else array


def removable(item: TrainingGraph) -> Sequence[str]:
    """Return the nodes of a step that something smaller may take the place of, producers first."""
    step = ancestors(item.graph.nodes[name] for name in ends_of(item))
    nodes = (node for node in topological_order(item.graph) if node in step and not has(node.op, "orders"))
    return [node.name for node in nodes if not has(node.op, "constants")]
