"""Averages: behind the updates of every so-many-th step, variables become their mean over the replicas.

    n := n + 1      due = n % period == 0, or n <= warmup
    w := w - rate dw ──► read ──► Switch(due) ──► w / N: partial(sum) ──► sum ──► w := mean            in the branch

The predicate is of a counter that all replicas have alike, so all of them meet, or none. Averages are sums like those
of gradients: they are edges of the plan, in buckets, with lowerings, and are priced like them.

Stich, Local SGD Converges Fast and Communicates Little (2019); Lin et al., Don't Use Large Mini-Batches, Use Local SGD
(2020).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.variables.completion import completions
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import ancestors, descendants, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.replica_marks import AVERAGES
from autograph_rewrite.ir.variable_ops import handle_uses, updates
from autograph_rewrite.ops.rules.base import OF_BLOCK, TOTAL
from autograph_rewrite.ops.traits import READS
from autograph_rewrite.passes.canonicalize.varying_values import share_of
from autograph_rewrite.passes.local_sgd.own_steps import OWN_NODE
from autograph_rewrite.plan.parts.messages import LocalSgd
from autograph_rewrite.training_graph import Variable

SCOPE = AVERAGES


@dataclass(frozen=True)
class Counter:
    """The number of steps: what it is before a step, and once it is done; filled in when variables can be added."""

    before: Node
    after: Value


class _Step(NamedTuple):
    """How many steps there were before this one, how many there are with it, and whether variables are averaged now."""

    before: Node
    after: Value
    due: Value


@dataclass
class Averages:
    """What has been added.

    Attributes:
        counters: one for each group of targets; none where every step is averaged.
        done: with each group of targets what runs once variables are averaged, or are not to be.
        averaged: names of the variables.
    """

    counters: list[Counter] = field(default_factory=list)
    done: list[tuple[Sequence[Node], Node]] = field(default_factory=list)
    averaged: dict[str, None] = field(default_factory=dict)


def add_averages(
    state: Propagation, how: LocalSgd, replicas: int, averaged: Mapping[str, Variable], groups: Sequence[Sequence[Node]]
) -> Averages:
    """Let the variables that each group of targets writes be averaged behind it.

    Args:
        state: placements; the graph is edited.
        replicas: how many there are.
        groups: targets, those together that run together.

    Raises:
        GraphError: a variable is updated in a loop.
    """
    found = Averages()
    for targets in groups:
        group = _Group(state.graph, targets, averaged, found)
        if group.written:
            found.done.append((targets, group.average(how, replicas)))
    return found


def wait_for(graph: Graph, targets: Sequence[Node], done: Node) -> None:
    """Let targets wait for averages; where those wait for a target, something takes its name that waits for both.

    Args:
        targets: of a step.
        done: runs once variables are averaged, or are not to be.
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
    """The targets of one step."""

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
        """Add the averages; return what runs once they are made, or are not to be."""
        graph, ends = self._graph, self._ends()
        step = self._count(how) if how.period > 1 else None
        writes = []
        for name, (handle, _) in self.written.items():
            build, value = Builder(graph, f"{SCOPE}/{name}", handle), self._read(name, ends[name])
            if step is not None:
                mark = {OF_BLOCK: OWN_NODE}
                value = build.node("Switch", value, step.due, what="if_due", marks=mark).output(1)
            share = share_of(value, replicas, f"{SCOPE}/{name}/mean")
            share.set_raw_attr(OF_BLOCK, encode("string", TOTAL))
            inputs = handle.output(), share.output()
            writes.append(build.node("AssignVariableOp", *inputs, what="average", dtype=value.dtype))
            self._found.averaged[name] = None
        return self._done(writes, step)

    def _ends(self) -> dict[str, list[Node]]:
        """Return, by variable, what has run once this step has read and updated it, in branches and loops, too.

        Raises:
            GraphError: nothing tells when an update is over.
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
            marks={OF_BLOCK: OWN_NODE},
            recorded=[variable.shape] if variable.shape is not None else None,
            dtype=dtypes.NUMBERS[variable.dtype],
        )

    def _count(self, how: LocalSgd) -> _Step:
        """Count the step, and find out whether variables are averaged behind it."""
        build = Builder(self._graph, SCOPE)

        def number(content: int, what: str) -> Value:
            return build.const(content, dtypes.INT64, what)

        before = build.node("Identity", number(0, "none"), what="step")
        after = build.op("AddV2", before.output(), number(1, "one"), what="next_step")
        left = build.op("FloorMod", after, number(how.period, "period"), what="left")
        due = build.op("Equal", left, number(0, "nothing_left"), what="is_due")
        if how.warmup_steps:
            early = build.op("LessEqual", after, number(how.warmup_steps, "warmup_steps"), what="is_early")
            due = build.op("LogicalOr", due, early, what="is_early_or_due")
        return _Step(before, after, due)

    def _done(self, writes: Sequence[Node], step: _Step | None) -> Node:
        """Return what has run once variables are averaged, or are not to be."""
        build = Builder(self._graph, SCOPE)
        if step is None:
            return build.node("NoOp", what="done", controls=writes)
        gate = build.node("Switch", step.due, step.due, what="gate")
        averaged = build.op("Identity", gate.output(1), what="averaged", controls=writes)
        ended = build.node("Merge", gate.output(0), averaged, what="ended")
        # A step that fails, for its data have ended, does not count.
        counted = build.op("Identity", step.after, what="counted", controls=[ended])
        self._found.counters.append(Counter(step.before, counted))
        return build.node("NoOp", what="done", controls=[counted.node])
