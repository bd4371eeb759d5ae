"""Flatten a graph: inline function calls, and lower functional branches and loops to Switch, Merge and frames.

    call, If, Case, While ──lower──► nodes of the one graph; bodies may hold more of them, so: a worklist

TensorFlow's runtime does the same just before it runs a graph. Here it is done first, so that one analysis sees all
nodes. Functions that a step does not need, and those of datasets, are left unchanged; of initial values, those that
read variables are lowered, so that these can be cut (the average of a variable begins as its value, if it has one).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autograph_rewrite.diagnostics.limits import limit
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import OPENS
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.format.function_library import Function, Library, called
from autograph_rewrite.ir.graph import Graph, Node, Value, unique_among
from autograph_rewrite.ir.recorded_shapes import Shape, record_shapes, static_shape
from autograph_rewrite.ir.traversal import ancestors, reachable, traced_back
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import FunctionName
from autograph_rewrite.ir.types.wire import RawNode
from autograph_rewrite.normalize.dataset_loops import as_while
from autograph_rewrite.normalize.lowering import (
    DATASET_LOOP,
    Entry,
    FunctionLowering,
    boolean,
    is_invariant,
    lower_branches,
    state_results,
)
from autograph_rewrite.ops.traits import ENTERS, has


def flatten(
    graph: Graph,
    roots: Iterable[Node],
    read_outside: Collection[str] = (),
    *,
    starts: Iterable[Node] = (),
    loops_over_data: bool = False,
) -> None:
    """Lower every functional node that `roots` need, in place.

    Args:
        roots: the targets and outputs of a step.
        read_outside: names of roots whose results are fetched; the others are only run.
        starts: the nodes that give variables their first values.
        loops_over_data: lower loops over datasets, too.

    Raises:
        GraphError: a function is missing or recursive, or is a symbolic gradient.
    """
    library = Library(graph.library)
    roots = list(roots)
    run_only = frozenset(node.name for node in roots).difference(read_outside)
    state = FunctionLowering(graph, library, any(node.op in OPENS for node in graph), run_only, loops_over_data)
    one_of_each = {node.op: node for node in graph}
    if any(state.is_functional(node) for node in one_of_each.values()):
        _require_finite(graph, library)
        _flatten(state, roots, starts)
    if graph.library:
        names = dict.fromkeys(name for node in graph for name in called(node.op, node.attrs, library))
        graph.library = library.subset(names)


def _require_finite(graph: Graph, library: Library) -> None:
    """Refuse calls whose inlined bodies would have more nodes than the limit `expanded`.

    Raises:
        GraphError: a call has too many.
    """
    most = limit("expanded")
    callers = {node: [n for n in called(node.op, node.attrs, library) if n in library] for node in graph}
    sizes = library.expanded_sizes(chain.from_iterable(callers.values()))
    for node, names in callers.items():
        copies = sum(sizes[name] for name in names)
        if copies > most:
            problem = f"the functions that '{node.name}' calls come to {copies:,} nodes, calls within calls included"
            raise GraphError(problem, node=node, hint=f"at most {most:,} can be rewritten")


def _flatten(state: FunctionLowering, roots: Iterable[Node], starts: Iterable[Node]) -> None:
    graph = state.graph
    original = frozenset(graph.nodes)
    names = [node.name for node in roots]
    needed = ancestors(map(graph.node, names))
    needed |= {node for node in ancestors(starts) if any(value.node.op == "VarHandleOp" for value in node.inputs)}
    state.frames = {node.attr("frame_name").decode() for node in graph if node.op in ENTERS}
    state.pending.extend(
        (node, None, ())
        for node in graph
        # A call by function name has no op definition, so analysis and passes cannot handle it, needed or not.
        if node.op in state.library or (node in needed and state.is_functional(node))
    )
    for node, _, _ in state.pending:
        if node.op in state.library:
            state_results(node, state.library)
    while state.pending:
        node, pivot, state.callers = state.pending.popleft()
        _lower(state, node, pivot)
    _open_gates(state, map(graph.node, names))
    look_through(graph, state.predicates)
    _sweep(graph, original)


def _lower(state: FunctionLowering, node: Node, pivot: Node | None) -> None:
    if node.op == "SymbolicGradient":
        raise GraphError(
            "SymbolicGradient computes a gradient at run time, so its graph is not known",
            node=node,
            hint="build the gradient with tf.gradients or tf.GradientTape",
        )
    if node.op == DATASET_LOOP:
        loop = as_while(state.library, node, pivot)
        if loop is not None:
            results = [loop.output(i) for i in range(len(node.output_dtypes))]
            state.finish(node, results, [loop], [loop])
            lower_while(state, loop, pivot)
    elif has(node.op, "loops"):
        lower_while(state, node, pivot)
    elif has(node.op, "branches"):
        lower_branches(state, node, pivot)
    else:
        lower_call(state, node, pivot)


def _open_gates(state: FunctionLowering, roots: Iterable[Node]) -> None:
    """Remove the gates whose effects run anyway, so that their readers do not wait for them."""
    gates = set(state.gates)
    seen = reachable(roots, lambda node: [*(v.node for v in node.inputs), *(() if node in gates else node.controls)])
    behind: dict[Value, Value] = {}
    for gate in state.gates:
        if all(effect in seen for effect in gate.controls):
            behind[gate.output()] = gate.inputs[0]
            gate.output().replace_all_uses_with(gate.inputs[0])
            state.graph.erase(gate)
    for merge, predicate in state.predicates.items():
        while predicate in behind:
            predicate = behind[predicate]
        state.predicates[merge] = predicate


def _sweep(graph: Graph, original: frozenset[str]) -> None:
    """Remove new nodes that no original node needs: unread results, and arguments that bodies ignore."""
    needed = ancestors(node for node in graph if node.name in original)
    needed |= ancestors(value.node for value in graph.anchors.values())
    graph.erase_all([node for node in graph if node not in needed])


# Inline a function call; the nodes of the body are named `<call>/<node>`.


def lower_call(state: FunctionLowering, node: Node, pivot: Node | None) -> None:
    """Replace a function call by the function's body.

    Args:
        pivot: node that is alive in each iteration of the enclosing loop; None: there is no loop.
    """
    function = node.attr("f") if has(node.op, "calls") else FunctionName(node.op)
    if pivot is None and state.has_routing and node.inputs:
        # The call may be in v1 control flow: this node is alive exactly when the call is, and in its frame.
        value = next((value for value in node.inputs if not is_invariant(value)), node.inputs[0])
        pivot = Builder.at(node).node("Identity", value, what="pivot")
    body = state.body(node, function, "", node.inputs, Entry(node.controls, pivot))
    results = [
        state.gated(node, i, state.tied(node, i, value, pivot), body.effects) for i, value in enumerate(body.returns)
    ]
    state.finish(node, results, body.effects, body.effects or [value.node for value in results] or node.controls)


# Lower `While` to a frame: Enter, Merge, LoopCond, Switch, NextIteration, Exit.
#
#     value ─► Enter ─► Merge ─► Switch ──true──► body ─► NextIteration ─┐
#                         ▲        │ └──false──► Exit ─► result          │
#                         └────────┼─────────────────────────────────────┘
#               Merge ─► cond ─► LoopCond
#
# Values that the body returns unchanged (captured tensors, resource handles) enter once, as constants of the frame. A
# constant is alive in every iteration, also in the last one, in which the condition is false. So a node that reads only
# constants waits for the pivot, which is alive only in the iterations that run the body.


@dataclass(frozen=True)
class _Variable:
    """A value that changes from iteration to iteration."""

    index: int
    enter: Node
    merge: Node
    shape: Shape | None


def lower_while(state: FunctionLowering, node: Node, pivot: Node | None) -> None:
    """Replace a While by a frame, in place.

    Args:
        pivot: node that is alive in each iteration of the enclosing loop; None: there is no loop.
    """
    build = Builder.at(node)
    library = state.library
    cond, body = node.attr("cond"), node.attr("body")
    fixed = _invariants(library.get(body.name), node) if body.name in library else set()
    enters = _enters(state, node, pivot, fixed)
    shapes = node.attr("output_shapes") or node.attr("_output_shapes") or ()
    changing = []
    for i, enter in enumerate(enters):
        if i not in fixed:
            merge = build.node("Merge", enter.output(), enter.output(), what=f"merge_{i}")
            shape = _common(static_shape(node.inputs[i]), shapes[i]) if i < len(shapes) else None
            record_shapes(merge, [shape, ()])
            changing.append(_Variable(i, enter, merge, shape))
    current = {v.index: v.merge.output() for v in changing}
    iterate = changing[0].merge
    tested = state.body(node, cond, "cond", _arguments(enters, current), Entry(pivot=iterate))
    predicate = boolean(node, tested.returns[0])
    decision = build.node("LoopCond", predicate, what="loop_cond", controls=tested.effects)
    exits, has_effects = _iterate(state, node, body, enters, changing, decision)
    left = [value.node for value in exits.values()]
    results = [
        exits.get(i) or state.gated(node, i, state.tied(node, i, value, pivot), left[:1] if has_effects else [])
        for i, value in enumerate(node.inputs)
    ]
    state.finish(node, results, [], left)


def _common(entered: Shape | None, made: Shape | None) -> Shape | None:
    """Return the shape of a loop variable in all iterations, from its initial shape and that of the body's result."""
    if made is None or entered is None or len(entered) != len(made):
        return None
    return tuple(one if one == other else None for one, other in zip(entered, made, strict=True))


