"""Let replicas train by themselves, and average their variables every few steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.analysis.variable_uses import completions, variable_uses
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import ancestors, descendants, reachable, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.replica_marks import ADDED, AVERAGES, replica_mark
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_handle, updates
from autograph_rewrite.ops.facts.placement import Fact
from autograph_rewrite.ops.facts.symbolic_dims import maker_of
from autograph_rewrite.ops.rules.marked import OF_BLOCK, OF_EACH, OF_ONE, TOTAL, as_mark, kind_of, mark
from autograph_rewrite.ops.rules.varying import let_out_mark
from autograph_rewrite.ops.traits import READS, SWITCHES, has
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.order_accesses import access_order
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site
from autograph_rewrite.passes.canonicalize.varying_values import share_of
from autograph_rewrite.passes.collectives.block_bounds import Blocks
from autograph_rewrite.passes.compression.compressor_state import AuxiliaryVariable
from autograph_rewrite.plan.parts.messages import LocalSgd
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.training_graph import Variable


@dataclass(frozen=True)
class Alone:
    """The steps that replicas take by themselves, and the averages of their variables."""

    own: OwnSteps
    averages: Averages
    how: LocalSgd


def train_alone(rewrite: Rewrite) -> None:
    """Let each replica take steps with its part of the batch, and average variables every few steps (`local_sgd`)."""
    state, plan, variables = rewrite.state, rewrite.plan, rewrite.item.variables
    assert plan.local_sgd is not None
    outputs, targets = set(rewrite.outputs), rewrite.targets
    slots = set() if plan.local_sgd.average_slots else _slots(state, rewrite)
    own = find_own_steps(state, variables)
    let_out(state, outputs, own, plan.replicas)
    averaged = {name: variables[name] for name in own.variables if _has_mean(variables[name]) and name not in slots}
    together = rewrite.item.binding is not None
    groups = [targets] if together else [[target] for target in targets]
    averages = add_averages(state, plan.local_sgd, plan.replicas, averaged, groups)
    for waiting, done in averages.done:
        if together:  # a function runs all of its targets, by their names
            rewrite.item = replace(rewrite.item, targets=(*rewrite.item.targets, done.name))
        else:
            wait_for(rewrite.graph, waiting, done)
    rewrite.put(revise(state))
    rewrite.put(access_order(rewrite.graph, rewrite.targets))
    rewrite.put(Alone(own, averages, plan.local_sgd))


def trains_alone(rewrite: Rewrite) -> bool:
    """Return whether replicas train by themselves."""
    return rewrite.plan.local_sgd is not None and rewrite.plan.replicas > 1


def _slots(state: Propagation, rewrite: Rewrite) -> set[str]:
    step = ancestors(rewrite.targets) | set(rewrite.targets)
    uses = variable_uses(state, rewrite.item.variables, step=step)
    return {name for name, use in uses.items() if use.owner is not None}


def _has_mean(variable: Variable) -> bool:
    return dtypes.NUMBERS.get(variable.dtype, 0) in dtypes.INEXACT


def notes_of(alone: Alone, variables: Mapping[str, Variable]) -> Iterator[Note]:
    """Yield a note for each variable that replicas write by themselves: its value is not that of one device."""
    how = alone.how
    first = f", and after each of the first {how.warmup_steps}" if how.warmup_steps else ""
    when = f"every {how.period} steps{first}" if how.period > 1 else "after each step"
    for name in alone.own.variables:
        if name in alone.averages.averaged:
            text = f"each replica updates its own with its part of the batch; averaged {when}"
        else:
            why = "as average_slots says" if _has_mean(variables[name]) else f"{variables[name].dtype} has no mean"
            text = f"each replica updates its own with its part of the batch; never averaged, {why}"
        yield Note(name, "local_sgd", text)


TRAIN_ALONE = Pass("train-alone", train_alone, trains_alone, (Propagation,), (Propagation, Alone))


# Local steps need a counter that is kept from step to step, and at least one example per replica.
#
# before   step = Identity(0)                     next = step + 1
# after    step = Identity(ReadVariableOp(n))     next = step + 1 ──► n


TOO_FEW = (
    "with local_sgd each replica trains on its part of the batch, and this batch has fewer examples than replicas: "
    "drop the last one (drop_remainder=True), or leave local_sgd out"
)


def _keep_counts(rewrite: Rewrite) -> None:
    """Count the steps between averages, and fail on a batch with fewer examples than replicas (`local_sgd`)."""
    blocks, alone = rewrite.get(Blocks), rewrite.get(Alone)
    for before, after in alone.averages.counters:
        kept = AuxiliaryVariable(rewrite, f"{SCOPE}/steps", (), dtypes.INT64, near=before.output())
        before.set_input(0, kept.before)
        kept.becomes(after, after)
    parts = [node for node in alone.own.parts if node.name in rewrite.graph.nodes]
    if not parts:
        return
    build = FoldedBuilder.of(rewrite, blocks.source, f"{SCOPE}/examples", span=ONCE)
    enough = build.op("GreaterEqual", blocks.part, build.const(rewrite.local, dtypes.INT32, "replicas"), what="suffice")
    text = {"value": np.asarray(TOO_FEW.encode(), object), "dtype": dtypes.STRING}
    said = rewrite.add("Const", [], Site(f"{SCOPE}/too_few", ONCE, blocks.source.node), attrs=text)
    site = Site(f"{SCOPE}/check", ONCE, blocks.source.node)
    check = rewrite.add("Assert", [enough, said.output()], site, attrs={"T": (dtypes.STRING,)})
    for node in parts:
        node.add_control(check)


COUNT_STEPS = Pass("count-steps", _keep_counts, lambda rewrite: rewrite.has(Alone), (Homes, Blocks))


# Averages: after the updates of every `period`-th step, variables become their mean over the replicas.
#
#     n := n + 1      due = n % period == 0, or n <= warmup
#     w := w - rate dw ──► read ──► Switch(due) ──► w / N: partial(sum) ──► sum ──► w := mean            in the branch
#
# All replicas have the same counter, so all of them average in a step, or none. Averages are sums like those of
# gradients: edges of the plan, with buckets, lowerings and costs.
#
# Stich, Local SGD Converges Fast and Communicates Little (2019); Lin et al., Don't Use Large Mini-Batches, Use Local
# SGD (2020).


SCOPE = AVERAGES


class _Step(NamedTuple):
    """The number of steps before this one, the number with it, and whether variables are averaged now."""

    before: Node
    after: Value
    due: Value


@dataclass
class Averages:
    """The averages that have been added.

    Attributes:
        counters: for each group of targets, the number of steps before a step and after it; empty if every step is
            averaged. The pass `count-steps` keeps them from step to step.
        done: each group of targets, with the node that runs once variables are averaged or need not be.
        averaged: names of the variables.
    """

    counters: list[tuple[Node, Value]] = field(default_factory=list)
    done: list[tuple[Sequence[Node], Node]] = field(default_factory=list)
    averaged: dict[str, None] = field(default_factory=dict)


def add_averages(
    state: Propagation, how: LocalSgd, replicas: int, averaged: Mapping[str, Variable], groups: Sequence[Sequence[Node]]
) -> Averages:
    """Average the variables that each group of targets writes, after it.

    Args:
        state: placements; the graph is edited.
        groups: targets that run together.

    Raises:
        GraphError: a variable is updated in a branch or a loop that nothing waits for.
    """
    found = Averages()
    for targets in groups:
        group = _Group(state.graph, targets, averaged, found)
        if group.written:
            found.done.append((targets, group.average(how, replicas)))
    return found


def wait_for(graph: Graph, targets: Sequence[Node], done: Node) -> None:
    """Let targets wait for averages; a target that these wait for gives its name to a node that waits for both.

    Args:
        targets: of a step.
        done: runs once variables are averaged or need not be.
    """
    before = ancestors([done])
    for target in targets:
        if target not in before:
            target.add_control(done)
            continue
        name = target.name
        take_name(graph, target, graph.unique_name(f"{name}/of_replica"))
        Builder(graph, name).node("NoOp", controls=[target, done])


class _Group:
    """The targets of one step, and the variables that they write."""

    def __init__(
        self, graph: Graph, targets: Sequence[Node], averaged: Mapping[str, Variable], found: Averages
    ) -> None:
        self._graph, self._targets, self._averaged, self._found = graph, targets, averaged, found
        step = ancestors(targets) | set(targets)
        by_handle = updates(node for node in graph if node in step)
        self.written: dict[str, tuple[Node, list[Node]]] = {}
        for name, variable in averaged.items():
            handle = graph.nodes.get(variable.handle)
            if handle is not None and (made := by_handle.get(handle)):
                self.written[name] = handle, made

    def average(self, how: LocalSgd, replicas: int) -> Node:
        """Add the averages; return the node that runs once variables are averaged or need not be."""
        graph, ends = self._graph, self._ends()
        step = self._count(how) if how.period > 1 else None
        writes = []
        for name, (handle, _) in self.written.items():
            build, value = Builder(graph, f"{SCOPE}/{name}", handle), self._read(name, ends[name])
            if step is not None:
                value = build.node("Switch", value, step.due, what="if_due", marks=as_mark(OF_BLOCK, OF_ONE)).output(1)
            share = share_of(value, replicas, f"{SCOPE}/{name}/mean")
            mark(share, OF_BLOCK, TOTAL)
            inputs = handle.output(), share.output()
            writes.append(build.node("AssignVariableOp", *inputs, what="average", dtype=value.dtype))
            self._found.averaged[name] = None
        return self._done(writes, step)

    def _ends(self) -> dict[str, list[Node]]:
        """Return, by variable, the nodes that have run once this step has read and updated it, also in branches.

        Raises:
            GraphError: nothing waits for an update in a branch or a loop.
        """
        order = topological_order(self._graph)
        behind = descendants(self._targets) | set(self._targets)
        accesses = {}
        for name, (handle, made) in self.written.items():
            reads = [use.node for use in handle_uses(handle) if use.node.op in READS and use.node not in behind]
            accesses[name] = [*made, *reads]
        certain = unconditional_nodes(order)
        ends = completions(order, certain, dict.fromkeys(node for nodes in accesses.values() for node in nodes))
        for _, made in self.written.values():
            for node in made:
                if not ends[node]:
                    raise GraphError(
                        f"'{node.name}' updates a variable in a branch or a loop that nothing waits for",
                        node=node,
                        hint="let the step wait for it, or leave local_sgd out",
                    )
        return {
            name: list(dict.fromkeys(end for node in nodes for end in ends[node])) for name, nodes in accesses.items()
        }

    def _read(self, name: str, before: Collection[Node]) -> Value:
        handle, variable = self.written[name][0], self._averaged[name]
        return Builder(self._graph, f"{SCOPE}/{name}/own", handle).op(
            "ReadVariableOp",
            handle.output(),
            controls=before,
            marks=as_mark(OF_BLOCK, OF_ONE),
            recorded=[variable.shape] if variable.shape is not None else None,
            dtype=dtypes.NUMBERS[variable.dtype],
        )

    def _count(self, how: LocalSgd) -> _Step:
        """Count the step, and compute whether variables are averaged after it."""
        build, kind = Builder(self._graph, SCOPE), dtypes.INT64
        before = build.node("Identity", build.const(0, kind, "none"), what="step")
        after = build.op("AddV2", before.output(), build.const(1, kind, "one"), what="next_step")
        left = build.op("FloorMod", after, build.const(how.period, kind, "period"), what="left")
        due = build.op("Equal", left, build.const(0, kind, "nothing_left"), what="is_due")
        if how.warmup_steps:
            early = build.op("LessEqual", after, build.const(how.warmup_steps, kind, "warmup_steps"), what="is_early")
            due = build.op("LogicalOr", due, early, what="is_early_or_due")
        return _Step(before, after, due)

    def _done(self, writes: Sequence[Node], step: _Step | None) -> Node:
        """Return the node that runs once variables are averaged or need not be."""
        build = Builder(self._graph, SCOPE)
        if step is None:
            return build.node("NoOp", what="done", controls=writes)
        gate = build.node("Switch", step.due, step.due, what="gate")
        averaged = build.op("Identity", gate.output(1), what="averaged", controls=writes)
        ended = build.node("Merge", gate.output(0), averaged, what="ended")
        # A step that fails because its data have ended does not count.
        counted = build.op("Identity", step.after, what="counted", controls=[ended])
        self._found.counters.append((step.before, counted))
        return build.node("NoOp", what="done", controls=[counted.node])


# Local steps: all that a replica computes from its part of the batch, or from a variable that it trains by itself.
#
#     before   x: split(0)   loss = Mean(...): replicated   dw: partial(sum) ──► sum ──► w := w - rate dw
#     after    x ──► own     loss: own ──► mean ──► output   dw: own                ──► w := w - rate dw, each its own
#
# A marked node takes its block for the whole batch (`OF_ONE`), so every op, loops included, does the same as on one
# device. Outputs are merged in each step: rows are joined, sums and maxima combined, everything else is averaged.


EXACT = "or leave local_sgd out"


@dataclass(frozen=True)
class OwnSteps:
    """The nodes that each replica runs by itself.

    Attributes:
        variables: names of the variables that these nodes write.
        parts: nodes that give each replica its part of an input.
    """

    nodes: frozenset[Node]
    variables: tuple[str, ...]
    parts: tuple[Node, ...]


def find_own_steps(state: Propagation, variables: Mapping[str, Variable]) -> OwnSteps:
    """Find and mark the nodes that replicas run by themselves.

    Args:
        state: placements; the graph is edited.

    Raises:
        GraphError: the batch size is static, an input of open size is not divided, or one of these nodes decides for
            all replicas or exchanges values.
    """
    if state.semantics.extent.units is not None:
        raise GraphError(
            f"the graph is made for batches of {state.semantics.extent.units}, and its constants may count them all: "
            "with local_sgd each replica needs those of its own part",
            hint=f"leave the first dimension of the inputs open (None), {EXACT}",
        )
    parts = tuple(_part(value) for value in state.whole_inputs)
    sources = [*parts, *(node for node in state.order if kind_of(node) == OF_EACH)]
    handles = {state.graph.nodes[v.handle]: name for name, v in variables.items() if v.handle in state.graph.nodes}
    nodes, trained = _reached(sources, handles)
    _require_divided(state, nodes)
    for node in [one for one in state.graph if one in nodes]:
        _require_alone(node, nodes)
        if kind_of(node) != OF_EACH:
            mark(node, OF_BLOCK, OF_ONE)
    return OwnSteps(frozenset(nodes), tuple(handles[one] for one in handles if one in trained), parts)


def _require_divided(state: Propagation, nodes: set[Node]) -> None:
    """Refuse inputs that may have a row for each example and are not divided: parts of ragged and sparse tensors."""
    read = ancestors(nodes, controls=False)
    for node in state.order:
        if not node.op.startswith("Placeholder") or node not in read or node.output() in state.whole_inputs:
            continue
        shape = state.facts[node.output()].shape
        if shape and not isinstance(shape[0], int):
            raise GraphError(
                f"the input '{node.name}' has an open size and is not divided, so each replica would compute with all "
                "of it next to its part of the batch",
                node=node,
                hint=f"name it in batch_inputs, pass a dense tensor instead of a ragged or sparse one, {EXACT}",
            )


def _part(value: Value) -> Node:
    part = Builder.at(value.node).node("Identity", value, what="own")
    value.replace_all_uses_with(part.output(), keep={part})
    return part


def _reached(sources: Iterable[Node], handles: Mapping[Node, str]) -> tuple[set[Node], set[Node]]:
    """Return the nodes that depend on sources, also through variables and arrays; and the variables' handles."""
    reached: set[Node] = set()
    trained: set[Node] = set()
    pending = list(sources)
    while pending:
        new = ({*pending} | descendants(pending, controls=False)) - reached
        reached |= new
        written = {handle for handle in updates(new) if handle in handles} - trained
        trained |= written
        pending = [use.node for handle in written for use in handle_uses(handle) if use.node.op in READS]
        stores = {handle_node(value) for node in new for value in node.inputs if is_handle(value)}
        pending += [store for store in stores if has(store.op, "cell_makers") and store not in reached]
    return reached, trained


