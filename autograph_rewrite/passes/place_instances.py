"""Say how expansion runs the instances: on which devices, and which of them follow each other."""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.passes.cross_stages import tell_ready
from autograph_rewrite.passes.expand import Instances
from autograph_rewrite.passes.order_micro import NO_ORDER, order_micro
from autograph_rewrite.passes.order_stages import order_stages
from autograph_rewrite.passes.place import HOST, place, run_devices
from autograph_rewrite.passes.place_stages import complete_stages, place_stages
from autograph_rewrite.passes.stages import Stages
from autograph_rewrite.plan.plan import Plan


def place_instances(
    graph: Graph, plan: Plan, task: int, stages: Stages | None, elsewhere: Mapping[Node, str], *, captured: bool
) -> Instances:
    """Place what runs once, and return how the rest is run.

    Args:
        graph: the folded graph, complete.
        plan: the resolved plan.
        task: which of its processes the graph is for.
        stages: of the original nodes, None where the plan has no stages.
        elsewhere: the devices of nodes that are not where their replica is.
        captured: variables live outside of the graph.
    """
    micro = 1 if plan.looped else plan.microbatches
    devices = run_devices(plan, task)
    if stages is None or plan.pipeline is None:
        order = order_micro(graph, micro)
        place(graph, devices, elsewhere)
        return Instances(
            (tuple(device for device in devices for _ in range(micro)),), micro, order, elsewhere=elsewhere
        )
    each = len(devices) // plan.replicas
    replicas = [devices[first : first + each] for first in range(0, len(devices), each)]
    order = NO_ORDER
    if not plan.looped:
        complete_stages(graph, stages)
        order = order_stages(graph, stages, plan.pipeline.schedule, replicas, micro)
    driver = plan.stage_hosts[0] + HOST if plan.stage_hosts else ""
    place_stages(graph, stages, devices[:each], captured=captured, driver=driver)
    tell_ready(graph, stages, order.roots, replicas)
    by_stage = (tuple(own[s % each] for own in replicas for _ in range(micro)) for s in range(stages.count))
    return Instances(tuple(by_stage), micro, order, stages.of)