def _iterate(
    state: FunctionLowering,
    node: Node,
    body: object,
    enters: Sequence[Node],
    changing: Sequence[_Variable],
    decision: Node,
) -> tuple[dict[int, Value], bool]:
    """Add the body and the back edges; return the exit values by index, and whether the body has effects."""
    build = Builder.at(node)
    switches = {}
    for v in changing:
        switch = build.node("Switch", v.merge.output(), decision.output(), what=f"switch_{v.index}")
        record_shapes(switch, [v.shape, v.shape])
        switches[v.index] = switch
    first = switches[changing[0].index]
    pivot = build.node("Identity", first.output(1), what="pivot")
    taken = {index: switch.output(1) for index, switch in switches.items()}
    copied = state.body(node, body, "body", _arguments(enters, taken), Entry(pivot=pivot))  # type: ignore[arg-type]
    effects: Sequence[Node] = copied.effects
    if len(effects) > 1:
        effects = [build.node("NoOp", what="effects", controls=effects)]
    exits = {}
    for v in changing:
        value = copied.returns[v.index]
        # A constant as next value would be alive after the last iteration too, and start another one.
        ties = [*effects, pivot] if is_invariant(value) else effects
        following = build.node(
            "NextIteration", value, what=f"next_{v.index}", controls=ties, T=dtypes.base(v.enter.attr("T"))
        )
        v.merge.set_input(1, following.output())
        leave = build.node("Exit", switches[v.index].output(), what=f"exit_{v.index}")
        for one in (following, leave):
            record_shapes(one, [v.shape])
        exits[v.index] = leave.output()
    return exits, bool(effects)


