"""Find the server region: the optimizer updates, and the ops from the reduced gradient to them; run once per job.

    w on /job:ps    dw: partial ──► accumulator ──► dw * dw ──► ResourceApplyAdam(w, m, v)
    on servers                                      ^^^^^^^     ^^^^^^^^^^^^^^^^^^^^^^^^^^, m and v beside w
    on replicas     the forward and backward pass, the step counter, the learning rate, losses

The slots of a variable live on its device (`analysis.variable_uses`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autograph_rewrite.analysis.list_elements import future_splits
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.variable_uses import converted_uses, variable_uses
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.control_flow import frames_of, unconditional_nodes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import axis_along
from autograph_rewrite.ir.variable_ops import handle_node, is_update
from autograph_rewrite.ops.facts.concrete_sizes import static_bytes
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.traits import SWITCHES, has
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.spans import differs_by_replica
from autograph_rewrite.training_graph import Variable


def find_server_region(
    plan: Plan, state: Propagation, variables: Mapping[str, Variable], blocked: Collection[str] = ()
) -> ServerRegion:
    """Return the nodes that the servers of a resolved plan run.

    Args:
        plan: with its edges.
        blocked: names of values of which each device of a replica has a block, or a part of a sum.
    """
    if not plan.homes:
        return ServerRegion()
    taken = {state.graph.value(edge.value): edge.owner for edge in plan.edges if is_taken(plan, edge)}
    homes = dict(plan.homes)
    uses = variable_uses(state, variables, owners=plan.homes, gradients=taken)
    slots = {name: use.owner for name, use in uses.items() if use.owner is not None and use.handle.name not in blocked}
    homes |= {name: homes[owner] for name, owner in slots.items()}
    if plan.is_asynchronous:
        homes |= dict.fromkeys(sorted(_stepped(state, variables) - homes.keys()), min(homes.values()))
    dependent, differing = _dependents(state, taken), _differing(state, blocked)
    known = {variable.handle: name for name, variable in variables.items()}
    while True:
        handles = {state.graph.nodes[variables[name].handle]: home for name, home in homes.items()}
        writes = [node for node in state.order if is_update(node) and handle_node(node.inputs[0]) in handles]
        needed = ancestors(writes, controls=False)
        nodes = {node for node in state.order if node in dependent and node in needed and node not in differing}
        region = ServerRegion(homes, handles, nodes | set(writes))
        _keep_branches_together(state, region.nodes, differing)
        written = {handle_node(node.inputs[0]) for node in region.nodes if is_update(node)} - handles.keys()
        if not written:  # a variable that a branch on a server writes has to live on a server, too
            break
        homes |= dict.fromkeys(sorted(known[handle.name] for handle in written), min(homes.values()))
    _keep_reads_together(state, region, differing)
    _place(state, region, {value: homes[owner] for value, owner in taken.items()})
    return region


def _stepped(state: Propagation, variables: Mapping[str, Variable]) -> set[str]:
    """Return the variables that a node other than their initialiser writes."""
    names = {variable.handle: name for name, variable in variables.items()}
    initial = {variable.initializer for variable in variables.values()}
    writes = [node for node in state.order if is_update(node) and node.name not in initial]
    handles = {handle_node(value).name for node in writes for value in node.inputs if value.dtype == dtypes.RESOURCE}
    return {names[handle] for handle in handles if handle in names}


def is_taken(plan: Plan, edge: EdgePlan) -> bool:
    """Return whether an edge ends where its owner lives."""
    if edge.owner not in plan.homes or edge.to != repr(REPLICATED):
        return False
    return edge.lowered.is_stored or edge.lowered.is_local


def _dependents(state: Propagation, taken: Collection[Value]) -> set[Node]:
    """Return the nodes that are computed from the whole of a taken value.

    A Switch of another value, with only its predicate from the region, is not included: other branches use it, too.
    """
    sources = {node for value in taken for node in converted_uses(state, value)}
    found: set[Node] = set()
    for node in state.order:
        if node.op in SWITCHES:
            data, predicate = node.inputs[:2]
            depends = data is not predicate and (data in taken or data.node in found)
        else:
            depends = node in sources or any(value.node in found for value in node.inputs)
        if depends:
            found.add(node)
    return found


def _differing(state: Propagation, blocked: Collection[str]) -> set[Node]:
    """Return the nodes that every replica, or each device of a replica, has to run, so that no server can."""
    lists = future_splits(state)
    return {
        node
        for node in state.order
        if differs_by_replica(state, node, lists)
        or axis_along(node)
        or (blocked and any(value.name in blocked for value in (*node.inputs, *node.outputs)))
    }


def _keep_branches_together(state: Propagation, nodes: set[Node], differing: Collection[Node]) -> None:
    """Put on servers the readers of their values in branches and loops, which do not exist in every step."""
    unconditional = unconditional_nodes(state.order)
    if len(unconditional) == len(state.order):
        return
    grown = True
    while grown:
        before = len(nodes)
        for node in state.order:
            if node not in nodes and node not in differing:
                producers = (value.node for value in node.inputs)
                if any(producer in nodes and producer not in unconditional for producer in producers):
                    nodes.add(node)
        _keep_containers_together(state, nodes, differing)
        grown = len(nodes) > before


def _keep_containers_together(state: Propagation, nodes: set[Node], differing: Collection[Node]) -> None:
    """Put on servers all readers of an array or a stack that is filled there: the replicas' containers stay empty."""
    filled = [cell for cell, puts in state.puts.items() if not nodes.isdisjoint(puts)]
    if not filled:
        return
    users = {node for node in state.order if any(state.facts[value].cell in filled for value in node.inputs)}
    if apart := next((node for node in users if node in differing), None):
        raise PassError(
            f"'{apart.name}' reads on each replica what the servers put into an array",
            node=apart,
            hint="set strategy.variables to shared, or choose AllReduce",
        )
    nodes |= users


