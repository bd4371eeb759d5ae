"""bisect: the first pass after which `verify` fails, and the first value and edge of the graph that is wrong.

    passes before conversion   leave graphs of one device: each is run beside the original, by halves
    passes after it            the certificate compares every folded graph with the original, on samples
    values                     of one step from the same variables, producers first: the first that differs

What the certificate and the states leave open, the provenance of the wrong edge says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autograph_rewrite.compile import Instrumentation, compile_task
from autograph_rewrite.config.config import ConfigLike
from autograph_rewrite.diagnostics.stages import stage
from autograph_rewrite.errors import ClusterError, GraphError, RewriteError, VerifyError
from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.claims import Claims
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.ops.traits import READS
from autograph_rewrite.passes.base.pass_manager import Observer, failed_pass
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.runtime.bisect.bisection import AGREES, DIFFERS, Bisection
from autograph_rewrite.runtime.bisect.edges import Divergence, Edges
from autograph_rewrite.runtime.bisect.pass_states import CONVERTS, FirstRefusal, PlainStates, State
from autograph_rewrite.runtime.bisect.side_steps import SideBySide, WrongStep
from autograph_rewrite.runtime.bisect.values import has_value, tensor_name
from autograph_rewrite.runtime.verify.cluster import fit_together
from autograph_rewrite.runtime.verify.compression import without
from autograph_rewrite.runtime.verify.incomparable import incomparable
from autograph_rewrite.runtime.verify.prepare import Prepared, prepare
from autograph_rewrite.runtime.verify.random_feeds import batch_size, random_feeds
from autograph_rewrite.runtime.verify.report import NOISE_FACTOR, VerifyReport
from autograph_rewrite.runtime.verify.side_by_side import Comparison, Feeds, Tolerance, Training, first_line
from autograph_rewrite.runtime.verify.verify import compare
from autograph_rewrite.training_graph import TrainingGraph


def bisect(
    item: TrainingGraph,
    config_or_plan: ConfigLike | Plan,
    *,
    steps: int = 3,
    feeds: Feeds | None = None,
    rtol: float = 1e-5,
    atol: float | None = None,
    seed: int = 0,
    batch: int | None = None,
    observers: Sequence[Observer] = (),
) -> Bisection:
    """Find the first pass after which `verify` fails, and the first value and edge that are wrong.

    Args:
        item: a training graph; it is not changed.
        config_or_plan: as for `rewrite`.
        steps: how many to train, as for `verify`.
        rtol: allowed error, as for `verify`.
        atol: allowed error of tensors that are all but zero, as for `verify`.
        seed: of random feeds, and of random ops that have none.
        batch: examples per step of random feeds.
        observers: called with (pass name, folded graph) after every pass, as in `rewrite`.

    Returns:
        What was found; `ok` where `verify` passes.

    Raises:
        RewriteError: the item cannot be rewritten, as for `rewrite`; a broken invariant is a finding.
        GraphError: the original itself cannot be trained on these feeds.
    """
    if steps < 1:
        raise GraphError(f"there is nothing to compare after {steps} steps", hint="steps has to be at least 1")
    ready = prepare(item, config_or_plan, seed)
    plan = without(ready.plan)
    notes = [] if plan is ready.plan else ["compressors were left out: what they send is `verify`'s to check"]
    states, refusal = PlainStates(ready.flat), FirstRefusal()
    looking = Instrumentation(observers=(*observers, states), certificate=refusal)
    try:
        if len(ready.asked.processes) > 1:
            fit_together(ready.flat, ready.asked)
        rewritten = compile_task(ready.flat, plan, batch=batch, instrumentation=looking)
        check_expanded(rewritten.graph_bytes, ready.flat, plan.all_devices, micro=plan.microbatches)
    except RewriteError as error:
        if refusal.error is None and not isinstance(error, VerifyError):
            raise
        return _broken(error, refusal, notes)
    if feeds is None:
        size = batch_size(ready.flat, plan.instances, batch)
        feeds = random_feeds(ready.flat, steps=steps, batch=size, seed=seed)
    training, allowed = Training(feeds, steps, ready.values, seed), Tolerance(rtol, atol)
    return _Search(ready, rewritten, training, allowed).run(states.states, refusal, notes)


def _broken(error: RewriteError, refusal: FirstRefusal, notes: Sequence[str]) -> Bisection:
    """Return what is known where the rewritten graph breaks an invariant, so that nothing can be run."""
    first = refusal.error or error
    name = refusal.pass_name or failed_pass(error) or "expand"
    shown = "the certificate refuses the graph after it" if refusal.error else "it breaks an invariant of the graph"
    return Bisection(False, "FAILS: the rewritten graph is refused", name, shown, str(first), notes=tuple(notes))


@dataclass(frozen=True)
class _Search:
    """A rewritten item, and what it is compared on."""

    ready: Prepared
    rewritten: TrainingGraph
    training: Training
    allowed: Tolerance

    def run(self, states: Sequence[State], refusal: FirstRefusal, notes: Sequence[str]) -> Bisection:
        """Return what there is to find."""
        apart = incomparable(self.ready.flat, self.rewritten)
        problem = str(refusal.error) if refusal.error is not None else ""
        try:
            report = compare(self.ready.original, self.rewritten, self.training, self.allowed, apart)
        except (ClusterError, VerifyError) as error:  # a step hangs, or TensorFlow cannot import the rewritten graph
            shown = "the certificate refuses the graph after it" if problem else ""
            verdict = f"FAILS: {first_line(error)}"
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

    def _verdicts(self, states: Sequence[State], report: VerifyReport) -> dict[str, str]:
        """Return whether graphs after passes agree on one device, up to the first that does not, found by halves."""
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
        """Return whether one device that runs an item gets something wrong that the rewritten graph gets wrong."""
        comparison = Comparison(self.ready.original, self.training, self.allowed, self.ready.plan.timeout_seconds)
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
        """Return where the values of an item begin to differ; and why they could not be compared, if so."""
        plan: Plan = self.rewritten.report.plan
        pair = SideBySide(self.ready.flat, other, self.training, self.allowed, plan.timeout_seconds, apart)
        try:
            step = pair.first_wrong_step()
            if step is None or step.failed:
                return (), step.failed if step is not None else ""
            edges = Edges(pair, step, plan, claims)
            return tuple(edges.of(node) for node in FirstDivergence(pair, step).nodes()), ""
        except (RewriteError, ValueError) as error:
            return (), first_line(error)


def _blame(
    wrong: State | None, verdicts: Mapping[str, str], refusal: FirstRefusal, divergences: Sequence[Divergence]
) -> tuple[str, str]:
    """Return the first wrong pass, and how that is known."""
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


# The first value that differs: the original node all of whose operands are right, and whose own value is not.
#
#   x ok ─► h ok ─► dw ok ─► [all-reduce] ─► update of w      w differs behind the step, dw does not: it is dw -> update
#
# From what `verify` finds wrong, one goes back along values that differ; a value that cannot be looked at (in a loop,
# or replaced by a pass) is passed through. What a variable's read gives depends on the updates before it.


class FirstDivergence:
    """Finds where two graphs begin to differ in one step.

    Args:
        pair: both graphs.
        step: in which they differ.
    """

    def __init__(self, pair: SideBySide, step: WrongStep) -> None:
        self._step, self._rtol = step, pair.allowed.rtol
        self._graph, self._item = pair.flat.graph, pair.flat
        self._order = {node: at for at, node in enumerate(topological_order(self._graph))}
        self._updates = variable_ops.updates(self._order)

    def nodes(self) -> list[Node]:
        """Return the original nodes at which differences begin, in the order in which a step runs them."""
        firsts: dict[Node, None] = {}
        seen: set[Node] = set()
        pending = list(dict.fromkeys(self._wrong()))
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            wrong = self._wrong_before(node)
            pending += wrong
            if not wrong:
                firsts[node] = None
        return sorted(firsts, key=lambda node: self._order[node])

    def _wrong(self) -> Iterator[Node]:
        """Yield what makes the outputs and variables that are wrong: of a variable, its last update."""
        for name in self._step.outputs:
            yield self._graph.value(self._item.outputs[name].tensor).node
        for name in self._step.variables:
            handle = self._graph.nodes.get(self._item.variables[name].handle)
            found = self._updates.get(handle, []) if handle is not None else []
            step = [node for node in found if self._is_in_step(node)] or found
            yield from step[-1:]

    def _is_in_step(self, node: Node) -> bool:
        return node in ancestors(self._graph.nodes[name] for name in self._item.targets if name in self._graph.nodes)

    def _wrong_before(self, node: Node) -> list[Node]:
        """Return the nodes nearest before a node whose values differ."""
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
        """Yield what a node's value is made of, with whether that differs; None: it was not looked at."""
        for value in node.inputs:
            if has_value(value):
                yield value.node, self._step.differs(tensor_name(value), self._rtol)
            elif node.op not in READS and not variable_ops.is_update(node):
                yield value.node, None
        if node.op in READS or variable_ops.is_update(node):
            handles = [variable_ops.handle_node(value) for value in node.inputs[:1]]
            yield from ((update, None) for update in self._before(node, handles))

    def _before(self, node: Node, handles: Iterable[Node]) -> list[Node]:
        """Return the updates of variables that come before a node."""
        earlier = ancestors([node])
        return [u for handle in handles for u in self._updates.get(handle, ()) if u in earlier and u is not node]
