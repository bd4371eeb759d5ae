"""Buffers: the memory that each node makes, hands on, or puts its result into.

    Reshape  hands the memory of its input on            no buffer of its own
    Tanh     may put its result into its input's         that one ends as the new one begins
    MatMul   makes a new one                             alive until its last reader has ended
    Merge    hands on what the larger branch made        nothing runs in the other branch

A step takes one branch of a condition. Nobody knows which before it runs, so the one that makes more bytes is counted,
its gradients included, and of the other one neither memory nor work.

One model for whoever prices memory: the simulation of a step, and the choice of what is computed again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from autograph_rewrite.analysis.facts.concrete_sizes import Sizes
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.rule_table import TABLE, families
from autograph_rewrite.analysis.work.loop_trips import held_in_lists, trips_of
from autograph_rewrite.analysis.work.op_work import is_view
from autograph_rewrite.ir.control_flow import Frame, Guard, guards_of, predicate_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ops.traits import SWITCHES, has

REUSING = families("elementwise", "layout")
"""Families of ops that put their result into an input's memory where nobody else needs that."""


class Buffers(NamedTuple):
    """The memory of one node's outputs.

    Attributes:
        nbytes: of each output.
        hands_on: they are the memory of its first input; of a `Merge`, of the first that has any.
        reuses: an output may take the place of an input.
        runs: it is not in a branch that is taken not to run; what is has no outputs.
    """

    nbytes: tuple[int, ...]
    hands_on: bool
    reuses: bool
    runs: bool = True


def buffers_of(
    state: Propagation, order: Collection[Node], frames: dict[Node, Frame], sizes: Sizes
) -> dict[Node, Buffers]:
    """Return what memory each node makes; of a batch input, the share of one replica.

    Args:
        state: the placements.
        order: the nodes of a step, producers first.
        frames: the loops of those that are in one.
        sizes: the numbers behind symbols.
    """
    lists, copied = held_in_lists(state, frames, trips_of(order, frames), sizes), _copied(order)
    fed: dict[Node, list[Value]] = {}
    for value in state.whole_inputs:
        fed.setdefault(value.node, []).append(value)
    found = {}
    for node in order:
        made = [state.source(node.output(i)) for i in range(len(state.transfers[node].outputs))]
        inputs = [sizes.shape(state.facts[value]) for value in node.inputs]
        nbytes = [sizes.nbytes(fact) for fact in made]
        for value in fed.get(node, ()):
            nbytes[value.index] = sizes.nbytes(state.facts[value]) * sizes.micro
        if node in lists:
            nbytes[0] = lists[node]
        copies = node.op == "ReadVariableOp" and handle_node(node.inputs[0]) in copied
        views = is_view(node, inputs, [sizes.shape(fact) for fact in made]) and not copies
        rule = TABLE.get(node.op)
        reuses = has(node.op, "reuses_input") or (rule is not None and rule.family in REUSING)
        found[node] = Buffers(tuple(nbytes), views or has(node.op, "list_views"), reuses)
    return found | dict.fromkeys(_in_smaller_branches(found, frames), Buffers((), False, False, runs=False))


def _in_smaller_branches(made: Mapping[Node, Buffers], frames: dict[Node, Frame]) -> set[Node]:
    """Return the nodes of the branch of each condition that makes fewer bytes; of two alike, of the false one."""
    behind: dict[Guard, list[Node]] = {}
    for node, guards in guards_of(made, frames).items():
        for guard in guards:
            behind.setdefault(guard, []).append(node)
    switches = [node for node in made if node.op in SWITCHES] if behind else []
    conditions = dict.fromkeys((predicate_of(node), frames.get(node, ())) for node in switches)
    left_out: set[Node] = set()

    def nbytes(nodes: Iterable[Node]) -> int:
        return sum(sum(made[one].nbytes) for one in nodes if one not in left_out and not made[one].hands_on)

    # inner conditions first: of a branch with a condition in it, one of its branches alone counts
    for predicate, frame in reversed(conditions):
        sides = (behind.get(Guard(predicate, taken, frame), []) for taken in (False, True))
        left_out.update(min(sides, key=nbytes))
    return left_out


def _copied(order: Iterable[Node]) -> set[Node]:
    """Return the handles of variables that TensorFlow copies when they are read: those of which rows are used alone.

    Its kernels for rows call EnsureSparseVariableAccess.
    """
    of_rows = (node for node in order if re.match("Resource(Gather|Scatter|SparseApply)", node.op))
    return {handle_node(node.inputs[0]) for node in of_rows}