def _require_alone(node: Node, own: Collection[Node]) -> None:
    decides = node.op == "LoopCond" or (node.op in SWITCHES and node.inputs[1].node in own)
    if decides:
        raise GraphError(
            f"'{node.name}' decides by what each replica computes of its own part, and a condition is one decision "
            "for all replicas",
            node=node,
            hint=f"choose values instead (tf.where), let loops run as often on all replicas, {EXACT}",
        )
    if replica_mark(node.name) in ADDED:
        raise GraphError(
            f"'{node.name}' meets the other replicas in every step, and with local_sgd they train by themselves",
            node=node,
            hint=f"leave ar.all_reduce and ar.all_gather out, {EXACT}",
        )


def let_out(state: Propagation, outputs: Collection[Value], own: OwnSteps, replicas: int) -> None:
    """Merge the outputs of the replicas.

    Args:
        state: placements, as they are without local steps; the graph is edited.

    Raises:
        GraphError: an output can be neither joined nor combined nor averaged.
    """
    graph = state.graph
    merged: dict[Value, Value] = {}
    for anchor, value in list(graph.anchors.items()):
        if value not in outputs or value.node not in own.nodes:
            continue
        if value not in merged:
            merged[value] = _exit(state, value, own, replicas)
        graph.set_anchor(anchor, merged[value])


