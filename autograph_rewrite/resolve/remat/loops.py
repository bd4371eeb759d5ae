"""Recompute in loops: of the values that an iteration saves for its gradient, keep the state only.

    h ─► a ─► b ─► h'      saved: h, a, b      kept: h; in the loop of the gradient a' and b' are computed from it

A cell reads the state at the start of an iteration, values from outside of the loop, and values that are not
recomputed: parts of inputs, variables. If one of these is not saved yet, it takes the list of a value that need not be
saved any more. TensorFlow saves in lists:

    forward    EmptyTensorList ─► Enter ─► Merge ─► Switch ─► Push(list, v) ─► NextIteration       Exit ─┐
    backward   ┌───────────────────────────────────────────────────────────────────────────────────────┘
               └► Enter ─► Merge ─► Switch ─► Pop(list) ─► NextIteration                Pop:1 is v

Each iteration puts one value into each list, and each backward iteration takes one out of each: values that are taken
together were put together. Lists with other readers, and those of loops within loops, are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autograph_rewrite.analysis.op_work import cost_of, trips_of, value_bytes
from autograph_rewrite.ir.control_flow import Frame, Guards, frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import constant
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import LOCAL
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES, SWITCHES, has
from autograph_rewrite.plan.parts.messages import Remat
from autograph_rewrite.resolve.remat.activations import Activations, Left, Segment, may_repeat, root_of
from autograph_rewrite.resolve.remat.policies import parts_of
from autograph_rewrite.resolve.remat.segments import SAVES_NOTHING, worth_repeating

WHOLE = ("sqrt", "hierarchical", "every", "budget")
"""Policies that recompute the whole cell."""
NO_STATE = "its loop is computed again in no part: no gradient comes from one iteration to the one before"
NOT_LISTS = (
    "what its loop saves for the gradient is kept: cells are computed again of loops of TensorFlow 2, "
    "which save in tensor lists, and that are in no other loop"
)


@dataclass(frozen=True)
class SavedList:
    """A list, and the two loops that it connects.

    Attributes:
        maker: makes it, empty.
        push: puts a value in, once in an iteration.
        pop: takes it out.
        frames: of the loop that fills it, and of the loop that empties it.
    """

    maker: Node
    push: Node
    pop: Node
    frames: tuple[Frame, Frame]

    @property
    def value(self) -> Value:
        """The value that is put in."""
        return self.push.inputs[1]

    @property
    def taken(self) -> Value:
        """The same value, in the loop that takes it out."""
        return self.pop.output(1)


@dataclass(frozen=True)
class LoopCell:
    """The nodes that are recomputed in each iteration of one loop's gradient.

    Attributes:
        segment: the cell as numbers and names, for all iterations.
        nodes: in the order of the forward.
        dropped: lists of the values that are recomputed.
        kept: by value that the cell reads, the list that holds it.
        moved: the values in `kept` that take over a list in `dropped`.
        fixed: by value that the cell reads, the node by which it enters the forward's loop, the same in all iterations.
        triggers: gradients that come from the iteration before.
        frame: the loop of the gradient.
    """

    segment: Segment
    nodes: tuple[Node, ...]
    dropped: tuple[SavedList, ...]
    kept: Mapping[Value, SavedList]
    moved: frozenset[Value]
    fixed: Mapping[Value, Node]
    triggers: tuple[Node, ...]
    frame: Frame


def cells_of(acts: Activations, remat: Remat, exchanged: Collection[Value]) -> tuple[list[LoopCell], list[Left]]:
    """Return the cells of loops, and the loops that are left as they are, with the reasons."""
    order = acts.state.order
    if not any(has(node.op, "pops") for node in order):
        return [], []
    frames = frames_of(order)
    guards = guards_of(order, frames)
    lists = grouped((one.frames, one) for one in saved_lists(acts.state.graph, frames, guards))
    known = {one.pop for saved in lists.values() for one in saved}
    others = [node for node in order if has(node.op, "pops") and node in frames and node not in known]
    wanted = _wanted(acts, remat, frames, {value.node for value in exchanged})
    trips, cells = trips_of(order, frames), []
    left = [Left(node.name, NOT_LISTS) for node in others[:1] if remat.policy != "marked"]
    for both, saved in lists.items():
        inside = {node for node in wanted if frames[node] == both[0] and guards.get(node) == guards[saved[0].push]}
        triggers = _triggers(acts, frames, both[1])
        dropped, kept = _split(acts, saved, inside)
        if not dropped:
            continue
        if not triggers:
            left.append(Left(dropped[0].push.name, NO_STATE))
            continue
        cell = _cell(acts, dropped, kept, inside, triggers)
        if cell.segment.saved_bytes <= 0:
            left.append(Left(dropped[0].value.node.name, SAVES_NOTHING))
            continue
        count, once = trips.get(both[0], 1), cell.segment
        all_of_them = replace(once, saved_bytes=once.saved_bytes * count, added_flops=once.added_flops * count)
        cells.append(replace(cell, segment=all_of_them))
    return cells, left


def _wanted(
    acts: Activations, remat: Remat, frames: Mapping[Node, Frame], exchanged: Collection[Node]
) -> frozenset[Node]:
    """Return the nodes in loops that may run again and that the policy recomputes, and the constants in loops."""

    def may_run_again(node: Node) -> bool:
        if node not in frames or node in exchanged or not may_repeat(node):
            return False
        placements = [acts.state.source(value).placement for value in node.read_outputs]
        if not any(one.differs for one in placements):  # made of variables alone, like a part of a bias
            return all(dtypes.base(dtype) in dtypes.FLOATING for dtype in node.output_dtypes)
        return all(one.differs and one not in (LOCAL, OWN_VALUE) for one in placements)

    inside = frozenset(node for node in acts.forward if may_run_again(node))
    again = worth_repeating(acts, inside | acts.repeatable) & inside
    if remat.policy.partition(":")[0] not in WHOLE:
        again &= parts_of(replace(acts, repeatable=again), remat)[0].keys()
    return again | {node for node in acts.forward if node in frames and node.op == "Const"}


def _triggers(acts: Activations, frames: Mapping[Node, Frame], frame: Frame) -> tuple[Node, ...]:
    """Return the nodes that an iteration of a gradient's loop gets from the one before: the gradients of states."""
    found: dict[Node, None] = {}
    for switch in acts.state.order:
        if switch.op in SWITCHES and frames.get(switch) == frame and switch.inputs[0].node.op == "Merge":
            value = switch.output(1)
            if dtypes.base(switch.output_dtypes[1]) in dtypes.FLOATING and acts.state.source(value).placement.differs:
                copies = [use.node for use in value.uses if use.node.op == "Identity"]
                found[copies[0] if copies else switch] = None
    return tuple(found)


