"""Search for the homes of variables, buckets and compressors with the shortest simulated step.

    1. every builder's plan, with shared and with mirrored variables where the configuration leaves that open
    2. from the best of them, variable by variable (equal ones together, the largest first): another builder's choice
    3. sizes of buckets, and compressors if the configuration allows one

A change is kept if it shortens the step by more than a hundredth, because smaller differences are within the error of
the model. Nothing is random and no clock is read, so every process finds the same plan; the number of plans tried
depends only on the size of the graph. A simulation does not show whether every edge can be lowered, so a plan is
carried out on a copy of the graph before it is offered.

Search by simulation instead of by measurement: Jia et al., Beyond Data and Model Parallelism for Deep Neural Networks
(FlexFlow, 2019); a choice per variable: H. Zhang et al., AutoSync (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autograph_rewrite.compile import compile_task, request
from autograph_rewrite.cost.pipeline.parts import Staged, divided
from autograph_rewrite.cost.simulate import Hardware, SimulatedStep, counted, simulated
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.cost.tasks.step import AnalyzedStep, OpCounts, cut_model, fold, whole
from autograph_rewrite.diagnostics.amounts import duration
from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.resolve.batch import batch_facts
from autograph_rewrite.training_graph import TrainingGraph

WORTH = 0.99
"""A change is kept if the step takes less than this part of its time before."""


@dataclass
class Evaluator:
    """Simulates plans of one item, and reuses analyses that several plans share.

    Attributes:
        tried: how many plans have been simulated.
        batch: examples of the global batch where the graph does not say, the same for all plans.
    """

    item: TrainingGraph
    hardware: Hardware = field(default_factory=Hardware)
    tried: int = 0
    batch: int | None = None
    _folds: dict[object, AnalyzedStep] = field(default_factory=dict)
    _counts: dict[object, Mapping[Node, OpCounts]] = field(default_factory=dict)
    _edges: dict[object, tuple[EdgePlan, ...]] = field(default_factory=dict)
    _stages: dict[object, Staged] = field(default_factory=dict)

    @classmethod
    def after(cls, step: SimulatedStep) -> Evaluator:
        """Return an evaluator that reuses the analysis of a simulated step, for plans to compare with it."""
        evaluator = cls(step.folded.item, step.hardware, batch=step.batch)
        kind = _analysed(step.plan)
        evaluator._folds[kind] = step.folded
        evaluator._counts[kind, step.plan.microbatches] = step.counts
        return evaluator

    def simulate(self, plan: Plan) -> Simulation:
        """Simulate one step of a plan."""
        stage("simulated %s plans, next %s", self.tried, plan.strategy)
        kind, micro, plain = _analysed(plan), plan.microbatches, whole(plan)
        if kind not in self._folds:
            self._folds[kind] = fold(self.item, plan, self.batch)
        folded = self._folds[kind]
        batch_facts(folded.state.graph, folded.item, plan)  # raises if there are more micro-batches than examples
        if (kind, micro) not in self._counts:
            self._counts[kind, micro] = counted(folded, plan, self.hardware, self.batch)
        counts = self._counts[kind, micro]
        options = (kind, micro, plan.pipeline, plain.default, plain.variables)
        if options not in self._edges:
            self._edges[options] = folded.resolve(replace(plan, edges=())).edges
        self.tried += 1
        resolved = replace(plan, edges=self._edges[options])
        staged = self._staged(kind, folded, resolved, counts) if plan.pipeline is not None else None
        return simulated(folded, resolved, self.hardware, batch=self.batch, events=False, counts=counts, staged=staged)

    def _staged(self, kind: object, folded: AnalyzedStep, plan: Plan, counts: Mapping[Node, OpCounts]) -> Staged:
        """Return a step in stages, which do not depend on the number of micro-batches."""
        key = kind, plan.pipeline, frozenset(edge.node for edge in plan.edges)
        if key not in self._stages:
            self._stages[key] = divided(folded, plan, counts)
        return replace(self._stages[key], counts=counts)

    def simulate_once(self, plan: Plan) -> Simulation:
        """Simulate one step of a plan that shares no analysis with others."""
        stage("simulated %s plans, next %s", self.tried, plan.strategy)
        self.tried += 1
        return simulated(fold(self.item, plan, self.batch), plan, self.hardware, batch=self.batch, events=False)

    def cut(self, plan: Plan) -> tuple[dict[str, int], tuple[EdgePlan, ...]]:
        """Return the dimension that the model axis splits of each variable, and the edges between logical devices."""
        return cut_model(self.item, plan)


def _analysed(plan: Plan) -> object:
    """Return a key of everything that the analysis of a step depends on."""
    places = plan.variables if plan.remat is not None and plan.remat.limit is not None else ()
    # In one process, with a device for each replica, gradients have the same placements wherever their variables live.
    is_apart = len(plan.processes) == 1 and len(set(run_devices(plan))) > 1
    has_servers = not is_apart and any(request.servers for request in plan.variables)
    given = (plan.devices, plan.mode, plan.semantics, plan.batch_inputs, plan.compresses)
    if plan.remat is not None or plan.passes:  # recomputation and the user's passes may depend on any of these
        return (*given, plan.micro, plan.pipeline, plan.remat, plan.passes, plan.model, has_servers, places)
    # placements depend on whether there are several micro-batches, not on how many
    several = plan.microbatches > 1 and plan.micro is not None and replace(plan.micro, count=0)
    return (*given, several, plan.looped, plan.pipeline is not None, plan.model, has_servers)


@dataclass(frozen=True)
class Candidate:
    """A plan and its simulation."""

    plan: Plan
    found: Simulation

    @property
    def key(self) -> tuple[float, int, int]:
        """The sort key: seconds of the step, then memory, then bytes."""
        return self.found.step_seconds, self.found.peak_bytes, self.found.moved_bytes

    def fits(self, limit: int | None) -> bool:
        """Return whether it fits on devices with `limit` bytes."""
        return limit is None or self.found.peak_bytes <= limit

    def is_better_than(self, other: Candidate) -> bool:
        """Return whether its step is shorter by enough."""
        return self.found.step_seconds < WORTH * other.found.step_seconds


@dataclass
class Search:
    """The best plan so far, and why.

    Attributes:
        budget: how many plans may be tried.
        limit: bytes of a device; None if unknown.
        reasons: one text for each change that was kept.
        kept: the best candidates so far, in order; each but the first has its reason.
    """

    evaluator: Evaluator
    budget: int
    best: Candidate
    limit: int | None = None
    reasons: list[str] = field(default_factory=list)
    kept: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept.append(self.best)

    def offer(self, make: Callable[[], Plan], reason: str) -> bool:
        """Simulate a changed plan, and keep it if it is better; return whether it was kept."""
        if self.evaluator.tried >= self.budget:
            return False
        try:
            plan = make()
            candidate = Candidate(plan, self.evaluator.simulate(plan))
        except RewriteError:  # a combination that this graph cannot follow
            return False
        if not candidate.is_better_than(self.best) or not candidate.fits(self.limit):
            return False
        saved = self.best.found.step_seconds - candidate.found.step_seconds
        self.reasons.append(f"{reason}: {duration(saved)} less")
        self.best = candidate
        self.kept.append(candidate)
        return True


def refusal(item: TrainingGraph, plan: Plan, *, with_hints: bool = True) -> RewriteError | None:
    """Return why a plan cannot be carried out, None if it can.

    Args:
        item: normalised; it is not changed.
        plan: a request, or a plan with edges.
        with_hints: try out changes that would lift the error, and name them in it; slower.
    """
    training = bool(item.targets)  # without targets, the plan of a step has no micro-batches or stages
    tried = plan.of_step(training=training)
    try:
        request(item, plan)
        for task in sorted({0, plan.workers - 1}):  # worker 0 and the other workers have different graphs
            if with_hints:
                compile_task(item, tried, task, training=training)
            else:
                pass_pipeline.try_out(Request(item, tried, task, training))
    except RewriteError as error:
        return error
    return None


def first_possible(item: TrainingGraph, candidates: Iterable[Candidate]) -> tuple[Candidate, list[str]]:
    """Return the first candidate that can be carried out, and a note on each one before it.

    Args:
        candidates: at least one, the best first.

    Raises:
        RewriteError: no candidate can be carried out; the error is that of the first.
    """
    notes: list[str] = []
    refused: list[tuple[Plan, RewriteError]] = []
    for candidate in candidates:
        error = refusal(item, candidate.plan, with_hints=False)
        if error is None:
            return candidate, notes
        refused.append((candidate.plan, error))
        notes.append(f"a plan like {candidate.plan.strategy} was dropped, since it cannot be built: {error.problem}")
    plan, error = refused[0]
    raise refusal(item, plan) or error
