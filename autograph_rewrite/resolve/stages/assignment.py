"""Assign each node to a pipeline stage.

    x ─► [ layer_1 ] ─► h ─► [ layer_2 ] ─► loss          boundary h: stages 0 and 1
    w1 ◄─[ dw1 ◄─── ] ◄─ dh ◄─[ dw2 ◄── ]                 gradients and updates follow

Stages of forward nodes come from boundaries, patterns of names, the user's devices, or a balance of costs. A forward
edge never leads back to an earlier stage. A backward node is in the stage of the node whose gradient it computes, but
never in a later stage than the gradients that it reads; a variable is where it is first read.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from autograph_rewrite.analysis.barriers import predecessors
from autograph_rewrite.analysis.list_elements import future_splits
from autograph_rewrite.analysis.op_work import cost_of, runs, trips_of, value_bytes
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.variable_uses import variable_uses
from autograph_rewrite.diagnostics.faults import did_you_mean
from autograph_rewrite.diagnostics.limits import first_match
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.control_flow import by_loops, frames_of, loops_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.run_writes import name_of_whole
from autograph_rewrite.ir.traversal import ancestors, descendants, grouped
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_specs import canonical
from autograph_rewrite.ir.types.dtypes import dtype_name
from autograph_rewrite.ir.types.opdefs import axis_along
from autograph_rewrite.ir.variable_ops import handle_node, is_update, variable_dependent_nodes
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import STEP, Pipeline
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.spans import differs_by_replica, own_loops
from autograph_rewrite.training_graph import Variable

# Balanced cut of a chain into stages: minimise the heaviest stage, then the bytes that cross.
#
# cost   3 1 1 1 3 3      stages 3      ──►   3 1 1 | 1 3 | 3        heaviest 5; then as few bytes as possible cross
#
# Zheng et al., Alpa (2022), construct stages by a dynamic program over cuts and meshes of devices; here all stages have
# equal devices, so that only the cuts are chosen.


def balanced_cut(costs: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """Return where each stage but the first begins.

    Args:
        costs: of each unit, in order.
        crossing: the bytes to send if a stage began at a unit, by unit.
        stages: how many; none of them will be empty.

    Raises:
        PlanError: there are fewer units than stages.
    """
    if len(costs) < stages:
        raise PlanError(
            f"the model has {len(costs)} operations that can be divided, fewer than {stages} stages",
            hint="use fewer stages",
        )
    sums = [0.0, *accumulate(costs)]
    limit = _lightest_limit(costs, sums, stages) * (1 + 1e-9)
    best = [0.0] + [float("inf")] * len(costs)
    choices: list[list[int]] = []
    for _ in range(stages):
        best, chosen = _extend(best, sums, crossing, limit)
        choices.append(chosen)
    begins = [len(costs)]
    for chosen in reversed(choices):
        begins.append(chosen[begins[-1]])
    return begins[-2:0:-1]


def _lightest_limit(costs: Sequence[float], sums: Sequence[float], stages: int) -> float:
    """Return the least cost that the heaviest stage can have."""
    low, high = max(max(costs), sums[-1] / stages), sums[-1]
    for _ in range(60):  # halves the interval to the precision of a float
        middle = (low + high) / 2
        if _stages_needed(sums, middle) <= stages:
            high = middle
        else:
            low = middle
    return high if _stages_needed(sums, low) > stages else low


def _stages_needed(sums: Sequence[float], limit: float) -> int:
    count, begin = 0, 0
    while begin < len(sums) - 1:
        end = bisect_left(sums, sums[begin] + limit * (1 + 1e-12), begin + 1)
        end = end if end < len(sums) and sums[end] <= sums[begin] + limit * (1 + 1e-12) else end - 1
        begin = max(end, begin + 1)
        count += 1
    return count


def _extend(
    best: Sequence[float], sums: Sequence[float], crossing: Sequence[float], limit: float
) -> tuple[list[float], list[int]]:
    """Add one stage: return the total bytes that cross, and where the last stage begins, by where it ends."""
    new, chosen = [float("inf")] * len(sums), [0] * len(sums)
    window: deque[tuple[float, int]] = deque()
    for end in range(1, len(sums)):
        begin = end - 1
        total = best[begin] + (crossing[begin] if begin else 0.0)
        while window and window[-1][0] > total:
            window.pop()
        window.append((total, begin))
        while window and sums[end] - sums[window[0][1]] > limit:
            window.popleft()
        if window:
            new[end], chosen[end] = window[0]
    return new, chosen


@dataclass
class Stages:
    """Facts about the nodes of a pipeline, apart from their stages.

    Attributes:
        backward: the nodes that compute gradients.
        owners: the variable of each slot; both are given by the nodes of their handles.
    """

    backward: set[Node]
    owners: Mapping[Node, Node] = field(default_factory=dict)


def assign_stages(
    plan: Plan, state: Propagation, outputs: Iterable[Value], variables: Mapping[str, Variable]
) -> tuple[dict[Node, int], Stages] | None:
    """Return the stage of each node of the original graph that runs for each block; None where the plan has none.

    Args:
        variables: those whose optimizer slots follow them, by name.

    Raises:
        PlanError: the division that the plan asks for is impossible on this graph.
    """
    pipeline, graph = plan.pipeline, state.graph
    if pipeline is None:
        return None
    forward = forward_nodes(plan, state, outputs)
    each = [node for node in state.order if node.span == EACH and not has(node.op, "constant")]
    needed = ancestors((graph.value(edge.value).node for edge in plan.edges), controls=False)
    chosen, backward = divide(plan, state, each, forward, needed)
    if plan.looped:
        require_isomorphic_stages(state, [node for node in each if node in forward], chosen, pipeline.stages)
    return chosen, Stages(backward, owners_of(plan, state, variables))


def stages_of_each(plan: Plan, state: Propagation, outputs: Iterable[Value]) -> dict[Node, int]:
    """Return the stages of the nodes that will run for each block, before nodes have their spans.

    Args:
        plan: with its edges.

    Raises:
        PlanError: the division that the plan asks for is impossible on this graph.
    """
    lists, own = future_splits(state), own_loops(state, plan)
    each = [
        node
        for node in state.order
        if not has(node.op, "constant") and (node in own or differs_by_replica(state, node, lists))
    ]
    needed = ancestors((state.graph.value(edge.value).node for edge in plan.edges), controls=False)
    return divide(plan, state, each, forward_nodes(plan, state, outputs), needed)[0]


def divide(
    plan: Plan, state: Propagation, each: Sequence[Node], forward: Collection[Node], needed: Collection[Node]
) -> tuple[dict[Node, int], set[Node]]:
    """Return the stages of the nodes that run for each block, and those of them that compute gradients.

    A loop is in one stage, with the values that it keeps for the backward part.

    Args:
        plan: resolved; it has stages.
        each: the nodes, producers first.
        forward: a superset of the nodes that make the loss.
        needed: a superset of the nodes that the gradients are computed from.

    Raises:
        PlanError: the division that the plan asks for is impossible on this graph.
    """
    assert plan.pipeline is not None
    loops, count = loops_of(state.order), plan.pipeline.stages
    entered = {loops[node] for node in each if node in forward and node in loops}
    kept = ancestors((node for node in each if loops.get(node) in entered), controls=False)
    work = [node for node in each if node in forward or node in kept]
    chosen = _forward_stages(state, work, plan.pipeline, loops, alike=plan.looped)
    _keep_together(work, chosen, loops)
    _late_as_possible(work, chosen, state, loops)
    _require_every_stage(chosen, count)
    rest = [node for node in each if node not in chosen]
    backward = gradients_of(rest, needed, chosen)
    _add_backward(rest, chosen, backward, count, loops)
    return chosen, backward


def _keep_together(work: Sequence[Node], stages: dict[Node, int], loops: Mapping[Node, str]) -> None:
    """Put all of a loop in the latest of its stages, and its descendants no earlier."""
    while True:
        latest: dict[str, int] = {}
        for node in work:
            if node in loops:
                latest[loops[node]] = max(stages[node], latest.get(loops[node], 0))
        said = {node: latest[loops[node]] if node in loops else stages[node] for node in work}
        if said == stages:
            return
        stages.update(_following(work, said, strict=False))


def owners_of(plan: Plan, state: Propagation, variables: Mapping[str, Variable]) -> dict[Node, Node]:
    """Return the variable of each slot, both by the nodes of their handles.

    Args:
        plan: resolved; its edges name the owner of each gradient.
    """
    graph = state.graph
    edges = [edge for edge in plan.edges if edge.owner in variables and edge.to == repr(REPLICATED)]
    taken = {graph.value(edge.value): edge.owner for edge in edges}
    uses = variable_uses(state, variables, owners=set(taken.values()), gradients=taken)
    return {use.handle: uses[use.owner].handle for use in uses.values() if use.owner in uses}


def _forward_stages(
    state: Propagation, work: Sequence[Node], pipeline: Pipeline, loops: Mapping[Node, str], *, alike: bool
) -> dict[Node, int]:
    if pipeline.stages == 1:
        return dict.fromkeys(work, 0)
    if pipeline.boundaries:
        return _behind(state.graph, work, pipeline.boundaries)
    if pipeline.names:
        return _following(
            work, {node: i for node in work if (i := first_match(pipeline.names, name_of_whole(node))) is not None}
        )
    if pipeline.assign == "device":
        return _following(work, _by_device(work, variable_dependent_nodes(state.order), pipeline.stages))
    return _balanced(state, work, pipeline.stages, loops, alike=alike)


def _behind(graph: Graph, work: Sequence[Node], boundaries: Sequence[str]) -> dict[Node, int]:
    """Begin a new stage after each boundary."""
    inside = set(work)
    parts = grouped((name_of_whole(node), node) for node in work)
    cuts = [parts.get(name.partition(":")[0]) or [_boundary(graph, name)] for name in boundaries]
    # A value that devices of a model axis add up crosses as the sum, so the sum belongs to the earlier stage.
    cuts = [[*cut, *(user for node in cut for user, _ in node.output().uses if axis_along(user))] for cut in cuts]
    stages = dict.fromkeys(work, 0)
    for i, (name, cut) in enumerate(zip(boundaries, cuts, strict=True)):
        if cut[0] not in inside:
            raise PlanError(
                f"the boundary '{name}' is not on the way from the batch to the loss",
                hint="name a tensor that the loss is computed from",
            )
        for earlier, other in zip(boundaries[:i], cuts[:i], strict=True):
            if not ancestors(other, controls=False).isdisjoint(cut):
                raise PlanError(
                    f"the boundary '{name}' (stage {i + 1} begins there) lies before '{earlier}' (stage "
                    f"{boundaries.index(earlier) + 1}): an edge would lead back",
                    hint="list boundaries in the order from the batch to the loss",
                )
        for node in descendants(cut, controls=False):
            if node in inside and node not in cut:
                stages[node] = max(stages[node], i + 1)
    return _following(work, stages, strict=False)


def _boundary(graph: Graph, name: str) -> Node:
    node = graph.nodes.get(name.partition(":")[0])
    if node is None:
        hint = did_you_mean(name, list(graph.nodes)) if len(graph.nodes) < 5000 else None
        raise PlanError(f"the graph has no tensor '{name}' to begin a stage after", hint=hint)
    return node


def _by_device(work: Sequence[Node], learnt: Collection[Node], stages: int) -> dict[Node, int]:
    """Return the stages of the nodes that the user placed on devices, in the order of the devices' first nodes."""
    found = {node: canonical(node.device) for node in work if node.device and node in learnt}
    order = {device: i for i, device in enumerate(dict.fromkeys(found.values()))}
    if len(order) != stages:
        listed = ", ".join(order) or "none"
        raise PlanError(
            f"the graph names {len(order)} devices on the way to the loss ({listed}), and there are {stages} stages",
            hint="build each stage under tf.device, or choose another way: boundaries, names, or assign: auto",
        )
    return {node: order[device] for node, device in found.items()}