def _exit(state: Propagation, value: Value, own: OwnSteps, replicas: int) -> Value:
    graph, fact, node = state.graph, state.source(value), value.node
    if fact.placement.is_split or (fact.placement.is_partial and not _is_mean(state, value)):
        exit_, how = Builder.at(node).node("Identity", value, what="merged"), let_out_mark(fact)
    elif dtypes.base(value.dtype) in dtypes.INEXACT and not _is_of_one_size(fact, own):
        raise GraphError(
            f"the output '{value.name}' has a size that follows from the examples of a replica, so that nothing adds "
            "up those of all",
            node=node,
            hint=f"return it for each example, or a mean of it, {EXACT}",
        )
    elif dtypes.base(value.dtype) in dtypes.INEXACT:
        exit_, how = share_of(value, replicas, f"{node.name}/merged"), TOTAL
    elif fact.is_local:
        exit_, how = Builder.at(node).node("Identity", value, what="merged"), TOTAL
    else:
        raise GraphError(
            f"the output '{value.name}' is of type {dtypes.dtype_name(value.dtype)}, and each replica has one of its "
            "own: nothing makes one of them",
            node=node,
            hint=f"return it for each example, or as a float, which is averaged, {EXACT}",
        )
    mark(exit_, OF_BLOCK, how)
    if len(node.output_dtypes) == 1:  # a fetch by its name gets the merged value
        name = node.name
        take_name(graph, node, graph.unique_name(f"{name}/of_replica"))
        take_name(graph, exit_, name)
    return exit_.output()


def _is_of_one_size(fact: Fact, own: OwnSteps) -> bool:
    """Return whether a value is known to have one shape on all replicas, whatever parts of the batch they have."""
    names = {node.name for node in own.nodes}
    dims = [None] if fact.shape is None else [dim for dim in fact.shape if not isinstance(dim, int)]
    factors = [factor for dim in dims if dim is not None for factor in dim.factors]
    return None not in dims and all(maker_of(factor) not in {"", *names} for factor in factors)


def _is_mean(state: Propagation, value: Value) -> bool:
    """Return whether a value is computed from a mean over examples; the means of replicas do not add up."""

    def contributions(node: Node) -> list[Node]:
        known = [(operand.node, state.facts.get(operand)) for operand in node.inputs]
        return [operand for operand, fact in known if fact is not None and fact.placement.is_partial]

    made_of = reachable([value.node], contributions)
    return any(node.op == "Mean" and state.transfers[node].decompose for node in made_of)