def _split(
    acts: Activations, saved: list[SavedList], inside: Collection[Node]
) -> tuple[list[SavedList], dict[Value, SavedList]]:
    """Return the lists of recomputed values, and those of kept values: a next state has the memory of a state."""
    states = {one.value for one in saved if one.value.node.op in SWITCHES}
    kept: dict[Value, SavedList] = {}
    dropped: list[SavedList] = []
    for one in saved:
        is_again = one.value.node in inside and acts.state.source(one.value).placement.differs
        if is_again and one.value.node.op != "Const" and not (_next_states(one.value) & states):
            dropped.append(one)
        else:
            kept.setdefault(one.value, one)
    return dropped, kept


def _next_states(value: Value) -> set[Value]:
    """Return the states that a value is in the next iteration."""
    found: set[Value] = set()
    for use in value.uses:
        if use.node.op == "Identity":
            found |= _next_states(use.node.output())
        elif use.node.op in BACK_EDGES:
            merges = [one.node for one in use.node.output().uses]
            found |= {one.node.output(1) for merge in merges for one in merge.output().uses if one.node.op in SWITCHES}
    return found


def _cell(
    acts: Activations,
    dropped: list[SavedList],
    kept: Mapping[Value, SavedList],
    inside: Collection[Node],
    triggers: tuple[Node, ...],
) -> LoopCell:
    """Return the cell of a loop; values that would need more lists than become free are kept."""
    kept, inside = dict(kept), set(inside)
    while True:  # until each value that is read has a list: a cell of fewer nodes reads fewer values
        nodes, read = _needed(acts, [one.value for one in dropped], kept, inside)
        fixed = {value: value.node for value in read if value.node.op in ENTERS}
        free, moved, stuck = list(dropped), dict[Value, SavedList](), None
        for value in read:
            if value in kept or value in fixed:
                continue
            place = next((one for one in free if _can_hold(one, value)), None)
            if place is None:
                stuck = value
                break
            moved[value] = place
            free.remove(place)
        if stuck is None:
            break
        inside -= {use.node for use in stuck.uses}  # its readers are kept
        kept |= {one.value: one for one in dropped if one.value.node not in inside}
        dropped = [one for one in dropped if one.value.node in inside]
    again = {root_of(one.value.node): value_bytes(acts.state, one.value) for one in dropped}
    more = sum(value_bytes(acts.state, value) for value in moved if value.node.op != "ReadVariableOp")
    flops = sum(cost_of(acts.state, node) for node in nodes if node.op != "Const")
    names = tuple(value.name for value in (*kept, *moved) if value in read)
    segment = Segment(tuple(node.name for node in nodes), names, float(sum(again.values()) - more), flops)
    frame = dropped[0].frames[1] if dropped else ()
    held = {value: one for value, one in kept.items() if value in read} | moved
    return LoopCell(segment, tuple(nodes), tuple(dropped), held, frozenset(moved), fixed, triggers, frame)


def _needed(
    acts: Activations, wanted: list[Value], kept: Collection[Value], inside: Collection[Node]
) -> tuple[list[Node], list[Value]]:
    """Return the nodes that make some values, producers first, and the values that they read."""
    needed = {value.node for value in wanted}
    for node in reversed(acts.forward):
        if node in needed:
            needed |= {value.node for value in node.inputs if value.node in inside and value not in kept}
    nodes = [node for node in acts.forward if node in needed]
    read = (value for node in nodes for value in node.inputs)
    return nodes, list(dict.fromkeys(value for value in read if value.node not in needed or value in kept))


def _can_hold(one: SavedList, value: Value) -> bool:
    """Return whether a list can hold another value: of its type, and popped without a required shape."""
    shape = constant(one.pop.inputs[1])
    is_alike = dtypes.base(one.value.dtype) == dtypes.base(value.dtype)
    return is_alike and shape is not None and shape.ndim == 0


def saved_lists(graph: Graph, frames: Mapping[Node, Frame], guards: Mapping[Node, Guards]) -> list[SavedList]:
    """Return the lists of loops that are in no other loop."""
    found = (_saved(node, frames) for node in graph if node.op == "TensorListPopBack")
    once = (one for one in found if one is not None)
    return [one for one in once if all(len(guards.get(node, ())) == 1 for node in (one.push, one.pop))]


def _saved(pop: Node, frames: Mapping[Node, Frame]) -> SavedList | None:
    """Return the list that a node takes values from, if it has the form in the picture of this module."""
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
    """Return the list as it enters the loop, if a node changes it in every iteration and no other node reads it."""
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
