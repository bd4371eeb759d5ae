"""FLOPs and bytes of every node of an analysed step, counted once for all plans that are simulated on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autograph_rewrite.analysis.facts.concrete_sizes import Shape, Sizes
from autograph_rewrite.analysis.work.buffers import buffers_of
from autograph_rewrite.analysis.work.einsum_scratch import scratch_elements
from autograph_rewrite.analysis.work.loop_trips import runs, trips_of
from autograph_rewrite.analysis.work.op_work import Work, work_of
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep, wanted
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes


class OpCounts(NamedTuple):
    """One node.

    Attributes:
        work: of one instance.
        made: its outputs, with their bytes.
        targets: the placement that each input is converted to, or None.
        hands_on: its outputs are the memory of its first input.
        reuses: its output may take the place of an input.
        runs: how often it runs in one step.
        scratch: bytes that it needs while it runs, beside its outputs.
    """

    work: Work
    made: tuple[tuple[Value, int], ...]
    targets: tuple[str | None, ...]
    hands_on: bool
    reuses: bool
    runs: int
    scratch: int = 0


def count(folded: AnalyzedStep, sizes: Sizes) -> dict[Node, OpCounts]:
    """Return what each node of a step does."""
    state, frames, found = folded.state, folded.frames, {}
    trips = trips_of(folded.order, frames)
    buffers = buffers_of(state, folded.order, frames, sizes)
    for node in folded.order:
        nbytes, hands_on, reuses = buffers[node]
        values = [node.output(i) for i in range(len(nbytes))]
        facts = [state.facts[value] for value in node.inputs]
        inputs = [sizes.shape(fact) for fact in facts]
        outputs = [sizes.shape(state.source(value)) for value in values]
        work = work_of(node, inputs, outputs, float(sum(map(sizes.nbytes, facts)) + sum(nbytes)))
        copies = node.op == "ReadVariableOp" and not hands_on
        found[node] = OpCounts(
            Work("elementwise", 0.0, 2.0 * sum(nbytes)) if copies else work,
            tuple(zip(values, nbytes, strict=True)),
            tuple(wanted(state, node, index) for index in range(len(node.inputs))),
            hands_on,
            reuses,
            runs(frames.get(node, ()), trips) * (sizes.micro if node in folded.each else 1),
            _scratch(node, inputs),
        )
    return found


def _scratch(node: Node, inputs: Sequence[Shape]) -> int:
    """Return the bytes that a kernel needs while it runs."""
    if node.op != "Einsum":
        return 0
    return scratch_elements(node.attr("equation").decode(), inputs) * dtypes.width(node.output().dtype)
