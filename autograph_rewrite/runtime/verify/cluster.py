"""`ar.verify` for several processes: their graphs are verified together, and their numerics in this process.

    plan of 2 processes ──► graphs of rank 0, rank 1 ──► check_ranks            nothing is run
                        └─► the same replicas in one process ──► comparison     as for any other plan

What only the processes' own exchange could get wrong in the numbers is not seen: train on the cluster for that.
"""

from __future__ import annotations

from dataclasses import replace

from autograph_rewrite.compile import compile_task
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.verify.collective_groups import collect
from autograph_rewrite.ir.verify.expanded import check_expanded
from autograph_rewrite.ir.verify.ranks import check_ranks
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


def fit_together(item: TrainingGraph, plan: Plan) -> str:
    """Rewrite an item for every process, and check that the graphs fit together; say so in a sentence.

    Args:
        item: a normalised item; it is not changed.
        plan: of several processes.

    Raises:
        VerifyError: they do not; names every broken invariant, with its rank.
    """
    count = len(plan.processes)
    graphs = []
    for task in range(count):
        graph = serde.from_bytes(compile_task(item, plan, task).graph_bytes)
        if task == 0 or not plan.homes:  # others leave the updates of servers to worker 0
            check_expanded(graph, item, plan.all_devices, count)
        graphs.append(graph)
    check_ranks(graphs, item, plan.homes.values())
    meeting, _ = collect(node for graph in graphs for node in graph)
    members = sum(len(group.members) for group in meeting)
    return (
        f"the graphs of {count} processes fit together ({len(meeting)} collectives with {members} members); "
        f"numbers were compared for their {plan.replicas} replicas in one process"
    )


def in_one_process(plan: Plan) -> Plan:
    """Return the request of a plan for as many replicas in this process; the plan itself if it is for one."""
    if plan.is_driven:
        return _with_parts(plan, tuple(f"/device:CPU:{i}" for i, _ in enumerate(plan.part_devices)))
    if len(plan.processes) <= 1:
        return plan
    if plan.model is not None:
        return _with_parts(plan, tuple(f"/device:CPU:{i}" for i, _ in enumerate(plan.part_devices)))
    devices = tuple(f"/device:CPU:{replica}" for replica in range(plan.replicas))
    known = {device: here for device, here in zip(plan.devices, devices, strict=True)}
    for request in plan.variables:
        for server in request.servers:
            known.setdefault(server, devices[len(known) % len(devices)])
    variables = tuple(
        replace(
            request,
            servers=tuple(known[server] for server in request.servers),
            server=replace(request.server, sync=True, staleness=0) if request.server is not None else None,
        )
        for request in plan.variables
    )
    return replace(plan, devices=devices, variables=variables, edges=(), graph_digest="")


def _with_parts(plan: Plan, devices: tuple[str, ...]) -> Plan:
    """Return the request with the stages and logical devices of its replicas elsewhere."""
    model, pipeline = plan.model, plan.pipeline
    each = model.size if model is not None else 1
    if model is not None:
        model = replace(model, devices=devices)
    if pipeline is not None:
        pipeline = replace(pipeline, devices=devices[::each])
    first = devices[:: len(devices) // plan.replicas]
    return replace(plan, devices=first, pipeline=pipeline, model=model, edges=(), graph_digest="")