def _arguments(enters: Sequence[Node], current: Mapping[int, Value]) -> list[Value]:
    return [current.get(i, enter.output()) for i, enter in enumerate(enters)]


def _enters(state: FunctionLowering, node: Node, pivot: Node | None, fixed: set[int]) -> list[Node]:
    build = Builder.at(node)
    frame = unique_among(node.name, state.frames)
    starts: Sequence[Node] = node.controls
    if len(starts) > 1:
        starts = [build.node("NoOp", what="start", controls=starts)]
    enters = []
    for i, value in enumerate(node.inputs):
        tie = [pivot] if pivot is not None and is_invariant(value) else []
        enter = build.node(
            "Enter",
            value,
            what=f"enter_{i}",
            controls=[*starts, *tie],
            T=dtypes.base(node.input_dtypes[i]),
            frame_name=frame,
            is_constant=i in fixed,
            parallel_iterations=node.attr("parallel_iterations", 10),
        )
        enters.append(enter)
    return enters


def _invariants(body: Function, node: Node) -> set[int]:
    """Return the indices of values that the body returns unchanged; resource handles always count as unchanged.

    At least one index is left out, because iterations need a value with a back edge.
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


# Forward values through Optionals, in which the gradient of a `tf.cond` keeps values of one branch.
#
#     OptionalFromValue(v) ─► Merge ─► Switch ─► OptionalGetValue     becomes     v ─► Switch
#
# `v` is alive exactly when its branch was taken. The nodes between Merge and OptionalGetValue only route the Optional;
# a copy of that route carries `v` itself. The side of the Merge follows from the Switch, if the same predicate decides
# both; or it is the only side that is no OptionalNone, which cannot be read. An Optional that passes a loop's back
# edge, or a list, stays.


_TYPES = ("T", "_output_shapes")
_COPIES = ("Switch", "Identity")

Laid = dict[tuple[Value, Value], Value]  # (routing value, value carried instead) -> its copy


def look_through(graph: Graph, predicates: Mapping[Node, Value]) -> None:
    """Replace every OptionalGetValue whose source is found by the value itself, in place.

    Args:
        predicates: the predicate of each Merge of a lowered `If`, whose first input is the else side.
    """
    laid: Laid = {}
    waiting = [node for node in graph if node.op == "OptionalGetValue"]
    while waiting:
        left = [node for node in waiting if not _replaced(graph, node, predicates, laid)]
        if len(left) == len(waiting):
            return
        waiting = left  # a predicate may have come out of an Optional, which is replaced now


def _replaced(graph: Graph, node: Node, predicates: Mapping[Node, Value], laid: Laid) -> bool:
    path, end = _route(node.inputs[0])
    source = _optional_source(path, end, predicates)
    if source is None:
        return False
    for out in node.read_outputs:
        if out.uses:
            out.replace_all_uses_with(_lay(graph, source.inputs[out.index], path, laid))
    return True


def _route(value: Value) -> tuple[list[Value], Value]:
    """Return the routing values between an Optional and its source, the last one first, and the source."""
    path: list[Value] = []
    while has(value.node.op, "carries"):
        path.append(value)
        value = value.node.inputs[0]
    return path, value


def _optional_source(path: Sequence[Value], end: Value, predicates: Mapping[Node, Value]) -> Node | None:
    """Return the OptionalFromValue that is read through a route; None if it is not certain."""
    if end.node.op == "OptionalFromValue":
        return end.node
    if end.node.op != "Merge" or end.index != 0:
        return None
    made = [traced_back(side, _COPIES).node for side in end.node.inputs]
    full = [node for node in made if node.op == "OptionalFromValue"]
    if len(full) == 1 and all(node.op == "OptionalNone" for node in made if node is not full[0]):
        return full[0]
    decided = predicates.get(end.node)
    if decided is None or len(full) != 2:
        return None
    decider = traced_back(decided, _COPIES)
    for step in path:
        if step.node.op == "Switch" and traced_back(step.node.inputs[1], _COPIES) is decider:
            return full[step.index]
    return None


def _lay(graph: Graph, value: Value, path: list[Value], laid: Laid) -> Value:
    """Copy a route for `value`; routes with a common beginning share the copies."""
    carried = value
    for step in reversed(path):
        key = (step, carried)
        if key not in laid:
            node = step.node
            inputs, name = [value, *node.inputs[1:]], f"{node.name}/value"
            copy = copy_node(graph, node, inputs, name=name, controls=node.controls, without=_TYPES)
            copy.set_attr("T", dtypes.base(value.dtype))
            for index in range(len(copy.output_dtypes)):
                laid[node.output(index), carried] = copy.output(index)
        value = laid[key]
    return value
