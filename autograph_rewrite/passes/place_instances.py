"""Say how expansion runs the instances: on which devices, and which of them follow each other."""

from __future__ import annotations

from autograph_rewrite.passes.beside import follow, require_beside, stay_at_tables
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.cross_stages import tell_ready
from autograph_rewrite.passes.expand import Instances
from autograph_rewrite.passes.order_micro import NO_ORDER, order_micro
from autograph_rewrite.passes.order_stages import order_stages
from autograph_rewrite.passes.place import HOST, place, run_devices
from autograph_rewrite.passes.place_stages import complete_stages, place_stages
from autograph_rewrite.passes.stages import Stages
from autograph_rewrite.plan.devices import parse, process_of


def place_instances(context: Context, stages: Stages | None) -> Instances:
    """Place what runs once, and return how the rest is run.

    Args:
        context: the rewrite; its graph is complete.
        stages: of the original nodes, None where the plan has no stages.

    Raises:
        VerifyError: a variable would be on another device than what reads or writes it.
    """
    graph, plan, elsewhere = context.graph, context.plan, context.served.devices
    micro = 1 if plan.looped else plan.microbatches
    devices = run_devices(plan, context.task)
    stay_at_tables(graph, elsewhere, _host(devices[0]))
    if stages is None or plan.pipeline is None:
        order = order_micro(graph, micro)
        if plan.looped:
            follow(graph, elsewhere)
        place(graph, devices, elsewhere)
        instances = tuple(device for device in devices for _ in range(micro))
        require_beside(graph, context.variables, instances, elsewhere)
        return Instances((instances,), micro, order, elsewhere=elsewhere)
    each = len(devices) // plan.replicas
    replicas = [devices[first : first + each] for first in range(0, len(devices), each)]
    order = NO_ORDER
    if not plan.looped:
        complete_stages(graph, stages)
        order = order_stages(graph, stages, plan.pipeline.schedule, replicas, micro)
    driver = plan.stage_hosts[0] + HOST if plan.stage_hosts else ""
    place_stages(graph, stages, devices[:each], captured=context.captures, driver=driver)
    tell_ready(graph, stages, order.roots, replicas)
    by_stage = (tuple(own[s % each] for own in replicas for _ in range(micro)) for s in range(stages.count))
    return Instances(tuple(by_stage), micro, order, stages.of, elsewhere)


def _host(device: str) -> str:
    """Return where a process keeps what runs once, if that cannot run on an accelerator."""
    return device if parse(device).kind == "CPU" else process_of(device) + HOST
