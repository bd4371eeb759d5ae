"""Checks loops: entered by Enter and left by Exit only, none waits for itself, and each iteration ends.

    x ─► Enter ─► Merge ─► Switch ─► body ─► NextIteration          Exit ─► total ─► Enter of the same loop
    y ───────────────────────────────► body: by no door                     would wait for itself for ever
                  Switch of a branch in the body ─► NextIteration           dead where the branch is not taken

TensorFlow runs none of them: it refuses the first, and ends the step without values at the others, because no back edge
closes these cycles and dead values do not enter the next iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autograph_rewrite.ir.control_flow import Frame, decider, frames_of, guards_of, opened, shared_frames_of
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH, OFTEN
from autograph_rewrite.ir.traversal import marks_before
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES, has


def loop_faults(order: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the nodes that show that a loop is broken, each with the problem; `order` has producers first."""
    frames = frames_of(order)
    if frames:
        yield from _by_no_door(order, frames)
        yield from _run_once(order, frames)
        yield from _waiting_for_themselves(order, frames)
        yield from _standing_still(order)
        yield from _entered_late(order)
        yield from _carried_sometimes(order, frames)


def _by_no_door(order: Sequence[Node], frames: dict[Node, Frame]) -> Iterator[tuple[Node, str]]:
    for node in order:
        own = frames.get(node, ())
        if node.op in ENTERS:
            own = own[:-1]
        elif node.op in EXITS:
            continue  # `frames_of` derives its frame from its operand, so the two always agree
        for producer in _producers(node):
            given = frames.get(producer, ())
            if given != own:
                where = f"'{given[-1]}'" if given else "no loop"
                problem = f"'{node.name}' is in the loop '{own[-1]}'" if own else f"'{node.name}' is in no loop"
                yield node, f"{problem} and reads '{producer.name}', which is in {where}"


def _run_once(order: Sequence[Node], frames: dict[Node, Frame]) -> Iterator[tuple[Node, str]]:
    """Yield nodes that run once in a loop that each instance runs separately."""
    shared = shared_frames_of(order)
    for node, frame in frames.items():
        if node not in shared and node.span != EACH:
            yield node, f"'{node.name}' runs {OFTEN[node.span]}, in the loop '{frame[-1]}' of each instance"


def _waiting_for_themselves(order: Sequence[Node], frames: dict[Node, Frame]) -> Iterator[tuple[Node, str]]:
    bits: dict[Frame, int] = {}
    marks: dict[Node, int] = {}
    for node, frame in frames.items():
        for depth in range(1, len(frame) + 1):
            bits.setdefault(frame[:depth], 1 << len(bits))
        marks[node] = sum(bits[frame[:depth]] for depth in range(1, len(frame) + 1))
    earlier = marks_before(order, marks)
    for node, frame in frames.items():
        for producer in _producers(node):
            outside = frames.get(producer, ())
            entered = [frame[:depth] for depth in range(1, len(frame) + 1) if outside[:depth] != frame[:depth]]
            for loop in entered:
                if bits[loop] & earlier.get(producer, 0):
                    needs = f"needs '{producer.name}', which waits for its end"
                    yield node, f"'{node.name}' in the loop '{loop[-1]}' {needs}"


def _standing_still(order: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the loop Merges with a control input: it would run before the first iteration only."""
    for node in order:
        if node._controls and node.op in MERGES and any(v.node.op in BACK_EDGES for v in node._inputs):
            awaited = next(iter(node._controls)).name
            yield node, f"'{node.name}' waits for '{awaited}', so its loop would stand still"


def _entered_late(order: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the loop Merges that read something else than an Enter and a back edge.

    Only there does TensorFlow tell a Merge that its loop is not run, in a branch or in a last iteration around it; any
    other operand leaves the Exits of that loop out, and what waits for them waits for ever.
    """
    entries = BACK_EDGES | ENTERS
    for node in order:
        if node.op in MERGES and any(value.node.op in BACK_EDGES for value in node._inputs):
            for value in node._inputs:
                if value.node.op not in entries:
                    yield node, f"'{node.name}' begins its loop with '{value.name}', which is no Enter"


def _carried_sometimes(order: Sequence[Node], frames: dict[Node, Frame]) -> Iterator[tuple[Node, str]]:
    """Yield the back edges whose value is alive in one branch of the body only."""
    guards = guards_of(order, frames)
    conditions = {
        frames[node]: decider(node.output()) for node in order if has(node.op, "loop_test") and node in frames
    }
    for node in order:
        if node.op not in BACK_EDGES or node not in frames:
            continue
        given = node._inputs[0]
        alive = opened(given, frames, guards.get(given.node, frozenset())) | guards.get(node, frozenset())
        branch = [g for g in alive if g.frame == frames[node] and g.predicate != conditions.get(g.frame)]
        if branch:
            problem = f"'{node.name}' carries '{given.name}' on, which is there only where '{branch[0].predicate.name}'"
            yield node, f"{problem} is {str(branch[0].taken).lower()}: its loop would end without values"


def _producers(node: Node) -> list[Node]:
    return [*[value.node for value in node._inputs if value.node.op not in BACK_EDGES], *node._controls]