def _following(work: Sequence[Node], said: Mapping[Node, int], *, strict: bool = True) -> dict[Node, int]:
    """Give nodes without a stated stage the latest stage that they read from.

    Raises:
        PlanError: an edge leads back.
    """
    stages: dict[Node, int] = {}
    for node in work:
        before = [producer for producer in predecessors(node) if producer in stages]
        at_least = max([stages[producer] for producer in before], default=0)
        stage = said.get(node, at_least)
        if stage < at_least and strict:
            source = next(producer for producer in before if stages[producer] == at_least)
            raise PlanError(
                f"an edge leads back: '{node.name}' is in stage {stage} and reads '{source.name}' in stage {at_least}",
                hint="let stages follow each other from the batch to the loss",
            )
        stages[node] = max(stage, at_least)
    return stages


def _balanced(
    state: Propagation, work: Sequence[Node], stages: int, loops: Mapping[Node, str], *, alike: bool
) -> dict[Node, int]:
    """Cut the forward nodes, in order, where the heaviest stage is lightest and the fewest bytes cross.

    If stages have to be alike, they consist of repeated layers, where those are found.
    """
    learnt = variable_dependent_nodes(state.order)
    units = _units([node for node in work if node in learnt], state.order, loops)
    place = {node: i for i, unit in enumerate(units) for node in unit}
    crossing = [0.0] * (len(units) + 1)
    for node, at in place.items():
        for value in node.read_outputs:
            last = max([place[use.node] for use in value.uses if use.node in place], default=at)
            size = value_bytes(state, value)
            crossing[at + 1] += size
            crossing[last + 1] -= size
    for i in range(1, len(crossing)):
        crossing[i] += crossing[i - 1]
    begins = repeated_layers([_sign(state, unit[0]) for unit in units], crossing, stages) if alike else None
    trips = trips_of(state.order, frames := frames_of(state.order))
    costs = [sum(cost_of(state, node) * runs(frames.get(node, ()), trips) for node in unit) for unit in units]
    begins = begins or balanced_cut(costs, crossing, stages)
    said = {node: sum(at >= begin for begin in begins) for node, at in place.items()}
    return _following(work, said)


