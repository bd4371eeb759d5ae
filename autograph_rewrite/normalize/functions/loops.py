"""`While` becomes a frame: Enter, Merge, LoopCond, Switch, NextIteration, Exit.

    value ─► Enter ─► Merge ─► Switch ──true──► body ─► NextIteration ─┐
                        ▲        │ └──false──► Exit ─► result          │
                        └────────┼─────────────────────────────────────┘
              Merge ─► cond ─► LoopCond

What the body gives back unchanged (captured tensors, resource handles) enters once, as a constant of the frame.
A constant is alive in every iteration, also in the one that the condition forbids, so whatever reads nothing
but constants waits for the pivot, which is alive only in the iterations that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autograph_rewrite.ir.format.function_library import Function
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.shapes.recorded import Shape, record_shapes, static_shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.wire import RawNode
from autograph_rewrite.normalize.functions.bodies import Entry, is_invariant
from autograph_rewrite.normalize.functions.branches import boolean
from autograph_rewrite.normalize.functions.lowering import Lowering


@dataclass(frozen=True)
class _Variable:
    """A value that changes from iteration to iteration."""

    index: int
    enter: Node
    merge: Node
    shape: Shape | None


def lower_while(state: Lowering, node: Node, pivot: Node | None) -> None:
    """Replace a While by a frame, in place.

    Args:
        state: the lowering under way.
        node: the While.
        pivot: node that is alive in each iteration of the loop around; None: there is none.
    """
    graph, library = state.graph, state.library
    cond, body = node.attr("cond"), node.attr("body")
    fixed = _invariants(library.get(body.name), node) if body.name in library else set()
    enters = _enters(state, node, pivot, fixed)
    shapes = node.attr("output_shapes") or node.attr("_output_shapes") or ()
    changing = []
    for i, enter in enumerate(enters):
        if i not in fixed:
            merge = graph.add("Merge", [enter.output(), enter.output()], name=f"{node.name}/merge_{i}", origin=node)
            shape = _common(static_shape(node.inputs[i]), shapes[i]) if i < len(shapes) else None
            record_shapes(merge, [shape, ()])
            changing.append(_Variable(i, enter, merge, shape))
    current = {v.index: v.merge.output() for v in changing}
    iterate = changing[0].merge
    tested = state.body(node, cond, "cond", _arguments(enters, current), Entry(pivot=iterate))
    predicate = boolean(graph, node, tested.returns[0])
    decision = graph.add("LoopCond", [predicate], name=f"{node.name}/loop_cond", origin=node, controls=tested.effects)
    exits, has_effects = _iterate(state, node, body, enters, changing, decision)
    left = [value.node for value in exits.values()]
    results = [
        exits.get(i) or state.gated(node, i, state.tied(node, i, value, pivot), left[:1] if has_effects else [])
        for i, value in enumerate(node.inputs)
    ]
    state.finish(node, results, [], left)


def _common(entered: Shape | None, made: Shape | None) -> Shape | None:
    """Return the shape of a state in all iterations: TensorFlow states what the body makes, not what it begins with."""
    if made is None or entered is None or len(entered) != len(made):
        return None
    return tuple(one if one == other else None for one, other in zip(entered, made, strict=True))


def _iterate(
    state: Lowering, node: Node, body: object, enters: Sequence[Node], changing: Sequence[_Variable], decision: Node
) -> tuple[dict[int, Value], bool]:
    """Add the body and the back edges; return the exit values by index, and whether the body has effects."""
    graph = state.graph
    switches = {}
    for v in changing:
        switch = graph.add(
            "Switch", [v.merge.output(), decision.output()], name=f"{node.name}/switch_{v.index}", origin=node
        )
        record_shapes(switch, [v.shape, v.shape])
        switches[v.index] = switch
    first = switches[changing[0].index]
    pivot = graph.add("Identity", [first.output(1)], name=f"{node.name}/pivot", origin=node)
    taken = {index: switch.output(1) for index, switch in switches.items()}
    copied = state.body(node, body, "body", _arguments(enters, taken), Entry(pivot=pivot))  # type: ignore[arg-type]
    effects: Sequence[Node] = copied.effects
    if len(effects) > 1:
        effects = [graph.add("NoOp", name=f"{node.name}/effects", controls=effects, origin=node)]
    exits = {}
    for v in changing:
        value = copied.returns[v.index]
        # A constant as next value would be alive after the last iteration and start another one.
        ties = [*effects, pivot] if is_invariant(value) else effects
        following = graph.add(
            "NextIteration", [value], name=f"{node.name}/next_{v.index}", origin=node, controls=ties,
            attrs={"T": dtypes.base(v.enter.attr("T"))},
        )  # fmt: skip
        v.merge.set_input(1, following.output())
        leave = graph.add("Exit", [switches[v.index].output()], name=f"{node.name}/exit_{v.index}", origin=node)
        for one in (following, leave):
            record_shapes(one, [v.shape])
        exits[v.index] = leave.output()
    return exits, bool(effects)


def _arguments(enters: Sequence[Node], current: Mapping[int, Value]) -> list[Value]:
    return [current.get(i, enter.output()) for i, enter in enumerate(enters)]


def _enters(state: Lowering, node: Node, pivot: Node | None, fixed: set[int]) -> list[Node]:
    graph = state.graph
    frame = _unique(node.name, state.frames)
    starts: Sequence[Node] = node.controls
    if len(starts) > 1:
        starts = [graph.add("NoOp", name=f"{node.name}/start", controls=starts, origin=node)]
    enters = []
    for i, value in enumerate(node.inputs):
        tie = [pivot] if pivot is not None and is_invariant(value) else []
        enter = graph.add(
            "Enter", [value], name=f"{node.name}/enter_{i}", origin=node, controls=[*starts, *tie],
            attrs={
                "T": dtypes.base(node.input_dtypes[i]),
                "frame_name": frame,
                "is_constant": i in fixed,
                "parallel_iterations": node.attr("parallel_iterations", 10),
            },
        )  # fmt: skip
        enters.append(enter)
    return enters


def _unique(name: str, frames: set[str]) -> str:
    frame, count = name, 0
    while frame in frames:
        count += 1
        frame = f"{name}_{count}"
    frames.add(frame)
    return frame


def _invariants(body: Function, node: Node) -> set[int]:
    """Return the indices that the body gives back as it got them; resource handles always count as such.

    At least one value must change: the iterations hang on it.
    """
    nodes = {raw.name: raw for raw in body.nodes}
    unchanged = {
        i
        for i, (argument, result) in enumerate(zip(body.inputs, body.outputs, strict=True))
        if _source(body.returns[result.name], nodes) == argument.name
    }
    resources = {i for i, dtype in enumerate(node.input_dtypes) if dtype == dtypes.RESOURCE}
    if len(unchanged | resources) < len(body.inputs):
        return unchanged | resources
    plain = sorted(unchanged - resources) or [0]
    return (unchanged | resources) - {plain[0]}


def _source(reference: str, nodes: Mapping[str, RawNode]) -> str:
    """Follow a result through Identity nodes of the body."""
    name = reference.partition(":")[0]
    while name in nodes and nodes[name].op == "Identity":
        name = nodes[name].inputs[0].partition(":")[0]
    return name
