"""What runs where a variable lives, once for the whole job: its update, and what leads there from a summed gradient.

    w on /job:ps    dw: partial ──► accumulator ──► dw * dw ──► ResourceApplyAdam(w, m, v)
    served                                          ^^^^^^^     ^^^^^^^^^^^^^^^^^^^^^^^^^^, m and v beside w
    not served      the forward and backward pass, the step counter, the learning rate, losses

The state that an optimizer keeps for a variable is found by what is made of it: it serves the update of that variable
and of no other, and is itself updated from the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from autograph_rewrite.analysis.containers import future_splits
from autograph_rewrite.analysis.fact import REPLICATED
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.roles import handle_of, is_update
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.frames import frames_of, unconditional
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.resources import updates
from autograph_rewrite.ir.walk import ancestors
from autograph_rewrite.item import Variable
from autograph_rewrite.passes.edges import static_bytes
from autograph_rewrite.passes.homes import Served
from autograph_rewrite.passes.partition_slots import slots_of
from autograph_rewrite.passes.spans import differs_by_replica
from autograph_rewrite.plan.lowerings import PUSHED
from autograph_rewrite.plan.parts import EdgePlan
from autograph_rewrite.plan.plan import Plan


def served_by(plan: Plan, state: Propagation, variables: Mapping[str, Variable]) -> Served:
    """Return what the servers of a resolved plan run.

    Args:
        plan: with its edges.
        state: the placements.
        variables: of the item.
    """
    if not plan.homes:
        return Served()
    taken = {state.graph.value(edge.value): edge.owner for edge in plan.edges if is_taken(plan, edge)}
    homes = dict(plan.homes)
    homes |= {name: homes[owner] for name, owner in states_of(state, variables, taken, homes).items()}
    homes |= _slots(state, variables, homes)
    if plan.is_asynchronous:
        homes |= dict.fromkeys(_stepped(state, variables) - homes.keys(), min(homes.values()))
    dependent, differing = _dependents(state, taken), _differing(state)
    known = {variable.handle: name for name, variable in variables.items()}
    while True:
        handles = {state.graph.nodes[variables[name].handle]: home for name, home in homes.items()}
        writes = [node for node in state.order if is_update(node) and handle_of(node.inputs[0]).node in handles]
        needed = ancestors(writes, controls=False)
        nodes = {node for node in state.order if node in dependent and node in needed and node not in differing}
        served = Served(homes, handles, nodes | set(writes))
        _keep_branches_together(state, served.nodes, differing)
        written = {handle_of(node.inputs[0]).node for node in served.nodes if is_update(node)} - handles.keys()
        if not written:  # else what a served branch writes is served as well
            break
        homes |= {known[handle.name]: min(homes.values()) for handle in written}
    _keep_reads_together(state, served, differing)
    _place(state, served, {value: homes[owner] for value, owner in taken.items()})
    return served


def _slots(state: Propagation, variables: Mapping[str, Variable], homes: Mapping[str, str]) -> dict[str, str]:
    """Return the homes of what an optimizer keeps for variables, also where their gradients are no exchange's.

    A gradient that every replica computes whole (of an op that needs the whole batch) is taken from nobody.
    """
    handles = {state.graph.nodes[v.handle]: v for v in variables.values() if v.handle in state.graph.nodes}
    by_handle = updates(state.order)
    settled = {handle for handle, variable in handles.items() if variable.name in homes or variable.trainable}
    found: dict[str, str] = {}
    for handle, variable in handles.items():
        if variable.name in homes:
            for slot in slots_of(state, handle, handles, by_handle, settled):
                found.setdefault(handles[slot].name, homes[variable.name])
    return found


def _stepped(state: Propagation, variables: Mapping[str, Variable]) -> set[str]:
    """Return the variables that something other than their initialiser writes."""
    names = {variable.handle: name for name, variable in variables.items()}
    initial = {variable.initializer for variable in variables.values()}
    writes = [node for node in state.order if is_update(node) and node.name not in initial]
    handles = {handle_of(value).node.name for node in writes for value in node.inputs if value.dtype == dtypes.RESOURCE}
    return {names[handle] for handle in handles if handle in names}


def is_taken(plan: Plan, edge: EdgePlan) -> bool:
    """Return whether an edge ends where its owner lives."""
    if edge.owner not in plan.homes or edge.to != repr(REPLICATED):
        return False
    return edge.lowering in PUSHED or edge.lowering in ("add_n", "fold", "concat")


def converted_uses(state: Propagation, value: Value) -> Iterator[Node]:
    """Yield the readers that want the whole of a value."""
    for node, index in value.uses:
        want = state.answers[node].wants.get(index)
        if want == REPLICATED or (want is None and value in state.reduced):
            yield node


def _dependents(state: Propagation, taken: Collection[Value]) -> set[Node]:
    """Return what is computed from the whole of a taken value.

    A Switch of something else, of which only the predicate is served, is no part of it: other branches use it, too.
    """
    sources = {node for value in taken for node in converted_uses(state, value)}
    found: set[Node] = set()
    for node in state.order:
        if node.op in ("Switch", "RefSwitch"):
            data, predicate = node.inputs[:2]
            depends = data is not predicate and (data in taken or data.node in found)
        else:
            depends = node in sources or any(value.node in found for value in node.inputs)
        if depends:
            found.add(node)
    return found


def _differing(state: Propagation) -> set[Node]:
    """Return what every replica has to run: of that, nothing can be served."""
    lists = future_splits(state)
    return {node for node in state.order if differs_by_replica(state, node, lists)}


def states_of(
    state: Propagation, variables: Mapping[str, Variable], taken: Mapping[Value, str], homes: Collection[str]
) -> dict[str, str]:
    """Return the variables that are kept for one of some others, and for which.

    Args:
        state: the placements.
        variables: of the item.
        taken: the owners of gradients, by value.
        homes: the variables whose state is wanted.
    """
    by_handle = {variable.handle: name for name, variable in variables.items()}
    bits = {name: 1 << i for i, name in enumerate(variables)}
    grads = 1 << len(bits)
    sources = {node for value in taken for node in converted_uses(state, value)}
    marks: dict[Node, int] = {}  # which variables, and whether a taken gradient, a node's values come from
    learnt: dict[str, int] = dict.fromkeys(variables, 0)
    trained = {name for name, variable in variables.items() if variable.trainable or name in homes}
    for node in state.order:
        mask = grads if node in sources else 0
        for value in node._inputs:
            mask |= marks.get(value.node, 0)
        if node.name in by_handle:
            mask |= bits[by_handle[node.name]]
        marks[node] = mask
        if is_update(node):
            for value in node._inputs:
                written = by_handle.get(handle_of(value).node.name) if value.dtype == dtypes.RESOURCE else None
                if written is not None:
                    learnt[written] |= mask
    found: dict[str, str] = {}
    while True:
        new: dict[str, str] = {}
        for name in variables.keys() - trained - found.keys():
            serves = [owner for owner in trained if learnt[owner] & bits[name]] if learnt[name] & grads else []
            if len(serves) == 1 and serves[0] in homes:
                new[name] = serves[0]
        if not new:
            return found
        found |= new
        for name in new:  # what holds gradients back hands them on
            grads |= bits[name]


def _keep_branches_together(state: Propagation, nodes: set[Node], differing: Collection[Node]) -> None:
    """Serve what reads a served value that is there only sometimes: in a branch, or in the iterations of a loop."""
    certain = unconditional(state.order)
    if len(certain) == len(state.order):
        return
    grown = True
    while grown:
        before = len(nodes)
        for node in state.order:
            if node not in nodes and node not in differing:
                producers = (value.node for value in node.inputs)
                if any(producer in nodes and producer not in certain for producer in producers):
                    nodes.add(node)
        grown = len(nodes) > before


def _keep_reads_together(state: Propagation, served: Served, differing: Collection[Node]) -> None:
    """Serve the reads that only served nodes use: they are part of the update."""
    for node in reversed(state.order):
        if node in differing:
            continue
        readers = [use.node for value in node.outputs for use in value.uses]
        reads = any(handle_of(value).node in served.handles for value in node.inputs)
        if reads and readers and all(reader in served.nodes for reader in readers) and not node.control_users:
            served.nodes.add(node)


def _place(state: Propagation, served: Served, taken: Mapping[Value, str]) -> None:
    """Put each served node where most of what it reads is; what handles a variable is where the variable is."""
    devices = served.devices
    devices.update(served.handles)
    for node in state.order:
        beside = [served.handles[handle_of(v).node] for v in node.inputs if handle_of(v).node in served.handles]
        if beside:
            devices[node] = beside[0]
        elif node in served.nodes:
            heaviest = 0
            for value in node.inputs:
                home = taken.get(value) or devices.get(value.node)
                weight = 1 + static_bytes(state.facts[value])
                if home is not None and weight > heaviest:
                    heaviest, devices[node] = weight, home
    _keep_loops_together(state, served)


def _keep_loops_together(state: Propagation, served: Served) -> None:
    """Put what is served of a loop on one device, but for what handles a variable.

    TensorFlow would wait in each iteration for what comes from another device, also for what enters the loop only.
    """
    homes: dict[str, str] = {}
    inside = [(node, frame[0]) for node, frame in frames_of(state.order).items() if node in served.nodes]
    for node, loop in inside:
        if node in served.devices:
            homes.setdefault(loop, served.devices[node])
    for node, loop in inside:
        if loop in homes and not any(handle_of(value).node in served.handles for value in node.inputs):
            served.devices[node] = homes[loop]
