"""Assign devices to the instances of nodes, and order them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from autograph_rewrite.analysis.accelerator import host_nodes, is_accelerator
from autograph_rewrite.analysis.propagate import is_pinned
from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MICRO, MODEL, ONCE, PER_REPLICA, REPLICA, STAGE, WITHIN, Mesh, Select
from autograph_rewrite.ir.traversal import descendants, levels, marks_before, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.device_names import parse, process_of
from autograph_rewrite.ir.types.device_specs import canonical
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses
from autograph_rewrite.ir.verify.collective_groups import is_collective
from autograph_rewrite.ir.verify.nccl import uses_nccl
from autograph_rewrite.ops.rules.random import is_draw
from autograph_rewrite.ops.traits import ENTERS, READS, has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout
from autograph_rewrite.passes.micro_batches.sequencing import sequence_micro_batches
from autograph_rewrite.passes.pipeline_parallel.early_sends import tell_ready
from autograph_rewrite.passes.pipeline_parallel.schedule import order_stages, stage_devices
from autograph_rewrite.plan.replica_devices import HOST, run_devices
from autograph_rewrite.resolve.model_axis import logical_devices
from autograph_rewrite.resolve.remat.policies import OFFLOAD_ATTR
from autograph_rewrite.resolve.stages.assignment import Stages


def place_instances(rewrite: Rewrite, stages: Stages | None, fed: Collection[str] = ()) -> ReplicaLayout:
    """Place the nodes that run once, and return the layout of the others.

    Args:
        stages: the stages of nodes; None if the plan has no stages.
        fed: names of the fed inputs.

    Raises:
        VerifyError: a variable would be on another device than a reader or a writer of it.
    """
    graph, plan = rewrite.graph, rewrite.plan
    micro = 1 if plan.looped else plan.microbatches
    devices = run_devices(plan, rewrite.task)
    is_whole = not plan.part_devices or rewrite.along > 1
    if rewrite.mirrored:
        wait_for_members(graph, micro)
    mesh = Mesh.of(plan.replicas_each, micro, rewrite.places, model=rewrite.along, divided=rewrite.divided)
    mesh = _with_devices(mesh, devices)
    stay_at_tables(rewrite, _host(devices[0]))
    for node in [node for node in graph if OFFLOAD_ATTR in node._attrs]:
        rewrite.settle(node, _host(devices[0]))
    order = sequence_micro_batches(graph, micro) if stages is None else order_stages(rewrite, stages, mesh, micro)
    if mesh.size(MODEL) > 1 and MODEL not in mesh.along:
        for node, logical in logical_devices(topological_order(graph)).items():
            node.put(MODEL, logical)
    if plan.looped:
        follow(rewrite)
    assign_devices(rewrite, mesh, is_whole=is_whole)
    if is_whole:
        read_beside(rewrite)
    if stages is not None:
        tell_ready(graph, stages, order.roots, stage_devices(mesh))
    if not plan.is_driven:  # one host
        _stay_on_host(rewrite, devices[0], fed)
    layout = ReplicaLayout(replace(mesh, shared=tuple(rewrite.homes.devices)), order)
    if is_whole:
        require_beside(graph, rewrite.handles, layout)
    return layout


def wait_for_members(graph: Graph, micro: int) -> None:
    """Let readers of the first instance of a value wait for all instances, if the value depends on a collective.

    A run of a reader alone would otherwise leave out the other members of the collective. Readers of the first of
    several micro-batches do not wait for later ones, which may depend on the reader.
    """
    order = topological_order(graph)
    frames = frames_of(order)
    meetings = marks_before(order, {node: 1 for node in order if is_collective(node.op)})
    met: dict[Value, Value] = {}
    for node in order:
        if node in frames or node.span & PER_REPLICA:
            continue
        for index, select in node.selects.items():
            value = node.inputs[index]
            made = value.node
            if select is not Select.FIRST or not (is_collective(made.op) or meetings[made]):
                continue
            if micro == 1 or MICRO not in made.span - node.span:
                node.add_control(made)
                continue
            if value not in met:  # a control edge cannot select the first micro-batch
                build = Builder.at(made, "met", span=frozenset({MICRO}))
                one = build.node("Identity", value, controls=[made], selects={0: Select.FIRST})
                met[value] = one.output()
            node.set_input(index, met[value], Select.FIRST)


def _with_devices(mesh: Mesh, devices: Sequence[str]) -> Mesh:
    """Return a mesh with the devices of its coordinates; more stages than devices of a replica take these round-robin.

    Args:
        devices: replica by replica, in each stage by stage, in each by logical device.
    """
    size, each = mesh.size(MODEL), len(devices) // mesh.size(REPLICA)
    firsts = range(0, len(devices), each)
    stages = range(mesh.size(STAGE))
    found = [devices[first + stage * size % each :][:size] for first in firsts for stage in stages]
    return replace(mesh, devices=tuple(device for cell in found for device in cell))


def _stay_on_host(rewrite: Rewrite, first: str, fed: Collection[str]) -> None:
    """Put nodes for which an accelerator has no kernel, sizes, and cuts of inputs on the host."""
    graph = rewrite.graph

    def requested(node: Node) -> str:
        return node.device if node.span == ONCE else rewrite.home_of(node) or first

    if not any(is_accelerator(requested(node)) for node in graph):
        return
    order = topological_order(graph)
    for node in host_nodes(order, requested, {graph.nodes[name] for name in fed if name in graph}, frames_of(order)):
        home = _host(requested(node))
        if node.span == ONCE:
            node.set_device(home)
        else:
            rewrite.settle(node, home)


def _host(device: str) -> str:
    """Return the CPU device of a device's process; a CPU is returned as it is."""
    return device if parse(device).kind == "CPU" else process_of(device) + HOST


