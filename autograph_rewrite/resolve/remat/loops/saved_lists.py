"""Lists that a loop fills for its gradient: what is put into each in an iteration, and who takes it out again.

    forward    EmptyTensorList ─► Enter ─► Merge ─► Switch ─► Push(list, v) ─► NextIteration       Exit ─┐
    backward   ┌───────────────────────────────────────────────────────────────────────────────────────┘
               └► Enter ─► Merge ─► Switch ─► Pop(list) ─► NextIteration                Pop:1 is v

Each iteration puts one value into each list, and each of the backward takes one out of each: what is taken together was
put together. Lists that anyone else reads, and those of loops within loops, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autograph_rewrite.ir.control_flow import Frame, Guards
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES, SWITCHES


@dataclass(frozen=True)
class SavedList:
    """A list, and the two loops that it connects.

    Attributes:
        maker: makes it, empty.
        push: puts a value in, once in an iteration.
        pop: takes it out.
        frames: of the loop that fills it, and of the one that empties it.
    """

    maker: Node
    push: Node
    pop: Node
    frames: tuple[Frame, Frame]

    @property
    def value(self) -> Value:
        """What is put in."""
        return self.push.inputs[1]

    @property
    def taken(self) -> Value:
        """The same, in the loop that takes it out."""
        return self.pop.output(1)


def saved_lists(graph: Graph, frames: Mapping[Node, Frame], guards: Mapping[Node, Guards]) -> list[SavedList]:
    """Return the lists of loops that are in no other loop.

    Args:
        graph: normalised.
        frames: the loops around each node.
        guards: what each node runs behind.
    """
    found = (_saved(node, frames) for node in graph if node.op == "TensorListPopBack")
    once = (one for one in found if one is not None)
    return [one for one in once if all(len(guards.get(node, ())) == 1 for node in (one.push, one.pop))]


def _saved(pop: Node, frames: Mapping[Node, Frame]) -> SavedList | None:
    """Return the list that a node takes values from, if all is as above."""
    if (before := _entered(pop)) is None or (leave := _alone(before, EXITS)) is None:
        return None
    if (switch := _alone(leave.inputs[0], SWITCHES)) is None or not _is_alone(leave.inputs[0]):
        return None
    pushes = [use.node for use in switch.output(1).uses]
    if [push.op for push in pushes] != ["TensorListPushBack"] or (made := _entered(pushes[0])) is None:
        return None
    maker = _alone(made, {"EmptyTensorList"})
    both = frames.get(pushes[0], ()), frames.get(pop, ())
    if maker is None or any(len(frame) != 1 for frame in both):
        return None
    return SavedList(maker, pushes[0], pop, both)


def _entered(user: Node) -> Value | None:
    """Return the list that enters the loop in which a node changes it in every iteration, and nobody else reads it."""
    switch = _alone(user.inputs[0], SWITCHES)
    if switch is None or user.inputs[0].index != 1 or not _is_alone(user.output(0)):
        return None
    merge, following = _alone(switch.inputs[0], MERGES), user.output(0).uses[0].node
    if merge is None or following.op not in BACK_EDGES or len(merge.inputs) != 2:
        return None
    enter, back = merge.inputs
    if back.node is not following or enter.node.op not in ENTERS or not _is_alone(enter):
        return None
    return enter.node.inputs[0]


def _alone(value: Value, ops: frozenset[str] | set[str]) -> Node | None:
    """Return the node that makes a value, if it is one of some ops, and the value has one reader."""
    return value.node if value.node.op in ops and _is_alone(value) else None


def _is_alone(value: Value) -> bool:
    return len(value.uses) == 1
