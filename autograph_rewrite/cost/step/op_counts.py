"""FLOPs and bytes of every node of an analysed step, counted once for all plans that are simulated on it."""

from __future__ import annotations

import re
from typing import NamedTuple

from autograph_rewrite.analysis.facts.concrete_sizes import Sizes
from autograph_rewrite.analysis.rule_table import TABLE, families
from autograph_rewrite.analysis.work.loop_trips import LIST_VIEWS, held_in_lists, runs, trips_of
from autograph_rewrite.analysis.work.op_work import Work, is_view, work_of
from autograph_rewrite.cost.step.analyzed_step import AnalyzedStep, wanted
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.variable_ops import handle_node

REUSING = families("elementwise", "layout")
"""Families of ops that put their result into an input's memory where nobody else needs that."""
_TAKING_OVER = """
    AddN BiasAdd Relu ReluGrad Softmax LogSoftmax CollectiveReduceV2 SoftmaxCrossEntropyWithLogits
    SparseSoftmaxCrossEntropyWithLogits
"""
TAKING_OVER = frozenset(_TAKING_OVER.split())
"""The same, by name."""


class OpCounts(NamedTuple):
    """One node.

    Attributes:
        work: of one instance.
        made: its outputs, with their bytes.
        targets: the placement that each input is converted to, or None.
        hands_on: its outputs are the memory of its first input.
        reuses: its output may take the place of an input.
        runs: how often it runs in one step.
    """

    work: Work
    made: tuple[tuple[Value, int], ...]
    targets: tuple[str | None, ...]
    hands_on: bool
    reuses: bool
    runs: int


def count(folded: AnalyzedStep, sizes: Sizes) -> dict[Node, OpCounts]:
    """Return what each node of a step does."""
    state, frames, found = folded.state, folded.frames, {}
    trips, copied = trips_of(folded.order, frames), _copied(folded)
    lists = held_in_lists(state, frames, trips, sizes)
    for node in folded.order:
        values = [node.output(i) for i in range(len(state.transfers[node].outputs))]
        facts = [state.facts[value] for value in node.inputs]
        made = [state.source(value) for value in values]
        inputs, outputs = [sizes.shape(fact) for fact in facts], [sizes.shape(fact) for fact in made]
        nbytes = [sizes.nbytes(fact) for fact in made]
        if node in lists:
            nbytes[0] = lists[node]
        rule = TABLE.get(node.op)
        copies = node.op == "ReadVariableOp" and handle_node(node.inputs[0]) in copied
        work = work_of(node, inputs, outputs, float(sum(map(sizes.nbytes, facts)) + sum(nbytes)))
        found[node] = OpCounts(
            Work("elementwise", 0.0, 2.0 * sum(nbytes)) if copies else work,
            tuple(zip(values, nbytes, strict=True)),
            tuple(wanted(state, node, index) for index in range(len(node.inputs))),
            (is_view(node, inputs, outputs) and not copies) or node.op in LIST_VIEWS,
            node.op in TAKING_OVER or (rule is not None and rule.family in REUSING),
            runs(frames.get(node, ()), trips) * (sizes.micro if node in folded.each else 1),
        )
    return found


def _copied(folded: AnalyzedStep) -> set[Node]:
    """Return the handles of variables that TensorFlow copies when they are read: those of which rows are used alone.

    Its kernels for rows call EnsureSparseVariableAccess.
    """
    of_rows = (node for node in folded.order if re.match("Resource(Gather|Scatter|SparseApply)", node.op))
    return {handle_node(node.inputs[0]) for node in of_rows}