def _assign(rewrite: Rewrite) -> None:
    """Assign devices: nodes that run once to the first, stages to theirs."""
    stages = rewrite.get(Stages) if rewrite.has(Stages) else None
    fed = [info.tensor.partition(":")[0] for info in rewrite.item.inputs.values()]
    order_collectives(rewrite.graph)
    rewrite.put(place_instances(rewrite, stages, fed))


ASSIGN_DEVICES = Pass("assign-devices", _assign, needs=(Homes,), gives=(ReplicaLayout,))


# Assign devices: instance r to device r, nodes that run once to the first device.
#
# A node that the user put on a CPU stays on the host while replicas are on accelerators. Virtual CPU devices of one
# process share their cores, so replicas that also share their variables all run on the first: sending tensors between
# them would only cost (measured: 2 to 5 % of a step), and no device has to be created for them.


def assign_devices(rewrite: Rewrite, mesh: Mesh, *, is_whole: bool) -> None:
    """Set the device of every node that runs once; expansion places the instances of the others.

    Args:
        mesh: of this process, with the devices of its replicas.
        is_whole: each replica has one device.
    """
    first, drivers = mesh.device({}), rewrite.plan.stage_hosts
    host = _host(first)

    def device(node: Node) -> str:
        if node.span == ONCE and (home := rewrite.home_of(node)) is not None:
            return home  # a shared device belongs to no stage
        if is_whole:
            on_host = host != first and (stays_on_host(node) or "CPU" in node.device.upper())
            return host if on_host else first
        if drivers and has(node.op, "of_the_program"):
            return drivers[0] + HOST
        return mesh.device({axis: node.at(axis) for axis in node.place if axis in WITHIN})

    for node in rewrite.graph:
        if node.span == ONCE or (node.span == PER_REPLICA and not is_whole):
            node.set_device(device(node))


def stays_on_host(node: Node) -> bool:
    """Return whether a node that runs once is on the host though replicas are on accelerators.

    Inputs and side effects are; random draws and exchanges of floating-point numbers are on the replicas' device.
    Integers that processes exchange once for all their replicas are sizes and digests, which are computed on the host.
    """
    if is_collective(node.op):
        return not any(dtype in dtypes.INEXACT for dtype in node.output_dtypes[:1])
    return is_pinned(node) and not is_draw(node.op)


# Give NCCL's collectives one order: each waits for the one before it, in the same way on every device.
#
#     all_reduce(dw1)  all_reduce(dw2)   ──►   all_reduce(dw1) ──► all_reduce(dw2)
#
# The folded graph has each collective once and no cycle, so any topological order works, and all processes find the
# same one: by the longest path to each collective, so that one that is ready early does not wait for one that is ready
# late. TensorFlow's rings need no order: their members find each other by their keys.


