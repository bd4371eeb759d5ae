"""Cache a server variable in a process that reads it, refreshed once per step.

    before   w @ ps ──► ReadVariableOp ──► MatMul        ResourceApply(w) ──^──► train
    after    w/proxy ──► ReadVariableOp ──► MatMul       ResourceApply(w) ──^──► read w ──► assign w/proxy ──^──► train

Whatever waits for the variable to be written, also by an initialiser or a restored checkpoint, waits for its copy, too.
A table of which only rows are read, outside of loops and branches, stays where it is if the plan says `lookups`: to
copy all of it for each step would take longer than to look those rows up there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import unconditional_nodes
from autograph_rewrite.ir.graph import Node, Use
from autograph_rewrite.ir.mesh import ONCE, SERVER
from autograph_rewrite.ir.traversal import dependencies, topological_order, users
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ops.traits import MERGES, has
from autograph_rewrite.passes.base.rewriting import Rewrite, Site
from autograph_rewrite.passes.collectives.server_stores import ServerBuilder
from autograph_rewrite.passes.parameter_server.await_writes import await_writes
from autograph_rewrite.plan.parts.names import proxy_name
from autograph_rewrite.training_graph import TrainingGraph, Variable


def cache_reads(rewrite: Rewrite, item: TrainingGraph) -> None:
    """Make the copies that the plan asks for; a variable that the process does not read needs none."""
    servers = {request.name: request.server for request in rewrite.plan.variables if request.server is not None}
    asked = [name for name, server in servers.items() if server.proxy]
    looked_up = {name for name in asked if servers[name].lookups}
    if asked and len(asked) == len(servers):
        asked = list(rewrite.homes.of)  # what goes with the variables, too
    unconditional = unconditional_nodes(topological_order(rewrite.graph)) if looked_up else set()
    proxies: dict[str, Node] = {}
    for name in asked:
        variable = item.variables[name]
        handle = rewrite.graph.nodes.get(variable.handle)
        uses = list(_local_uses(handle)) if handle is not None and name in rewrite.homes.of else []
        if not uses or handle is None:
            continue
        readers = [node for node, _ in uses]
        if name in looked_up and all(has(node.op, "reads_rows") and node in unconditional for node in readers):
            if rewrite.workers > 1:
                await_writes(rewrite, variable.handle, rewrite.homes.of[name], readers)
        else:
            proxies[name] = _proxy(rewrite, variable, handle)
            for node, index in uses:
                node.set_input(index, proxies[name].output())
                _bring_home(node)
    if proxies:
        _refresh(rewrite, item, proxies)


def _local_uses(handle: Node) -> Iterator[Use]:
    """Yield what reads the variable for something else than its update."""
    for use in handle.output().uses:
        if not is_update(use.node) and not _leads_to_update(use.node):
            yield use


def _leads_to_update(node: Node) -> bool:
    """Return whether an update reads a handle, here or behind the nodes that hand it on."""
    if node.is_driven or is_update(node):
        return True
    reached = (use.node for use in handle_uses(node)) if has(node.op, "forwards_handle") else ()
    return any(other.is_driven or is_update(other) for other in reached)


def _bring_home(node: Node) -> None:
    """Let a reader run where its replica is."""
    reached = [use.node for use in handle_uses(node)] if has(node.op, "forwards_handle") else []
    for other in (node, *reached):
        other.leave(SERVER)


def _proxy(rewrite: Rewrite, variable: Variable, handle: Node) -> Node:
    attrs = {"dtype": dtypes.NUMBERS[variable.dtype], "shape": variable.shape, "container": ""}
    name = proxy_name(variable)
    return rewrite.add("VarHandleOp", (), Site(name, ONCE, handle), attrs=attrs | {"shared_name": name})


def _refresh(rewrite: Rewrite, item: TrainingGraph, proxies: dict[str, Node]) -> None:
    """Refresh copies behind whatever waits for their variables to be written."""
    order = topological_order(rewrite.graph)
    unconditional = unconditional_nodes(order)
    handles = {rewrite.graph.nodes[item.variables[name].handle]: name for name in proxies}
    names = list(proxies)
    written: dict[str, int] = dict.fromkeys(names, 0)  # the bits of a variable's writes
    masks: dict[Node, int] = {}
    count = 0
    for node in order:
        if not node.is_driven and node in unconditional:
            continue
        mask = 0  # of what a branch does behind a write, too
        for producer in dependencies(node):
            mask |= masks.get(producer, 0)
        name = handles.get(handle_node(node.inputs[0])) if node.is_driven and is_update(node) else None
        if name is not None:
            mask |= 1 << count
            written[name] |= 1 << count
            count += 1
        masks[node] = mask
    made: dict[tuple[str, int], tuple[Node, int]] = {}  # the copy, and all writes that it waits for
    for node in order:
        is_local = node in unconditional and not node.is_driven
        awaited = [producer for producer in _awaited(node) if masks.get(producer)] if is_local else []
        mask = 0
        for control in awaited:
            mask |= masks[control]
        changed = [(name, mask & written[name]) for name in names if mask & written[name]]
        if not changed:
            continue
        new = [key for key in changed if key not in made or made[key][1] & ~mask]  # it waits for no more than the node
        in_branches = any(control not in unconditional for control in awaited)
        readers = users(node) if in_branches else (node,)
        if new:
            done = node if in_branches else _gathered(node, awaited)
            made |= {key: (_copied(rewrite, item.variables[key[0]], proxies[key[0]], done), mask) for key in new}
        for key in changed:
            for reader in readers:
                reader.add_control(made[key][0])


def _awaited(node: Node) -> list[Node]:
    """Return what a node waits for; where branches meet, what they end with on this worker is that, too."""
    ends = (value.node for value in node.inputs if not value.node.is_driven)
    return list(dict.fromkeys((*node.controls, *(ends if node.op in MERGES else ()))))


def _gathered(node: Node, awaited: Sequence[Node]) -> Node:
    """Return one node that waits for what `node` waits for, in its place."""
    done = Builder.at(node).node("NoOp", what="written", controls=awaited)
    for control in awaited:
        node.remove_control(control)
    node.add_control(done)
    return done


def _copied(rewrite: Rewrite, variable: Variable, proxy: Node, done: Node) -> Node:
    handle = rewrite.graph.nodes[variable.handle]
    home = ServerBuilder(rewrite, rewrite.homes.of[variable.name], handle, variable.handle)
    dtype = dtypes.NUMBERS[variable.dtype]
    value = home.add("ReadVariableOp", (handle.output(),), "fresh", controls=[done], dtype=dtype).output()
    inputs, name = (proxy.output(), value), f"{variable.handle}/refresh"
    return rewrite.add("AssignVariableOp", inputs, Site(name, ONCE, handle), attrs={"dtype": dtype})