def _units(work: Sequence[Node], order: Sequence[Node], loops: Mapping[Node, str]) -> list[list[Node]]:
    """Return the units that have to be in one stage, in order: single nodes, and loops."""
    if loops.keys().isdisjoint(work):
        return [[node] for node in work]
    wanted = set(work)
    nodes = (node for run in by_loops(order) for node in run if node in wanted)
    return list(grouped((loops.get(node, node), node) for node in nodes).values())


def _sign(state: Propagation, node: Node) -> tuple[object, ...]:
    """Return a signature of a node: its op, types and static sizes."""
    fact = state.facts.get(node.output())
    sizes = () if fact is None or fact.shape is None else fact.shape
    return node.op, node.output_dtypes, tuple(size if isinstance(size, int) else None for size in sizes)


def _late_as_possible(
    work: Sequence[Node], stages: dict[Node, int], state: Propagation, loops: Container[Node]
) -> None:
    """Move nodes that need no variable (labels, masks) to the first stage that reads them; loops do not move."""
    learnt, inside = variable_dependent_nodes(state.order), set(work)
    for node in reversed(work):
        readers = [stages[use.node] for value in node.read_outputs for use in value.uses if use.node in inside]
        if node not in learnt and readers and node not in loops:
            stages[node] = min(readers)