def order_collectives(graph: Graph) -> None:
    """Chain the collectives that ask for NCCL; those of loops stay as they are.

    A collective in a branch waits for all outside that do not depend on it, and none outside waits for it: the branch
    may not run.
    """
    for node in [node for node in graph if is_collective(node.op) and uses_nccl(node)]:
        if node.span == ONCE and stays_on_host(node):
            node.set_attr("communication_hint", "auto")
    asking = [node for node in graph if is_collective(node.op) and uses_nccl(node)]
    if not asking:
        return
    order = topological_order(graph)
    level, position = levels(order), {node: i for i, node in enumerate(order)}
    asking.sort(key=lambda node: (level[node], position[node]))
    frames = frames_of(order)
    guards = guards_of(order, frames)
    free = [node for node in asking if node not in frames and not guards.get(node)]
    for before, node in pairwise(free):
        node.add_control(before)
    for guarded in [node for node in asking if node not in frames and guards.get(node)]:
        later = descendants([guarded])
        reached = next((i for i, node in enumerate(free) if node in later), len(free))
        if reached:
            guarded.add_control(free[reached - 1])
        beside = [node for node in asking if guards.get(node) == guards[guarded] and node not in frames]
        for before, node in pairwise(beside):
            node.add_control(before)


# Colocate: a variable, its readers and its writers share a device, per instance; slots are with their update.
#
# w @ CPU:1, m @ CPU:1 ──► ResourceApplyMomentum(w, m) @ CPU:1        right
# w @ CPU:1, m @ CPU:0 ──► ResourceApplyMomentum(w, m)                TensorFlow could place it nowhere
#
# A lookup table exists once, on the host, and so do all lookups in it.
#
# Colocation is checked once all nodes have devices: TensorFlow would report it only in the first step, in other terms.


REPORT = "report this, with the graph; strategy AllReduce puts no variable elsewhere"


def require_beside(graph: Graph, handles: Iterable[str], layout: ReplicaLayout) -> None:
    """Refuse a placement that no session could run.

    Args:
        graph: the folded graph; nodes that run once have devices.
        handles: the names of the nodes that give the variables' handles.
        layout: of the instances of all other nodes.

    Raises:
        VerifyError: a node is on another device than a variable that it reads or writes.
    """
    of_each, known = [canonical(device) for device in layout.cells[0]], functools.cache(canonical)

    def places(node: Node) -> list[str]:
        if node.span == ONCE:
            return [known(node.device)]
        shared = layout.shared(node)
        return of_each if shared is None else [known(shared)]

    for name in handles:
        handle = graph.nodes.get(name)
        home = places(handle) if handle is not None else []
        for node, _ in handle_uses(handle) if handle is not None else ():
            mine = places(node)
            if not _meet(mine, home):
                problem = f"'{node.name}' runs on {mine[0]}, but '{name}', which it reads or writes, is on {home[0]}"
                raise VerifyError(problem, node=node, hint=REPORT)


def follow(rewrite: Rewrite) -> None:
    """Put each Enter that brings a handle into a loop of micro-batches on the device of the variable."""
    for node in rewrite.graph:
        if node.op not in ENTERS or node.inputs[0].dtype != dtypes.RESOURCE or rewrite.home_of(node) is not None:
            continue
        if (home := rewrite.home_of(node.inputs[0].node)) is not None:
            rewrite.settle(node, home)


def stay_at_tables(rewrite: Rewrite, home: str) -> None:
    """Put lookups of all replicas, and the nodes that pass them a table, on the device of the table."""
    for node in rewrite.graph:
        if not has(node.op, "table_lookups"):
            continue
        while node.span != ONCE and rewrite.home_of(node) is None:
            rewrite.settle(node, home)
            if not node.inputs:
                break
            node = node.inputs[0].node


def read_beside(rewrite: Rewrite) -> None:
    """Put every replica's lookups in a variable that exists once on its device: rows are sent, not the variable."""
    for node in rewrite.graph:
        if node.span != ONCE and node.op in READS and rewrite.home_of(node) is None:
            handle = handle_node(node.inputs[0])
            if handle.span == ONCE and node.inputs[0].node.span == ONCE:
                rewrite.settle(node, handle.device)


def _meet(mine: list[str], home: list[str]) -> bool:
    """Return whether each instance has its variable on the same device."""
    if len(home) == 1 or len(mine) == 1:  # one variable for all, or one reader of the first replica's
        return all(place == home[0] for place in mine)
    return mine == home
