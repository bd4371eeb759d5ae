"""FLOPs and bytes of every node of an analysed step, counted once for all plans that are simulated on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autograph_rewrite.analysis.work.buffers import buffers_of
from autograph_rewrite.analysis.work.loop_trips import runs, trips_of
from autograph_rewrite.analysis.work.op_work import Work, rows_given, work_of
from autograph_rewrite.cost.hardware.machine import Machine
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep, wanted
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import updates_rows
from autograph_rewrite.ops.facts.concrete_sizes import Shape, Sizes
from autograph_rewrite.ops.rules.table import rule_of
from autograph_rewrite.ops.traits import has

_INDEX = dtypes.INT32


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
        patches: bytes of patches of images that it holds besides, of one micro-batch or all of them.
        rows: bytes of the rows and indices that an update of rows is given, as if all were distinct.
    """

    work: Work
    made: tuple[tuple[Value, int], ...]
    targets: tuple[str | None, ...]
    hands_on: bool
    reuses: bool
    runs: int
    scratch: int = 0
    patches: int = 0
    rows: int = 0


def count(folded: AnalyzedStep, sizes: Sizes, cpu: Machine | None) -> dict[Node, OpCounts]:
    """Return what each node of a step does.

    Args:
        sizes: the numbers behind symbols.
        cpu: the machine whose CPU runs it; None for accelerators.
    """
    state, frames, found = folded.state, folded.frames, {}
    trips = trips_of(folded.order, frames)
    buffers = buffers_of(state, folded.order, frames, sizes)
    distinct: dict[Value, Shape] = {}
    for node in folded.order:
        nbytes, hands_on, reuses, is_run = buffers[node]
        if not is_run:  # the other branch is counted
            found[node] = OpCounts(Work("elementwise", 0.0, 0.0), (), (None,) * len(node.inputs), False, False, 0)
            continue
        values = [node.output(i) for i in range(len(nbytes))]
        facts = [state.facts[value] for value in node.inputs]
        inputs = [distinct.get(value) or sizes.shape(fact) for value, fact in zip(node.inputs, facts, strict=True)]
        distinct |= _distinct(node, _joined(folded, node, inputs[0], sizes) if inputs else (), distinct)
        outputs = [distinct.get(value) or sizes.shape(state.source(value)) for value in values]
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
            _patches(node, inputs, outputs, cpu),
            _rows(node, inputs),
        )
    return found


def _distinct(node: Node, first: Shape, known: Mapping[Value, Shape]) -> dict[Value, Shape]:
    """Return the shape of what is merged by id, as if all ids were distinct: a step tells how many are.

    Args:
        node: which may merge.
        first: the shape of its first operand, as it reads it.
        known: the shapes of what was merged before.
    """
    merges = node.op == "UnsortedSegmentSum" and has(node.inputs[1].node.op, "unique")
    hands_on = node.op == "Identity" and node.inputs[0] in known
    return {node.output(0): first} if has(node.op, "unique") or merges or hands_on else {}


def _joined(folded: AnalyzedStep, node: Node, shape: Shape, sizes: Sizes) -> Shape:
    """Return the shape of a node's first operand once the blocks of all replicas are joined for it, if they are."""
    placement = folded.state.source(node.inputs[0]).placement
    if not shape or not placement.is_split or placement.dim or wanted(folded.state, node, 0) != "replicated":
        return shape
    return (shape[0] * sizes.replicas * sizes.micro, *shape[1:])


def _rows(node: Node, inputs: Sequence[Shape]) -> int:
    """Return the bytes of the rows that an update is given, and of an index for each."""
    if not updates_rows(node):
        return 0
    value, rows = rows_given(node, inputs)
    return math.prod(rows) * dtypes.width(value.dtype) + rows[0] * dtypes.width(_INDEX) if rows else 0


def _scratch(node: Node, inputs: Sequence[Shape]) -> int:
    """Return the bytes that a kernel needs while it runs."""
    rule = rule_of(node.op)
    if rule is None or rule.scratch is None:
        return 0
    return rule.scratch(node.attr, inputs) * dtypes.width(node.output().dtype)


def _patches(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape], cpu: Machine | None) -> int:
    """Return the bytes of patches that a kernel holds on a CPU while it runs."""
    rule = rule_of(node.op)
    if cpu is None or rule is None or rule.patches is None:
        return 0
    width = dtypes.width(node.output().dtype)
    if cpu.onednn and width <= dtypes.width(dtypes.FLOAT):
        return 0
    return rule.patches(inputs, outputs, width, cpu.cores) * width