def _require_every_stage(stages: Mapping[Node, int], count: int) -> None:
    if empty := sorted(set(range(count)) - set(stages.values())):
        listed = ", ".join(map(str, empty))
        raise PlanError(
            f"no node of the model is in stage {listed} of {count}",
            hint="use fewer stages, or change pipeline.boundaries or pipeline.names",
        )


def gradients_of(rest: Iterable[Node], needed: Collection[Node], made: Collection[Node]) -> set[Node]:
    """Return the nodes that compute gradients.

    Sizes of forward values count as forward: they are measured there, so that the values can be freed.

    Args:
        rest: nodes that run for each block, and are not forward, producers first.
        needed: nodes that the gradients are computed from.
        made: the forward nodes that run for each block.
    """
    found: set[Node] = set()
    measured = set(made)
    for node in rest:
        if has(node.op, "sizes") and all(
            value.node in measured or has(value.node.op, "constant") for value in node.inputs
        ):
            measured.add(node)
        elif node in needed:
            found.add(node)
    return found


def _add_backward(
    rest: Sequence[Node], stages: dict[Node, int], backward: set[Node], count: int, loops: Mapping[Node, str]
) -> None:
    """Place the gradients, and all other nodes that run for each block: further outputs, and readers of gradients.

    Args:
        rest: nodes that run for each block, and are not forward, producers first.
        stages: of the forward nodes; those of the rest are added.
        backward: the nodes that compute gradients; more are added.
        loops: of the nodes in loops. A backward loop is in the earliest stage of its nodes, any other in the latest.
    """
    held: dict[str, int] = {}
    while True:
        found = dict(stages)
        _place_rest(rest, found, backward, count, {node: held[loop] for node, loop in loops.items() if loop in held})
        of_loops = grouped((loops[node], node) for node in rest if node in loops)
        for nodes in of_loops.values():
            backward.update(nodes if not backward.isdisjoint(nodes) else ())
        limits = {
            loop: (min if backward.issuperset(nodes) else max)(found[node] for node in nodes)
            for loop, nodes in of_loops.items()
        }
        if all(found[node] == limits[loop] for loop, nodes in of_loops.items() for node in nodes):
            stages.update(found)
            return
        held |= limits


def _place_rest(
    rest: Sequence[Node], stages: dict[Node, int], backward: set[Node], count: int, held: Mapping[Node, int]
) -> None:
    named = {node.name: stage for node, stage in stages.items()}
    for node in rest:
        known = [producer for producer in predecessors(node) if producer in stages]
        upstream = min([stages[producer] for producer in known if producer in backward], default=None)
        consumed = max([stages[producer] for producer in known if producer not in backward], default=None)
        if node not in backward and upstream is None:
            stages[node] = max(consumed if consumed is not None else 0, held.get(node, 0))
            continue
        backward.add(node)
        latest = count - 1 if upstream is None else upstream
        hint = differentiated(node.name, named)
        if hint is None:
            hint = consumed if consumed is not None else latest
        stages[node] = min(hint, latest, held.get(node, latest))


