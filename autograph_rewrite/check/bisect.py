"""Find the first pass after which `verify` fails, and the first value and edge of the graph that are wrong.

    passes before conversion   leave graphs of one device: each is compared with the original, by halves
    passes after it            the certificate compares every folded graph with the original, on samples
    values                     of one step from the same variables, producers first: the first that differs

Where neither the certificate nor these graphs show the pass, the provenance of the wrong edge does.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autograph_rewrite.check import side_by_side
from autograph_rewrite.check.compression import without
from autograph_rewrite.check.report import NOISE_FACTOR, Array, Deviation, VerifyReport
from autograph_rewrite.check.values import (
    CONVERTS,
    FirstRefusal,
    PassState,
    PlainStates,
    has_value,
    tap,
    values_of_step,
)
from autograph_rewrite.check.verify import Prepared, checked, compare, fit_together, incomparable, prepare
from autograph_rewrite.compile import Instrumentation
from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import ClusterError, RewriteError, VerifyError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.claims import OWN, Claims
from autograph_rewrite.ir.format.printer import line
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import ancestors, reachable, topological_order
from autograph_rewrite.ir.variable_ops import is_update
from autograph_rewrite.load.inputs import tensor_name
from autograph_rewrite.notebook import NotebookView
from autograph_rewrite.ops.traits import READS
from autograph_rewrite.passes.base.pass_manager import Observer, failed_pass
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.engine.variable_copies import instances_of
from autograph_rewrite.training_graph import TrainingGraph


def bisect(
    item: TrainingGraph,
    config_or_plan: ConfigLike | Plan,
    trial: side_by_side.TrialSettings,
    observers: Sequence[Observer] = (),
) -> Bisection:
    """Find the first pass after which `verify` fails, and the first value and edge that are wrong.

    Args:
        item: a training graph; it is not changed.
        observers: called with (pass name, folded graph) after every pass, as in `rewrite`.

    Returns:
        The result; `ok` if `verify` passes.

    Raises:
        RewriteError: the item cannot be rewritten, as for `rewrite`; a broken invariant is a finding, and not raised.
        GraphError: the original itself cannot be trained on these feeds.
    """
    ready = prepare(item, config_or_plan, trial)
    plan = without(ready.plan)
    notes = [] if plan is ready.plan else ["compressors were left out: what they send is `verify`'s to check"]
    states, refusal = PlainStates(ready.flat), FirstRefusal()
    looking = Instrumentation(observers=(*observers, states), certificate=refusal)
    try:
        if len(ready.asked.processes) > 1:
            fit_together(ready.flat, ready.asked)
        rewritten = checked(ready.flat, plan, looking, trial.batch)
    except RewriteError as error:
        if refusal.error is None and not isinstance(error, VerifyError):
            raise
        return _broken(error, refusal, notes)
    return _Search(ready, rewritten, ready.training(trial), trial.allowed).run(states.states, refusal, notes)


def _broken(error: RewriteError, refusal: FirstRefusal, notes: Sequence[str]) -> Bisection:
    """Return the result for a rewritten graph that breaks an invariant, so that it cannot be run."""
    first = refusal.error or error
    name = refusal.pass_name or failed_pass(error) or "expand"
    shown = "the certificate refuses the graph after it" if refusal.error else "it breaks an invariant of the graph"
    return Bisection(False, "FAILS: the rewritten graph is refused", name, shown, str(first), notes=tuple(notes))


@dataclass(frozen=True)
class _Search:
    """A rewritten item, the original, and the training that compares them."""

    ready: Prepared
    rewritten: TrainingGraph
    training: side_by_side.Training
    allowed: side_by_side.Tolerance

    def run(self, states: Sequence[PassState], refusal: FirstRefusal, notes: Sequence[str]) -> Bisection:
        """Compare the two; search for the first wrong pass and values if they differ."""
        apart = incomparable(self.ready.flat, self.rewritten)
        problem = str(refusal.error) if refusal.error is not None else ""
        try:
            report = compare(self.ready.original, self.rewritten, self.training, self.allowed, apart)
        except (ClusterError, VerifyError) as error:  # a step hangs, or TensorFlow cannot import the rewritten graph
            shown = "the certificate refuses the graph after it" if problem else ""
            verdict = f"FAILS: {side_by_side.first_line(error)}"
            return Bisection(False, verdict, refusal.pass_name, shown, problem, notes=tuple(notes))
        verdict = str(report).partition("\n")[0]
        if report.ok and not problem:
            return Bisection(True, verdict, notes=(*notes, *report.notes))
        verdicts = {} if report.ok else self._verdicts(states, report)
        stage("comparing values one by one")
        wrong = next((one for one in states if verdicts.get(one.behind) == DIFFERS), None)
        divergences, failed = self._divergences(wrong.item if wrong else self.rewritten, apart, refusal.claims)
        if failed:
            notes = [*notes, f"values were not compared: {failed}"]
        made_by, shown_by = _blame(wrong, verdicts, refusal, divergences)
        if report.ok:
            verdict = "FAILS: the certificate refuses the graph, whose numbers agree on these feeds"
        known = tuple((one.behind, verdicts[one.behind]) for one in states if one.behind in verdicts)
        return Bisection(False, verdict, made_by, shown_by, problem, known, divergences, tuple(notes))

    def _verdicts(self, states: Sequence[PassState], report: VerifyReport) -> dict[str, str]:
        """Return which graphs after passes agree on one device; bisect for the first that differs."""
        limits = {
            f"{'output' if row.kind == 'output' else 'variable'} {row.name}": NOISE_FACTOR * row.noise
            for row in report.wrong
        }
        found: dict[str, str] = {}

        def differs(at: int) -> bool:
            stage("one device runs the graph after %s", states[at].behind)
            wrong = self._differs(states[at].item, limits)
            found[states[at].behind] = DIFFERS if wrong else AGREES
            return wrong

        good, bad = -1, len(states) - 1
        if not differs(bad):
            return found
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if differs(middle) else (middle, bad)
        return found

    def _differs(self, item: TrainingGraph, limits: Mapping[str, float]) -> bool:
        """Return whether an item fails on one device, or gets a tensor wrong that the rewritten graph gets wrong."""
        comparison = side_by_side.Comparison(
            self.ready.original, self.training, self.allowed, self.ready.plan.timeout_seconds
        )
        try:
            worst = comparison.against(item)
        except (RewriteError, ValueError):
            return True
        if comparison.broken:
            return True
        return any(worst[key].error > max(self.allowed.rtol, limits[key]) for key in limits if key in worst)

    def _divergences(
        self, other: TrainingGraph, apart: frozenset[str], claims: Claims | None
    ) -> tuple[tuple[Divergence, ...], str]:
        """Return where the values of an item begin to differ, and why they could not be compared ("" if they were)."""
        plan: Plan = self.rewritten.report.plan
        pair = SideBySide(self.ready.flat, other, self.training, self.allowed, plan.timeout_seconds, apart)
        try:
            step = pair.first_wrong_step()
            if step is None or step.failed:
                return (), step.failed if step is not None else ""
            edges = Edges(pair, step, plan, claims)
            return tuple(edges.of(node) for node in FirstDivergence(pair, step).nodes()), ""
        except (RewriteError, ValueError) as error:
            return (), side_by_side.first_line(error)


def _blame(
    wrong: PassState | None, verdicts: Mapping[str, str], refusal: FirstRefusal, divergences: Sequence[Divergence]
) -> tuple[str, str]:
    """Return the first wrong pass and a sentence on the evidence; either may be empty."""
    if wrong is not None:
        return wrong.behind, "one device that runs the graph after it differs"
    if refusal.error is not None:
        return refusal.pass_name, "the certificate refuses the graph after it"
    if DIFFERS not in verdicts.values() and verdicts:
        makers = [edge.made_by for one in divergences for edge in one.edges] + [one.made_by for one in divergences]
        made_by = next((name for name in makers if name and name != "expand"), "")
        if made_by:
            return made_by, "it made the first node that is wrong"
        return "", f"it is {CONVERTS} or a pass after it: on one device everything agrees"
    return "", ""


# Find the first value that differs: that of an original node whose operands are all right.
#
#   x ok ─► h ok ─► dw ok ─► [all-reduce] ─► update of w      w differs after the step, dw does not: it is dw -> update
#
# The search starts at the values that `verify` finds wrong, and goes back to operands that differ. It passes through
# values that cannot be compared (in a loop, or replaced by a pass). A read of a variable depends on the updates before
# it.


class FirstDivergence:
    """Finds where two graphs begin to differ in one step."""

    def __init__(self, pair: SideBySide, step: WrongStep) -> None:
        self._step, self._rtol = step, pair.allowed.rtol
        self._graph, self._item = pair.flat.graph, pair.flat
        self._order = {node: at for at, node in enumerate(topological_order(self._graph))}
        self._updates = variable_ops.updates(self._order)

    def nodes(self) -> list[Node]:
        """Return the original nodes at which differences begin, in the order in which a step runs them."""
        wrong_before = functools.cache(self._wrong_before)
        firsts = (node for node in reachable(self._wrong(), wrong_before) if not wrong_before(node))
        return sorted(firsts, key=lambda node: self._order[node])

    def _wrong(self) -> Iterator[Node]:
        """Yield the producers of wrong outputs, and the last update of each wrong variable."""
        for name in self._step.outputs:
            yield self._graph.value(self._item.outputs[name].tensor).node
        step = ancestors(self._graph.nodes[name] for name in self._item.targets if name in self._graph.nodes)
        for name in self._step.variables:
            handle = self._graph.nodes.get(self._item.variables[name].handle)
            found = self._updates.get(handle, []) if handle is not None else []
            yield from ([node for node in found if node in step] or found)[-1:]

    def _wrong_before(self, node: Node) -> list[Node]:
        """Return the nearest nodes before a node whose values differ."""
        found: dict[Node, None] = {}
        seen, pending = {node}, [node]
        while pending:
            for producer, differs in self._read_by(pending.pop()):
                if differs:
                    found[producer] = None
                elif differs is None and producer not in seen:
                    seen.add(producer)
                    pending.append(producer)
        return [one for one in found if one is not node]

    def _read_by(self, node: Node) -> Iterator[tuple[Node, bool | None]]:
        """Yield the nodes that a node's value depends on, with whether they differ; None: not compared."""
        for value in node.inputs:
            if has_value(value):
                yield value.node, self._step.differs(tensor_name(value), self._rtol)
            elif node.op not in READS and not variable_ops.is_update(node):
                yield value.node, None
        if node.op in READS or variable_ops.is_update(node):
            earlier = ancestors([node])
            for value in node.inputs[:1]:
                updates = self._updates.get(variable_ops.handle_node(value), ())
                yield from ((update, None) for update in updates if update in earlier and update is not node)


