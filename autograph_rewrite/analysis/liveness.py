"""Compute how many bytes are alive when. All memory prices share one sweep; they differ in the schedule.

schedule                        a buffer is born                  and freed
tasks that are played           when its maker has its inputs     at the end of its last reader     `cost.tasks`
parts of micro-batches          when its part starts              at the end of the last part       `cost.pipeline`
a queue of nodes, and copies    at the place of its maker         after its last reader             `resolve.remat`
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.op_work import held_in_lists, is_view, trips_of
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.control_flow import Frame, Guard, guards_of, predicate_of
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ops.facts.concrete_sizes import Sizes
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.traits import SWITCHES, has

POINTS = 400
"""Most points of a line of memory over time."""
HOLDERS = 20
"""Most holders of memory at the peak that are named."""
Holders = tuple[tuple[str, int], ...]
"""Names and bytes, the most first."""
Line = tuple[tuple[float, int], ...]
"""Seconds since the start of the step, and the bytes that are alive from then on."""


@dataclass(frozen=True, eq=False)
class Lives:
    """Buffers of one device.

    Attributes:
        born: when each is made.
        freed: after its last use; infinity where that is after the step.
        nbytes: negative where a part frees in its middle memory that is counted to its end.
        kept: bytes that are always alive.
    """

    born: Any
    freed: Any
    nbytes: Any
    kept: int = 0

    @classmethod
    def of(cls, rows: Iterable[tuple[float, float, int]], kept: int = 0) -> Lives:
        """Return the lives of buffers, each a row of (born, freed, bytes)."""
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return cls(np.array(columns[0], float), np.array(columns[1], float), np.array(columns[2], np.int64), kept)

    @cached_property
    def _sweep(self) -> tuple[Any, Any]:
        """The times of changes, and the bytes that are alive from then on."""
        times = np.concatenate([self.born, self.freed])
        changes = np.concatenate([self.nbytes, np.negative(self.nbytes)])
        order = np.lexsort((changes, times))  # at equal times, memory is freed before it is allocated
        return times[order], np.cumsum(changes[order]) + self.kept

    @property
    def peak(self) -> int:
        """The most bytes that are alive at one time."""
        return max(self.kept, int(self._sweep[1].max(initial=0)))

    @property
    def top(self) -> float:
        """The first time of the peak."""
        times, alive = self._sweep
        return float(times[alive.argmax()]) if alive.size else 0.0

    def over_time(self) -> Line:
        """Return bytes over time, `peak` at the highest point; of many changes, the most of each of `POINTS` parts."""
        times, alive = (column.tolist() for column in self._sweep)
        found = [(0.0, self.kept), *zip(times, alive, strict=True)]
        if len(found) <= POINTS:
            return tuple(found)
        width, most, last = found[-1][0] / POINTS or 1.0, list[int](), self.kept
        for at, nbytes in found:
            part = min(POINTS - 1, int(at / width))
            while len(most) <= part:  # a part without a change has the bytes of the one before
                most.append(last)
            most[part] = max(most[part], nbytes)
            last = nbytes
        return (*((part * width, nbytes) for part, nbytes in enumerate(most)), (found[-1][0], last))


def first_holders(held: Counter[str]) -> Holders:
    """Return the largest holders, and all others as one entry."""
    first = held.most_common(HOLDERS)
    others = sum(held.values()) - sum(nbytes for _, nbytes in first)
    return (*first, (f"{len(held) - len(first)} others", others)) if others else tuple(first)


# Buffers: the memory that each node makes, hands on, or puts its result into.
#
#     Reshape  hands the memory of its input on            no buffer of its own
#     Tanh     may put its result into its input's         that one ends as the new one begins
#     MatMul   makes a new one                             alive until its last reader has ended
#     Merge    hands on what the larger branch made        nothing runs in the other branch
#
# A step takes one branch of a condition, unknown before it runs. So the branch that makes more bytes is counted, with
# its gradients; the other counts for neither memory nor work.
#
# The simulation of a step and rematerialisation share this model.


REUSING = families("elementwise", "layout")
"""Families of ops that put their result into an input's memory if no other op needs it."""


class Buffers(NamedTuple):
    """The memory of one node's outputs.

    Attributes:
        nbytes: of each output.
        hands_on: the outputs share the memory of the first input; of a `Merge`, of the first input that has any.
        reuses: an output may take the place of an input.
        runs: false for a node of the branch that does not count; it has no outputs.
    """

    nbytes: tuple[int, ...]
    hands_on: bool
    reuses: bool
    runs: bool = True


def buffers_of(
    state: Propagation, order: Collection[Node], frames: dict[Node, Frame], sizes: Sizes
) -> dict[Node, Buffers]:
    """Return the memory that each node makes; for a batch input, the share of one replica.

    Args:
        order: the nodes of a step, producers first.
        frames: the loops of those that are in one.
    """
    lists, copied = held_in_lists(state, frames, trips_of(order, frames), sizes), _copied(order)
    fed = grouped((value.node, value) for value in state.whole_inputs)
    found = {}
    for node in order:
        made = [state.source(node.output(i)) for i in range(len(state.transfers[node].outputs))]
        inputs = [sizes.shape(state.facts[value]) for value in node.inputs]
        nbytes = [sizes.nbytes(fact) for fact in made]
        for value in fed.get(node, ()):
            nbytes[value.index] = sizes.nbytes(state.facts[value]) * sizes.micro
        if node in lists:
            nbytes[0] = lists[node]
        copies = has(node.op, "reads_whole") and handle_node(node.inputs[0]) in copied
        views = is_view(node, inputs, [sizes.shape(fact) for fact in made]) and not copies
        reuses = has(node.op, "reuses_input") or family_of(node.op) in REUSING
        found[node] = Buffers(tuple(nbytes), views or has(node.op, "list_views"), reuses)
    return found | dict.fromkeys(_in_smaller_branches(found, frames), Buffers((), False, False, runs=False))


def _in_smaller_branches(made: Mapping[Node, Buffers], frames: dict[Node, Frame]) -> set[Node]:
    """Return the nodes of the branch of each condition that makes fewer bytes; of equal ones, the false branch."""
    behind = grouped((guard, node) for node, guards in guards_of(made, frames).items() for guard in guards)
    switches = [node for node in made if node.op in SWITCHES] if behind else []
    conditions = dict.fromkeys((predicate_of(node), frames.get(node, ())) for node in switches)
    left_out: set[Node] = set()

    def nbytes(nodes: Iterable[Node]) -> int:
        return sum(sum(made[one].nbytes) for one in nodes if one not in left_out and not made[one].hands_on)

    # inner conditions first: of a condition within a branch, only one branch counts
    for predicate, frame in reversed(conditions):
        sides = (behind.get(Guard(predicate, taken, frame), []) for taken in (False, True))
        left_out.update(min(sides, key=nbytes))
    return left_out


def _copied(order: Iterable[Node]) -> set[Node]:
    """Return the handles of variables that TensorFlow copies at every read: those that an op accesses by row.

    Its kernels for rows call EnsureSparseVariableAccess.
    """
    of_rows = (node for node in order if re.match("Resource(Gather|Scatter|SparseApply)", node.op))
    return {handle_node(node.inputs[0]) for node in of_rows}