# Stages of nodes that run once: a variable, its slots and its update are in the stage that reads it first.
#
# Nodes from the summed gradient to the update are in the stage of the gradient, or in that of the update if some of
# their operands are there. Nodes that touch a variable are in its stage.


def stages_of_once(
    order: Sequence[Node], given: Mapping[Node, int], owners: Mapping[Node, Node], *, captured: bool = False
) -> dict[Node, int]:
    """Return the stages of the nodes that do not run for each block.

    Args:
        order: the nodes of a folded graph, producers first.
        given: the stages of those that run for each block.
        owners: the variable of each slot; both are given by the nodes of their handles.
        captured: variables live outside of the graph, on the first device.
    """
    handles = _of_handles(order, given, owners)
    found: dict[Node, int] = {}
    choices: dict[Node, list[int]] = {}
    for node in order:
        if node.span == EACH:
            found[node] = given.get(node, 0)
            continue
        touched = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
        producers = [found[value.node] for value in node.inputs if value.node.span == EACH or value.node in found]
        if touched or node in handles:
            found[node] = handles.get(touched[0] if touched else node, 0)
        elif producers:
            found[node], choices[node] = max(producers), producers
        gives_handle = any(value.dtype == dtypes.RESOURCE for value in node.read_outputs) and not node.inputs
        if captured and (touched or gives_handle):
            found[node] = 0
    for node in reversed(order):
        if node.span == EACH:
            continue
        readers = [found[use.node] for value in node.read_outputs for use in value.uses if use.node in found]
        if node not in found:
            found[node] = min(readers, default=0)
        elif len(set(readers)) == 1 and readers[0] in choices.get(node, ()):
            found[node] = readers[0]  # a gradient that is scaled by the norm of all gradients stays in its stage
    return {node: stage for node, stage in found.items() if node.span != EACH}


def _of_handles(order: Sequence[Node], given: Mapping[Node, int], owners: Mapping[Node, Node]) -> dict[Node, int]:
    """Return the stage of each variable: the first that reads it; for slots, that of their variable.

    Where that is not known, it is the stage of the gradient that updates them.
    """
    handles: dict[Node, int] = {}
    for node in order:
        if not any(value.dtype == dtypes.RESOURCE for value in node.inputs) or is_update(node):
            continue
        readers = {use.node for value in node.read_outputs for use in value.uses}
        own = {node} if node.span == EACH else set()
        read_in = [given[reader] for reader in readers | own if reader in given]
        for value in node.inputs:
            if value.dtype == dtypes.RESOURCE and read_in:
                handle = handle_node(value)
                handles[handle] = min(handles.get(handle, read_in[0]), *read_in)
    kept = {slot: handles[owner] for slot, owner in owners.items() if owner in handles}
    handles = {**kept, **handles}
    reached: dict[Node, int] = {}
    for node in order:
        if node.span == EACH:
            continue
        before = [stages[v.node] for stages in (given, reached) for v in node.inputs if v.node in stages]
        if before:
            reached[node] = max(before)
        if not is_update(node):
            continue
        touched = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
        known = [handles[handle] for handle in touched if handle in handles]
        stage = known[0] if known else reached.get(node)
        if stage is not None:
            handles |= {handle: stage for handle in touched if handle not in handles}
    return handles


# Cut a chain of repeated layers into isomorphic stages.
#
# ops    g m t m t m t m t s      stages 2      ──►   g m t m t | m t m t s       the cut that the fewest bytes cross
#          ▔▔▔ ▔▔▔ ▔▔▔ ▔▔▔        a period of 2, four times