# The result of the search for the first wrong pass and edge, as text and as data.

AGREES, DIFFERS = "agrees", "differs"
SHOWN = 5


@dataclass(frozen=True, repr=False)
class Bisection(NotebookView):
    """The result of `bisect`. `str()` shows it, `data()` is for programs.

    Attributes:
        ok: whether `verify` passes, so that there is nothing to find.
        verdict: the verdict of `verify`, in a line.
        made_by: the first pass after which `verify` fails; empty if it is not known.
        shown_by: the evidence for that pass, in a sentence.
        problem: the error of the certificate or of a verifier of invariants; empty if neither refuses the graph.
        states: passes after which one device has run the graph, with `agrees` or `differs`.
        divergences: where values begin to differ, in the order of the step.
        notes: limits of the search.
    """

    ok: bool
    verdict: str
    made_by: str = ""
    shown_by: str = ""
    problem: str = ""
    states: tuple[tuple[str, str], ...] = ()
    divergences: tuple[Divergence, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.verdict
        if not self.ok:
            yield f"first pass: {self.made_by or '(not known)'}{f' ({self.shown_by})' if self.shown_by else ''}"
        if self.states:
            yield "on one device: " + ", ".join(f"{verdict} after {name}" for name, verdict in self.states)
        if self.problem:
            yield f"refused: {self.problem}"
        for at, one in enumerate(self.divergences[:SHOWN]):
            yield from _described("first value" if not at else "and", one)
        if len(self.divergences) > SHOWN:
            yield f"... and {len(self.divergences) - SHOWN} more"
        yield from (f"note: {note}" for note in self.notes)

    def data(self) -> dict[str, Any]:
        """Return it as plain data; an infinite error is the string "inf"."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "pass": self.made_by,
            "shown_by": self.shown_by,
            "problem": self.problem,
            "states": [{"behind": name, "verdict": verdict} for name, verdict in self.states],
            "divergences": [one.data() for one in self.divergences],
            "notes": list(self.notes),
        }


def _described(head: str, one: Divergence) -> Iterator[str]:
    what = "its variable differs" if one.error is None else f"error {one.error:.1e}"
    at = f", {one.where}" if one.where else ""
    yield f"{head}: '{one.node}' ({one.op}), step {one.step}, {what}{at}"
    if not one.line:
        yield "  the rewritten graph has no node in its place that can be looked at"
        return
    yield f"  {_line(one.line, one.made_by)}"
    for edge in one.edges:
        yield f"  edge: operand {edge.operand} reads {', '.join(edge.reads)}, which is not {edge.expected}"
        yield f"    {_line(edge.producer, edge.made_by)}"
        yield from (f"    plan: {text}" for text in edge.plan)
    if one.agree and not one.edges:
        yield "  everything that it reads agrees: it is the node itself, or the order of accesses to its variable"
    elif one.agree:
        yield f"  what agrees: {', '.join(one.agree)}"


def _line(printed: str, made_by: str) -> str:
    """Return a printed node with the pass that made it, unless the line names the pass already."""
    return f"{printed}   made by {made_by}" if made_by and f"# {made_by}" not in printed else printed


# Find the wrong edge: the operand of a node whose value in the rewritten graph does not match the original's.
#
#     original    dw ───────────────────────► update
#     rewritten   dw ─► all_reduce ─► Mul ──► update
#
# The operand of the update is compared with dw: equal on each replica, joined along a dimension, or added up. If none
# of these gives dw, the edge is wrong.


@dataclass(frozen=True)
class WrongEdge:
    """An operand whose value does not match the original's.

    Attributes:
        expected: the operand in the original.
        reads: the operands of the instances in the rewritten graph.
        producer: the printed producer of the first of `reads`.
        made_by: the pass that made the producer, empty for a node of the original.
        plan: the plan's conversions of the original value.
    """

    operand: int
    expected: str
    reads: tuple[str, ...]
    producer: str
    made_by: str
    plan: tuple[str, ...]


@dataclass(frozen=True)
class Divergence:
    """A node at which differences begin.

    Attributes:
        node: of the original.
        step: the training step, from 1.
        error: relative error of its value; None for an update, whose variable differs.
        where: the element that differs most.
        instances: its nodes in the rewritten graph; none if passes have replaced it.
        line: the first of `instances`, printed.
        made_by: the pass that made that node; empty for a node of the original.
        edges: its operands that are wrong; none: all agree, or none could be compared.
        agree: original tensors that it reads and that agree.
    """

    node: str
    op: str
    step: int
    error: float | None
    where: str
    instances: tuple[str, ...]
    line: str
    made_by: str
    edges: tuple[WrongEdge, ...]
    agree: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        edges = [{**vars(edge), "reads": list(edge.reads), "plan": list(edge.plan)} for edge in self.edges]
        error = str(self.error) if self.error == float("inf") else self.error
        changed = {"error": error, "edges": edges, "instances": list(self.instances), "agree": list(self.agree)}
        return {**vars(self), **changed}


class Edges:
    """Finds the wrong operands of original nodes in the rewritten graph.

    Args:
        claims: the claims on the operands; None if there are none.
    """

    def __init__(self, pair: SideBySide, step: WrongStep, plan: Plan, claims: Claims | None) -> None:
        self._pair, self._step, self._plan, self._claims = pair, step, plan, claims
        self._graph: Graph = pair.other.graph

    def of(self, node: Node) -> Divergence:
        """Return the divergence of a node."""
        names = _instances(self._pair.other, node, self._graph)
        here = [self._graph.nodes[name] for name in names]
        found = [(name, one) for v in node.outputs if (one := self._step.errors.get(name := tensor_name(v)))]
        found = [(name, one) for name, one in found if self._step.differs(name, self._pair.allowed.rtol)]
        error, where = (found[0][1].error, found[0][1].where) if found else (None, "")
        operands = list(self._operands(node, here))
        wrong = self._wrong(node, operands) if operands else []
        taken = {index for index, _, _ in wrong}
        return Divergence(
            node.name,
            node.op,
            self._step.number + 1,
            error,
            where,
            names,
            line(here[0]) if here else "",
            self._made_by(here[0]) if here else "",
            tuple(self._edge(*one) for one in wrong),
            tuple(dict.fromkeys(tensor_name(value) for index, value, _ in operands if index not in taken)),
        )

    def _operands(self, node: Node, here: Sequence[Node]) -> Iterator[tuple[int, Value, tuple[str, ...]]]:
        """Yield the operands that can be compared: position, original value, tensors that instances read."""
        if not here or any(one.op != node.op or len(one.inputs) != len(node.inputs) for one in here):
            return
        for index, value in enumerate(node.inputs):
            if has_value(value) and tensor_name(value) in self._step.expected:
                yield index, value, tuple(dict.fromkeys(tensor_name(one.inputs[index]) for one in here))

    def _wrong(
        self, node: Node, operands: Sequence[tuple[int, Value, tuple[str, ...]]]
    ) -> list[tuple[int, Value, tuple[str, ...]]]:
        """Return the operands whose instances do not combine to the original value."""
        tensors = list(dict.fromkeys(name for _, _, names in operands for name in names))
        if self._step.failed:
            return []
        got, _ = self._pair.replay(self._pair.other, self._step.starts, tensors)
        known = dict(zip(tensors, got, strict=True))
        wrong = []
        for index, value, names in operands:
            name = tensor_name(value)
            rtol = max(self._pair.allowed.rtol, NOISE_FACTOR * self._step.noise.get(name, 0.0))
            expected, arrays = self._step.expected[name], [known[one] for one in names]
            alike = is_update(node) or self._is_read_whole(node, index, value)
            if not is_explained(arrays, expected, side_by_side.Tolerance(rtol, self._pair.allowed.atol), alike=alike):
                wrong.append((index, value, names))
        return wrong

    def _is_read_whole(self, node: Node, index: int, value: Value) -> bool:
        """Return whether a node is claimed to read the same, complete value on every replica."""
        if self._claims is None:
            return False
        read = self._claims.reads.get((node.name, index), OWN)
        claim = self._claims.values.get(value.name)
        kind = claim.kind if read is OWN and claim is not None else read.kind
        return kind == "replicated"

    def _edge(self, index: int, value: Value, names: tuple[str, ...]) -> WrongEdge:
        producer = self._graph.nodes[names[0].rpartition(":")[0]]
        plain = tensor_name(value).removesuffix(":0")
        plan = tuple(
            f"{edge.value} {edge.from_} -> {edge.to} by {edge.lowering}, for {edge.owner}: {edge.reason}"
            for edge in self._plan.edges
            if edge.value == plain
        )
        return WrongEdge(index, tensor_name(value), names, line(producer), self._made_by(producer), plan)

    def _made_by(self, node: Node) -> str:
        """Return the pass that made a node; for a copy of an expanded graph, the pass that made the folded node."""
        made_by: str = node.attr(PASS_ATTR, b"").decode()
        layout = self._pair.other.layout
        if made_by != "expand" or layout is None:
            return made_by
        nodes, origin = layout.graph.nodes, node.attr(ORIGIN_ATTR, b"").decode()
        folded = nodes.get(origin) or nodes.get(common_name(node.name))
        return folded.attr(PASS_ATTR, b"").decode() if folded is not None else made_by


def is_explained(
    got: Sequence[Array], expected: Array, allowed: side_by_side.Tolerance, *, alike: bool = False
) -> bool:
    """Return whether the arrays of instances each equal a value, or are its blocks, or its contributions.

    Args:
        got: of the instances, in order.
        alike: the instances must be equal, so that blocks and contributions do not count.
    """

    def agrees(array: Array) -> bool:
        return allowed.deviation(np.asarray(array), expected).error <= allowed.rtol

    if all(agrees(one) for one in got):
        return True
    if alike or len(got) == 1 or any(one.ndim != expected.ndim for one in got):
        return False
    for axis in range(expected.ndim):
        others = {(*one.shape[:axis], *one.shape[axis + 1 :]) for one in got}
        if len(others) == 1 and agrees(np.concatenate(got, axis)):
            return True
    is_number = expected.dtype.kind in "iufc" or "float" in expected.dtype.name
    return is_number and len({one.shape for one in got}) == 1 and agrees(sum(got[1:], got[0]))


def _instances(item: TrainingGraph, node: Node, graph: Graph) -> tuple[str, ...]:
    """Return the nodes of a graph that are instances of an original node."""
    value = next((value for value in node.outputs if has_value(value)), None)
    found = tap(item, value) if value is not None else None
    names = tuple(one.rpartition(":")[0] for one in found.view.tensors) if found is not None else ()
    if not names:
        names = instances_of(item, node.name)
    return tuple(name for name in dict.fromkeys(names) if name in graph.nodes)


# Run single steps of two graphs from the same variables, until an output or variable differs.
#
# Every step begins with the original's variables in both graphs, so a difference after the step arose in it.

Values = Mapping[str, Array]


@dataclass(frozen=True)
class WrongStep:
    """The first step in which two graphs differ.

    Attributes:
        number: of the step, from 0.
        starts: the variables before each step up to this one.
        expected: values of the original in this step, by tensor.
        errors: of the values that can be compared, by tensor of the original.
        noise: errors that rounding alone causes in them.
        variables: those that differ after the step.
        outputs: those that differ.
        failed: how the step failed; empty where it did not.
    """

    number: int
    starts: Sequence[Values]
    expected: Values
    errors: Mapping[str, Deviation]
    noise: Mapping[str, float]
    variables: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    failed: str = ""

    def differs(self, tensor: str, rtol: float) -> bool | None:
        """Return whether a value differs; None if it was not compared."""
        found = self.errors.get(tensor)
        return None if found is None else found.error > max(rtol, NOISE_FACTOR * self.noise.get(tensor, 0.0))


@dataclass(frozen=True)
class SideBySide:
    """Two graphs and their training.

    Attributes:
        flat: the original in normal form.
        other: a rewritten item, or one that passes have edited.
        timeout: seconds that a run may take.
        apart: keys that differ by design ("variable NAME", "output NAME").
    """

    flat: TrainingGraph
    other: TrainingGraph
    training: side_by_side.Training
    allowed: side_by_side.Tolerance
    timeout: float
    apart: Collection[str] = ()

    def first_wrong_step(self) -> WrongStep | None:
        """Return the first step in which variables or outputs differ; None if none does."""
        values = list(values_of_step(self.flat))
        names = [tensor_name(value) for value in values]
        taps = [found for value in values if (found := tap(self.other, value)) is not None]
        starts: list[Values] = []
        with (
            side_by_side.TrainedGraph(self.flat, self.timeout) as left,
            side_by_side.TrainedGraph(self.other, self.timeout) as right,
        ):
            left.start(self.training)
            right.initialise()
            for number in range(self.training.steps):
                starts.append({name: copies[0] for name, copies in left.read()})
                right.write(starts[-1])
                feeds = self.training.feeds_of(number)
                expected: Values = {}
                try:
                    expected = dict(zip(names, left.observe(feeds, names), strict=True))
                    got = iter(right.observe(feeds, [tensor for one in taps for tensor in one.view.tensors]))
                except right.failures as error:  # the original fails if a value does not exist in this step
                    return WrongStep(number, starts, expected, {}, {}, failed=side_by_side.first_line(error))
                seen = [(one, [next(got) for _ in one.view.tensors]) for one in taps]
                errors = {one.name: one.deviation(arrays, expected[one.name], self.allowed) for one, arrays in seen}
                step = self._judged(number, starts, expected, errors, self._variables(left, right))
                if step.variables or step.outputs:
                    return step
        return None

    def _variables(self, left: side_by_side.TrainedGraph, right: side_by_side.TrainedGraph) -> dict[str, Deviation]:
        """Return the largest deviation of each variable's copies."""
        found = {}
        for (name, (expected, *_)), (_, copies) in zip(left.read(), right.read(), strict=True):
            each = [self.allowed.deviation(copy, expected) for copy in copies]
            found[name] = max(each, key=lambda one: one.error)
        return found

    def _judged(
        self,
        number: int,
        starts: Sequence[Values],
        expected: Values,
        errors: Mapping[str, Deviation],
        variables: Mapping[str, Deviation],
    ) -> WrongStep:
        """Return the step with the variables and outputs whose errors exceed rounding."""
        graph = self.flat.graph
        outputs = {name: tensor_name(graph.value(info.tensor)) for name, info in self.flat.outputs.items()}
        suspects = {f"variable {name}": one.error for name, one in variables.items()}
        suspects |= {f"output {name}": errors[tensor].error for name, tensor in outputs.items() if tensor in errors}
        over = {key for key, error in suspects.items() if error > self.allowed.rtol} - set(self.apart)
        noise = self._noise(starts, expected) if over else {}
        step = WrongStep(number, starts, expected, errors, noise)
        wrong_outputs = tuple(
            name
            for name, tensor in outputs.items()
            if f"output {name}" in over and step.differs(tensor, self.allowed.rtol)
        )
        wrong = tuple(
            name
            for name, one in variables.items()
            if f"variable {name}" in over and one.error > NOISE_FACTOR * noise.get(f"variable {name}", 0.0)
        )
        return replace(step, variables=wrong, outputs=wrong_outputs)

    def _noise(self, starts: Sequence[Values], expected: Values) -> dict[str, float]:
        """Return the error of the original's values against themselves with variables changed in the last bit."""
        rng = np.random.default_rng([self.training.seed, 2])
        names = list(expected)
        last = {name: side_by_side.nudged(value, rng) for name, value in starts[-1].items()}
        left, before = self.replay(self.flat, starts, names)
        right, after = self.replay(self.flat, [*starts[:-1], last], names)
        found = {name: self.allowed.deviation(a, b).error for name, a, b in zip(names, right, left, strict=True)}
        for name, value in before.items():
            found[f"variable {name}"] = self.allowed.deviation(after[name], value).error
        return found

    def replay(
        self, item: TrainingGraph, starts: Sequence[Values], tensors: Sequence[str]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Train an item from known variables in each step; return tensors of the last step, and variables after it.

        Args:
            item: an original or a rewritten item.
            starts: the variables before each step.
            tensors: names of tensors in `item`.
        """
        got: list[Array] = []
        with side_by_side.TrainedGraph(item, self.timeout) as trainee:
            trainee.initialise()
            for number, values in enumerate(starts):
                trainee.write(values)
                got = trainee.observe(self.training.feeds_of(number), tensors if number == len(starts) - 1 else ())
            return got, {name: copies[0] for name, copies in trainee.read()}