def _keep_reads_together(state: Propagation, region: ServerRegion, differing: Collection[Node]) -> None:
    """Put on servers the reads that only nodes there use: they are part of the update."""
    for node in reversed(state.order):
        if node in differing:
            continue
        readers = [use.node for value in node.outputs for use in value.uses]
        reads = any(handle_node(value) in region.handles for value in node.inputs)
        if reads and readers and all(reader in region.nodes for reader in readers) and not node.control_users:
            region.nodes.add(node)


def _place(state: Propagation, region: ServerRegion, taken: Mapping[Value, str]) -> None:
    """Put each node of the region on the device of its largest operand, and a user of a variable on the variable's.

    Nodes that only the program's process can run, such as Python code, stay with worker 0; so do readers of its tables.
    """
    devices = region.devices
    devices.update(region.handles)
    for node in state.order:
        beside = [region.handles[handle_node(v)] for v in node.inputs if handle_node(v) in region.handles]
        if beside:
            devices[node] = beside[0]
        elif node in region.nodes and not _stays(region, node):
            heaviest = 0
            for value in node.inputs:
                home = taken.get(value) or devices.get(value.node)
                weight = 1 + static_bytes(state.facts[value])
                if home is not None and weight > heaviest:
                    heaviest, devices[node] = weight, home
    _keep_loops_together(state, region)


def _stays(region: ServerRegion, node: Node) -> bool:
    """Return whether a node can only run in the process of a worker."""
    handles = [handle_node(value) for value in node.inputs if value.dtype == dtypes.RESOURCE]
    away = any(handle not in region.handles and handle not in region.nodes for handle in handles)
    return has(node.op, "of_the_program") or away


def _keep_loops_together(state: Propagation, region: ServerRegion) -> None:
    """Put the part of a loop that is in the region on one device, except for nodes that use a variable.

    TensorFlow would wait in each iteration for values from another device, also for those that only enter the loop.
    """
    homes: dict[str, str] = {}
    inside = [(node, frame[0]) for node, frame in frames_of(state.order).items() if node in region.nodes]
    for node, loop in inside:
        if node in region.devices:
            homes.setdefault(loop, region.devices[node])
    for node, loop in inside:
        if any(handle_node(value) in region.handles for value in node.inputs) or _stays(region, node):
            continue
        if loop in homes:
            region.devices[node] = homes[loop]


# Nodes that run on the server of a variable instead of on a replica.


@dataclass
class ServerRegion:
    """The nodes of servers.

    Attributes:
        homes: device by variable, the state of optimizers included.
        handles: device by the node that gives the variable's handle.
        nodes: those that run once per job.
        devices: of all nodes that are not on their replica's device.
    """

    homes: dict[str, str] = field(default_factory=dict)
    handles: dict[Node, str] = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)
    devices: dict[Node, str] = field(default_factory=dict)