def repeated_layers(signs: Sequence[Hashable], crossing: Sequence[float], stages: int) -> list[int] | None:
    """Return where each stage but the first begins; None where nothing is repeated as often as there are stages.

    Args:
        signs: the signature of each unit, in order.
        crossing: the bytes to send if a stage began at a unit, by unit.
    """
    known: dict[Hashable, int] = {}
    numbers = np.asarray([known.setdefault(sign, len(known)) for sign in signs])
    best, begins = 0, None
    for period in range(1, len(signs) // stages + 1):
        start, length = _longest(numbers[:-period] == numbers[period:])
        layers = (length + period) // period // stages * stages
        if layers * period > best:
            best = layers * period
            begins = (start, length + period - best, best // stages)
    if begins is None:
        return None
    start, slack, step = begins
    cuts = [[first + stage * step for stage in range(1, stages)] for first in range(start, start + slack + 1)]
    return min(cuts, key=lambda cut: sum(crossing[at] for at in cut))


def _longest(alike: Any) -> tuple[int, int]:
    """Return the start and the length of the longest run of true values."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], alike.astype(np.int8), [0]))))
    if not len(ends):
        return 0, 0
    lengths = ends[1::2] - ends[::2]
    longest = int(np.argmax(lengths))
    return int(ends[2 * longest]), int(lengths[longest])


# Check that pipeline stages are isomorphic, each with separate variables (required by the loop form).
#
#     x ─► [ embed, layer_0 ] ─► [ layer_1 ] ─► [ layer_2, head ] ─► loss       layers: same ops, attributes, shapes
#
# Nodes before the common part of the first stage, and after that of the last, are not compared. All others are compared
# with the second stage, from a stage's results back to its inputs. Constants count as part of a layer, the seeds of
# random numbers do not. The first difference is named.


HINT = "cut between layers that are alike"
SEEDS = frozenset(("seed", "seed2"))


class _Stage(NamedTuple):
    """One stage: its nodes, and the values that it sends to later ones, both in order."""

    number: int
    nodes: Sequence[Node]
    exits: Sequence[Value]
    inside: Collection[Node]


def require_isomorphic_stages(state: Propagation, work: Sequence[Node], of: Mapping[Node, int], count: int) -> None:
    """Refuse stages that differ.

    Args:
        work: its forward nodes, in order.
        of: their stages.

    Raises:
        PlanError: two stages differ; the message names the difference.
    """
    if count == 1:
        return
    learnt = variable_dependent_nodes(state.order)
    stages = [_stage(number, work, of, learnt) for number in range(count)]
    for stage in stages[:-1]:
        if not stage.exits:
            nothing = f"stage {stage.number} hands on nothing that a variable has gone into"
            _refuse(stage.number, stage.number + 1, nothing)
    first, last = stages[0], stages[-1]
    if count == 2:
        _require_one(state, last, first, [(a, b) for b in first.exits for a in _made_by(last, b)], exact=False)
        return
    second = stages[1]
    for stage in stages[2:-1]:
        if len(stage.exits) != len(second.exits):
            handed = (", ".join(f"'{value.name}'" for value in one.exits) for one in (stage, second))
            _refuse(stage.number, 1, "the one hands on {}, the other {}".format(*handed))
        for mine, other in zip(second.exits, stage.exits, strict=True):
            _, difference = _match(state, second, stage, mine, other, exact=True)
            if difference:
                _refuse(stage.number, 1, difference)
    _require_one(state, second, first, [(mine, other) for mine in second.exits for other in first.exits], exact=False)
    made = [(mine, _made_by(last, mine)) for mine in second.exits]
    _require_one(state, second, last, [(mine, other) for mine, found in made for other in found], exact=True)


def _stage(number: int, work: Sequence[Node], of: Mapping[Node, int], learnt: Collection[Node]) -> _Stage:
    nodes = [node for node in work if of[node] == number]
    exits = [
        value
        for node in nodes
        if node in learnt
        for value in node.read_outputs
        if any(of.get(use.node, number) > number for use in value.uses)
    ]
    return _Stage(number, nodes, exits, set(nodes))


def _made_by(stage: _Stage, like: Value) -> list[Value]:
    """Return the values that a stage makes by the same op, the last first."""
    made = [node for node in reversed(stage.nodes) if node.op == like.node.op]
    return [node.output(like.index) for node in made if like.index < len(node.output_dtypes)]  # a Split has any number


def _require_one(
    state: Propagation, mine: _Stage, other: _Stage, pairs: Sequence[tuple[Value, Value]], *, exact: bool
) -> None:
    """Require a layer that both stages have: a further result of one stage, such as a local loss, need not match."""
    matches = [_match(state, mine, other, a, b, exact=exact) for a, b in pairs]
    if not any(_is_complete(*match, mine) for match in matches):
        _refuse_best(matches, mine, other)


def _is_complete(pairs: Mapping[Value, Value], difference: str, stage: _Stage) -> bool:
    """Return whether stages correspond, and not only in ops without any variable."""
    outside = (value for value in pairs if value.node not in stage.inside and not has(value.node.op, "constant"))
    return not difference and len(list(outside)) > 1


def _refuse_best(matches: Sequence[tuple[Mapping[Value, Value], str]], *stages: _Stage) -> None:
    """Refuse with the difference of the match that reached farthest."""
    early, late = sorted(stages, key=lambda stage: stage.number)
    if matches:
        _, difference = max(matches, key=lambda match: len(match[0]))
        _refuse(early.number, late.number, difference or "they have no layer with a variable in common")
    value = early.exits[0]
    what = f"there is no {value.node.op} in stage {late.number} like '{value.name}' of stage {early.number}"
    _refuse(early.number, late.number, what)


def _refuse(stage: int, other: int, difference: str) -> None:
    raise PlanError(
        f"stages {min(stage, other)} and {max(stage, other)} differ, and a loop takes stages that are alike: "
        f"{difference}",
        hint=HINT,
    )


def _match(
    state: Propagation, mine: _Stage, other: _Stage, first: Value, second: Value, *, exact: bool
) -> tuple[dict[Value, Value], str]:
    """Walk back from two values at once; return the values that correspond, and the first difference.

    Args:
        mine: the stage that is walked through completely.
        other: the stage that is compared with it.
        first: a value of `mine`.
        second: a value of `other`.
        exact: an input of `mine` must correspond to an input of `other`, which may not make it.
    """
    pairs: dict[Value, Value] = {}
    pending = [(first, second, "")]
    while pending:
        a, b, reader = pending.pop()
        if a in pairs:
            if pairs[a] is not b:
                return pairs, f"'{a.name}' and '{pairs[a].name}' correspond, but not where '{b.name}' is read"
            continue
        pairs[a] = b
        inner = a.node in mine.inside, b.node in other.inside
        seeded = reader.startswith("Stateless")
        difference = next(_differences(state, a, b, inner, exact=exact, seeded=seeded), "")
        if difference:
            return pairs, difference
        if inner[0]:
            pending += zip(a.node.inputs, b.node.inputs, [a.node.op] * len(a.node.inputs), strict=True)
    return pairs, ""


def _differences(
    state: Propagation, a: Value, b: Value, inner: tuple[bool, bool], *, exact: bool, seeded: bool
) -> Iterator[str]:
    """Yield the differences between two values, or between the nodes that make them."""
    one, two = f"'{a.node.name}'", f"'{b.node.name}'"
    if inner[0] and not inner[1]:
        yield f"{one} is made by its stage, {two} in its place is handed to the other"
    if inner[1] and not inner[0] and exact:
        yield f"{one} is handed to its stage, {two} in its place is made by the other"
    if inner[0] and a.node.op != b.node.op:
        yield f"{one} is {a.node.op}, {two} in its place is {b.node.op}"
    if a.dtype != b.dtype:
        yield f"{one} is {dtype_name(a.dtype)}, {two} in its place is {dtype_name(b.dtype)}"
    shapes = [state.facts[value].shape if value in state.facts else None for value in (a, b)]
    if not _may_be_equal(*shapes):
        yield f"{one} has the shape {_written(shapes[0])}, {two} in its place {_written(shapes[1])}"
    if inner[0]:
        if len(a.node.inputs) != len(b.node.inputs) or a.index != b.index:
            yield f"{one} has {len(a.node.inputs)} inputs, {two} in its place {len(b.node.inputs)}"
        yield from _attributes(a.node, b.node)
    elif has(a.node.op, "constant") and not seeded:
        both = has(b.node.op, "constant")
        if (both or exact) and not (both and np.array_equal(a.node.attr("value"), b.node.attr("value"))):
            yield f"the constants {one} and {two} in its place differ"


def _may_be_equal(a: Sequence[object] | None, b: Sequence[object] | None) -> bool:
    """Return whether two shapes can be the same, as far as they are known."""
    if a is None or b is None:
        return True
    known = (pair for pair in zip(a, b, strict=False) if all(isinstance(size, int) for size in pair))
    return len(a) == len(b) and all(one == two for one, two in known)


def _written(shape: Sequence[object] | None) -> str:
    sizes = ("?" if shape is None else str(size) if isinstance(size, int) else "?" for size in shape or ())
    return f"[{', '.join(sizes)}]"


def _attributes(a: Node, b: Node) -> Iterator[str]:
    for key in sorted({*a.attrs, *b.attrs} - SEEDS - {"frame_name"}):
        if key.startswith("_") or a.attrs.get(key) == b.attrs.get(key):
            continue
        one, two = a.attr(key), b.attr(key)
        if not (np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two):
            yield f"'{key}' of '{a.name}' is {_text(one)}, of '{b.name}' in its place {_text(two)}"


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# Forward and backward pass: which per-replica nodes compute the loss, and which its gradients.
#
#     forward    nodes that the loss depends on, or waits for (assertions)
#     backward   other nodes that the gradients depend on
#     the rest   belongs to the one of the two that it reads from
#
# The loss is a scalar output that depends on no gradient. If no output is, TensorFlow's names of gradients tell.


GRADIENTS = re.compile(r"gradients(_\d+)?|gradient_tape")
COPIES = "remat"
"""The scope of nodes that are recomputed for the gradients: remat/<segment>/<name of the original>."""
_COPY = re.compile(rf"{COPIES}/\d+/(.+)")


def trained_nodes(plan: Plan, state: Propagation) -> set[Node]:
    """Return the gradients of variables, as the edges of a plan name them.

    A gradient of a variable in shards, cut in another way than these, has no owner: it is named as a gradient, or made
    of such values, and leads to an update but to no other gradient. Where replicas share their variables and gather the
    operands of gradients, no edge names a gradient, and the updates are returned.
    """
    found = {state.graph.value(edge.value).node for edge in plan.edges if edge.owner != STEP}
    others = {state.graph.value(edge.value).node for edge in plan.edges if edge.owner == STEP} - found
    if others:  # an optimizer may pass its gradients through nodes with other names
        others &= descendants([node for node in state.order if is_named_gradient(node.name)], controls=False)
    if found and others:
        updating = ancestors([node for node in state.order if is_update(node)], controls=False)
        found |= others & updating - ancestors(found, controls=False)
    return found or {node for node in descendants({one.node for one in state.whole_inputs}) if is_update(node)}


def forward_nodes(plan: Plan, state: Propagation, outputs: Iterable[Value]) -> set[Node]:
    """Return the nodes that make the loss.

    Args:
        plan: its edges name the gradients.
        outputs: values that the user fetches; the loss is one of them.

    Raises:
        PlanError: no variable is trained, or nothing tells the loss from the gradients.
    """
    trained = trained_nodes(plan, state)
    if not trained:
        raise PlanError("no gradient of a variable was found, so there is nothing to cut into stages")
    after, batch = descendants(trained, controls=False), {value.node for value in state.whole_inputs}
    losses = [value.node for value in outputs if value.node not in after and _is_number(state, value)]
    forward = {
        node for loss in losses if not batch.isdisjoint(made := ancestors([loss], controls=False)) for node in made
    }
    needed = ancestors(trained, controls=False)
    named = {node for node in needed if node not in forward and is_named_gradient(node.name)}
    if not named and not forward:
        raise PlanError(
            "nothing tells which part of the graph is forward and which backward",
            hint="declare the loss as an output of the graph",
        )
    if named:  # nodes that depend on no gradient are forward, too: a loss that is no output
        backward = descendants(named)  # by control edges, too: recomputed nodes wait for a gradient
        forward |= ancestors([node for node in needed if node not in backward], controls=False)
    return forward | (ancestors(forward) - needed)


def _is_number(state: Propagation, value: Value) -> bool:
    fact = state.facts[value]
    return fact.shape == () and dtypes.base(fact.dtype) in dtypes.FLOATING and not has(value.node.op, "reads_whole")


def is_named_gradient(name: str) -> bool:
    """Return whether a node has a name that TensorFlow gives to gradients."""
    return any(GRADIENTS.fullmatch(part) for part in name.split("/"))


def is_copy(name: str) -> bool:
    """Return whether a node is recomputed for the gradients."""
    return _COPY.fullmatch(name) is not None


def copied(name: str) -> str:
    """Return the name of the node that a node is a copy of; for any other node, its name."""
    match = _COPY.fullmatch(name)
    return name if match is None else match[1]


def differentiated(name: str, forward: Mapping[str, int]) -> int | None:
    """Return the entry of the forward node that a node copies or computes the gradient of, found by its name.

    Args:
        name: `gradients/layer/MatMul_grad/MatMul_1`, `gradient_tape/layer/MatMul/MatMul_1`, or `remat/0/layer/MatMul`.
    """
    if (copy := _COPY.fullmatch(name)) is not None and copy[1] in forward:
        return forward[copy[1]]
    parts = name.split("/")
    at = next((i for i, part in enumerate(parts) if GRADIENTS.fullmatch(part)), None)
    if at is None:
        return None
    for end in range(len(parts), at + 1, -1):
        rest = [*parts[at + 1 : end - 1], re.sub(r"_grad(_\d+)?$", "", parts[end - 1])]
        for candidate in ("/".join([*parts[:at], *rest]), "/".join(rest)):
            if candidate in forward:
                return forward[candidate]
    return None
