"""Record what a rewrite did: passes with their times, reshard edges, notes, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autograph_rewrite.cluster.membership import Membership
from autograph_rewrite.diagnostics.amounts import size
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.notebook import NotebookView, table, text
from autograph_rewrite.plan.parts.lowerings import Operation
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan
from autograph_rewrite.plan.parts.notes import Note
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.coverage import NOT_MEASURED, NOTE, Coverage
from autograph_rewrite.resolve.remat.activations import Decision
from autograph_rewrite.training_graph import TensorInfo


@dataclass(frozen=True)
class PassRecord:
    """One pass: its wall time, and by how many nodes the folded graph grew or shrank."""

    name: str
    seconds: float
    added: int
    removed: int


@dataclass(frozen=True, repr=False)
class Report(NotebookView):
    """The account of one rewrite.

    Attributes:
        plan: the resolved plan.
        passes: in the order they ran.
        notes: causes of lost speed, never of wrong results.
        nodes_before: nodes of the original graph.
        nodes_folded: nodes of the folded graph before expansion.
        nodes_after: nodes of the rewritten graph.
        seconds: of the whole rewrite.
        task: the number of the process that the graph is for.
        member: that process's place in the job; None if it is the only one, or its place is unknown.
        compressed: gradient sums that were sent compressed.
        homes: by variable name, optimizer state included, the device of each variable that lives on one device.
        held: bytes of variables on each device of this process, shards and copies counted.
        batches: names of the batch inputs, grouped by size; empty if all have the same size.
        inexact: quantities that differ from those on one device because the configuration asks for it.
        alone: names of the variables that each replica trains separately (`local_sgd`).
        averaged: those of `alone` that are averaged every so many steps.
        snapshot_steps: steps of an elastic job between two snapshots; None if a plan was given.
        contents: with several processes, the compressed text of the graph that all must share.
        digests: with several processes, the tensor that is fed this process's digest, and that of all digests.
        policies: by variable, the meaning of an update on several replicas, and where that was decided.
        recomputed: activations that are recomputed for the gradients.
        covered: how much of a step's floating-point work is divided, and why the rest is whole.
    """

    plan: Plan
    passes: tuple[PassRecord, ...] = ()
    notes: tuple[Note, ...] = ()
    nodes_before: int = 0
    nodes_folded: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    compressed: tuple[Compressed, ...] = ()
    task: int = 0
    member: Membership | None = None
    snapshot_steps: int | None = None
    contents: bytes = b""
    digests: tuple[str, str] | None = None
    homes: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    batches: tuple[tuple[str, ...], ...] = ()
    inexact: tuple[Note, ...] = ()
    alone: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    covered: Coverage = NOT_MEASURED
    recomputed: Decision = field(default_factory=Decision)
    policies: Mapping[str, str] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def first_replica(self) -> int:
        """The number in the job of this process's first replica."""
        return 0 if self.plan.is_driven else self.task * self.plan.instances_each

    @property
    def coverage(self) -> float:
        """The share (0..1) of the step's floating-point work, updates excluded, that is divided over the devices."""
        return self.covered.share

    @property
    def edges(self) -> tuple[EdgePlan, ...]:
        """The reshard edges."""
        return self.plan.edges

    @property
    def reductions(self) -> Counter[str]:
        """Return the number of reductions by owner (variable, or "step")."""
        moved = (edge for edge in self.edges if edge.lowered.does(Operation.REDUCE) or edge.compressor != "none")
        return Counter(edge.owner for edge in moved if not edge.role)

    @property
    def gathers(self) -> Counter[str]:
        """Return the number of gathers by owner."""
        return Counter(
            edge.owner for edge in self.edges if edge.lowered.does(Operation.GATHER) and edge.compressor == "none"
        )

    def _html_parts(self) -> Iterator[str]:
        if self.covered.parts > 1:
            yield text("\n".join([str(self.covered), *(f"whole: {line}" for line in self.covered.lines())]))
        rows = ((one.name, f"{one.seconds * 1e3:.1f}", one.added, one.removed) for one in self.passes)
        yield table(("pass", "#ms", "#added", "#removed"), rows)
        yield table(("op", "node", "note"), ((one.op, one.node, one.text) for one in (*self.inexact, *self.notes)))
        yield text("\n".join(note for note in self.plan.notes if not note.startswith(NOTE)))

    def __str__(self) -> str:
        reduced = {owner: n for owner, n in self.reductions.items() if owner != STEP}
        micro = f" x {self.plan.microbatches} micro-batches" if self.plan.microbatches > 1 else ""
        lines = [
            f"{self.nodes_before} nodes -> {self.nodes_after} for {self.plan.replicas} replicas{micro} "
            f"({self.plan.mode}), {self.seconds:.2f} s",
            f"{sum(reduced.values())} gradient reductions for {len(reduced)} variables, "
            f"{self.reductions[STEP]} of the step, {sum(self.gathers.values())} gathers",
        ]
        lines.append(f"variables: {', '.join(f'{size(held)} on {device}' for device, held in self.held.items())}")
        if self.plan.steps_per_run > 1:
            lines.append(f"a run does up to {self.plan.steps_per_run} steps, in one loop")
        lines += self.recomputed.lines()
        lines += [str(self.covered)] if self.covered.parts > 1 else []
        width = max((len(r.name) for r in self.passes), default=0)
        lines += [f"  {r.name:<{width}} {r.seconds * 1e3:7.1f} ms  +{r.added} -{r.removed}" for r in self.passes]
        lines += [f"policy: {one.variable}: {self.policies.get(one.variable, '')}" for one in self.plan.policies]
        lines += [f"not exact: {note.op} '{note.node}': {note.text}" for note in self.inexact]
        lines += [f"note: {note.op} '{note.node}': {note.text}" for note in self.notes]
        lines += [f"whole: {line}" for line in self.covered.lines()]
        lines += [f"note: {note}" for note in self.plan.notes if not note.startswith(NOTE)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Resolved:
    """Findings about the step before any conversion.

    Attributes:
        notes: causes of lost speed.
        inexact: quantities that differ from those on one device.
        shared: batch inputs that every replica reads whole.
    """

    notes: tuple[Note, ...]
    inexact: tuple[Note, ...]
    shared: tuple[TensorInfo, ...]
    covered: Coverage


# Record of compressed gradients: the tensors from which `ar.verify` checks the compressed sums.


class Compressed(NamedTuple):
    """One compressed sum, by tensors of the folded graph.

    Attributes:
        owner: the variable.
        lowering: how the codes were sent.
        gradient: one replica's contribution.
        before: one replica's residual before the step; empty without error feedback.
        after: its residual after the step.
        result: the sum that the variable's update reads.
    """

    owner: str
    compressor: str
    lowering: str
    gradient: str
    before: str
    after: str
    result: str


class CompressedSum(NamedTuple):
    """A `Compressed` record while passes may still rename nodes."""

    edge: EdgePlan
    gradient: Value
    before: Value | None
    after: Value | None
    result: Value

    def named(self) -> Compressed:
        """Return the record."""
        edge, gradient, before, after, result = self
        states = [value.name if value is not None else "" for value in (before, after)]
        return Compressed(edge.owner, edge.compressor, edge.lowering, gradient.name, states[0], states[1], result.name)
