"""Order the stages of a pipeline: on each device, forwards and backwards follow each other as the schedule says.

    schedule   device 0: F0 F1 B0 F2 B1 B2
    edges      gate of F1@0 ─^─► what B0@0 begins with ─► ... gate of B0@0 ─^─► what F2@0 begins with

A cluster is the forward or backward part of one stage. Its gate waits for all its nodes; its first nodes wait for the
gate of the task before it on its device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from autograph_rewrite.analysis.barriers import barrier_depths, needed_of_all, parameter_free_nodes, predecessors
from autograph_rewrite.errors import PassError, PlanError
from autograph_rewrite.ir.control_flow import Frame, shared_frames_of, unconditional_nodes
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import EACH, ONCE, REPLICA, STAGE, Mesh
from autograph_rewrite.ir.traversal import grouped, topological_order
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.instance_order import NO_ORDER, InstanceOrder
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.micro_batches.sequencing import gates_of, in_order, let_actors_wait, relax_waits, runs_of
from autograph_rewrite.passes.pipeline_parallel.early_sends import Devices, send_first
from autograph_rewrite.plan.parts.messages import Pipeline
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD, Orders, Task, orders
from autograph_rewrite.resolve.stages.assignment import Stages, stages_of_once

Cluster = tuple[str, int]


def order_stages(rewrite: Rewrite, stages: Stages, mesh: Mesh, micro: int) -> InstanceOrder:
    """Give a stage to nodes of a pipeline that have none yet; return in which order instances run.

    Args:
        stages: which nodes are backward, and the owners of variables.
        mesh: of this process, with its devices.
        micro: number of micro-batches that no loop runs.
    """
    graph, plan, order = rewrite.graph, rewrite.plan, NO_ORDER
    assert plan.pipeline is not None
    if not plan.looped:
        complete_stages(graph, stages)
        each = len(plan.pipeline.devices) // plan.replicas
        firsts = [own[:each] for own in stage_devices(mesh)]
        order = schedule_stages(graph, stages, plan.pipeline, firsts, micro)
    nodes = topological_order(graph)
    given = {node: stage for node in nodes if (stage := stage_of(node)) is not None}
    for node, stage in stages_of_once(nodes, given, stages.owners, captured=rewrite.captures).items():
        if STAGE not in node.place:  # collectives within a stage stay there
            node.put(STAGE, stage)
    return order


def stage_devices(mesh: Mesh) -> list[list[str]]:
    """Return, of each replica, the first device of each of its stages."""
    stages, replicas = range(mesh.size(STAGE)), range(mesh.size(REPLICA))
    return [[mesh.device({REPLICA: replica, STAGE: stage}) for stage in stages] for replica in replicas]


def schedule_stages(graph: Graph, stages: Stages, pipeline: Pipeline, devices: Devices, micro: int) -> InstanceOrder:
    """Add the gates to a complete folded graph; return which nodes wait for them.

    Args:
        stages: which nodes are backward.
        pipeline: of the plan.
        devices: of each replica's stages.
        micro: number of micro-batches.

    Raises:
        PassError: all micro-batches meet in the middle of the step.
        PlanError: the schedule would wait for itself.
    """
    if micro == 1:
        return NO_ORDER
    relax_waits(graph)
    order = let_actors_wait(graph, count_first=True)
    shared, unconditional, early = shared_frames_of(order), unconditional_nodes(order), parameter_free_nodes(order)
    _refuse_meetings(order, shared, early)
    runs = (node for node in runs_of(order) if node not in early)
    clusters = grouped(((BACKWARD if node in stages.backward else FORWARD, node.at(STAGE)), node) for node in runs)
    each = len(devices[0])
    schedule = "1f1b" if pipeline.schedule == "one_f_one_b" else pipeline.schedule
    given = orders(schedule, each, micro, pipeline.stages // each)
    given = tuple(tuple(task for task in tasks if (task.kind, task.stage) in clusters) for tasks in given)
    _require_no_cycle(clusters, given, micro)
    for nodes in clusters.values():
        added = send_first(graph, order, nodes, stages, devices, unconditional)
        nodes += added
        unconditional |= set(added)
    gates = gates_of(graph, clusters, unconditional)
    for (_, stage), made in gates.items():
        made.gate.put(STAGE, stage)
        made.passed.put(STAGE, stage)
    tasks = [[((task.kind, task.stage), task.micro) for task in each_device] for each_device in given]
    return in_order(order, clusters, gates, tasks, micro)


def _refuse_meetings(order: list[Node], shared: Mapping[Node, Frame], early: Collection[Node]) -> None:
    """Refuse nodes at which all micro-batches wait for each other between the batch and the gradients.

    Raises:
        PassError: there is such a node.
    """
    levels = barrier_depths(order, early)
    for node in order:
        if node in early or stage_of(node) is None:
            continue
        if node in shared:
            raise PassError(
                f"'{node.name}' is in a loop, which all micro-batches run together; a pipeline cannot wait for that",
                node=node,
                hint="unroll the loop",
            )
        if levels[node]:
            problem = f"'{node.name}' {needed_of_all(node, levels)}, for which no stage of a pipeline can wait"
            raise PassError(problem, node=node)


def _require_no_cycle(clusters: Mapping[Cluster, list[Node]], given: Orders, micro: int) -> None:
    """Refuse an order in which devices would wait for each other for ever.

    Raises:
        PlanError: with the cycle.
    """
    import networkx as nx  # its import takes as long as a small rewrite, which needs it nowhere else

    of = {node: cluster for cluster, nodes in clusters.items() for node in nodes}
    reads = {(of[producer], of[node]) for node in of for producer in predecessors(node) if producer in of}
    waiting: nx.DiGraph[Task] = nx.DiGraph()
    for (first_kind, first), (kind, stage) in sorted(reads):
        if (first_kind, first) != (kind, stage):
            waiting.add_edges_from((Task(first_kind, m, first), Task(kind, m, stage)) for m in range(micro))
    for tasks in given:
        waiting.add_edges_from(itertools.pairwise(tasks))
    try:
        cycle = nx.find_cycle(waiting)
    except nx.NetworkXNoCycle:
        return
    shown = " -> ".join(str(task) for task in [cycle[0][0], *(then for _, then in cycle)])
    raise PlanError(f"the schedule waits for itself: {shown}", hint="stages must follow each other; see boundaries")


# Give nodes that passes have added a stage: that of their producers, or else of their readers.


def stage_of(node: Node) -> int | None:
    """Return the stage of a node that runs for each block; None if it has no stage yet, or runs once."""
    return node.at(STAGE) if node.span == EACH and STAGE in node.place else None


def complete_stages(graph: Graph, stages: Stages) -> None:
    """Give a stage to the EACH nodes that passes have added since stages were assigned."""
    order = topological_order(graph)
    new = [node for node in order if node.span == EACH and STAGE not in node.place]
    for node in new:
        known = {producer: stage for producer in predecessors(node) if (stage := stage_of(producer)) is not None}
        late = [stage for producer, stage in known.items() if producer in stages.backward]
        if late:
            stages.backward.add(node)
            node.put(STAGE, min(late))
        elif known and not _begins(node):
            node.put(STAGE, max(known.values()))
    for node in reversed(new):
        users = [use.node for value in node.read_outputs for use in value.uses]
        readers = {user: stage for user in users if (stage := stage_of(user)) is not None}
        if STAGE not in node.place and readers:
            node.put(STAGE, min(readers.values()))
            if stages.backward.issuperset(readers):
                stages.backward.add(node)
    for node in new:
        if STAGE not in node.place:
            node.put(STAGE, 0)


def _begins(node: Node) -> bool:
    """Return whether a node reads no value of a stage; it gets the stage of its readers."""
    return all(value.node.span == ONCE or has(value.node.op, "constant") for value in node.inputs)
