"""Run a pipeline as two loops: in each iteration all stages work, on consecutive micro-batches.

    iteration      0   1   2   3   4   5                  forward loop of 3 stages and 4 micro-batches
    stage 0       F0  F1  F2  F3   -   -
    stage 1        -  F0  F1  F2  F3   -                  h of F0@0 is in the slot that F0@1 reads one iteration later
    stage 2        -   -  F0  F1  F2  F3

    after         slot = 0;  loop t < M+S-1:  per stage, if m = turn[t] is one:  h = body(slot, batch[m]);  slot = h
                  and the same backward, from the last stage to the first, by what the forward loop has kept

A stage runs nothing in an iteration that has no micro-batch for it: no value is masked, no state repaired. Its values
reach the next stage through slots that the loop carries, and the backward loop through a list. With `circular_repeat`
each device has several stages, at most one of which runs in an iteration. The folded graph must be complete, and have
its stages (`resolve.stages.assignment`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import MICRO, REPLICA, STAGE, Mesh, prefix
from autograph_rewrite.passes.base.eliminate_dead_code import eliminate_dead_code
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.passes.micro_batches.loop import (
    Cluster,
    LoopBodies,
    order_of_bodies,
    require_closed,
    roll_micro_batches,
)
from autograph_rewrite.passes.micro_batches.while_frame import Loop
from autograph_rewrite.passes.pipeline_parallel.schedule import complete_stages
from autograph_rewrite.plan.parts.messages import Pipeline
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD, turns
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.stages.assignment import Stages

SCOPES = {FORWARD: "autograph_pipeline/forward", BACKWARD: "autograph_pipeline/backward"}


def roll_stages(graph: Graph, stages: Stages, plan: Plan, slices: Mapping[Value, Value], roots: Iterable[Node]) -> None:
    """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

    Args:
        graph: the folded graph, complete.
        stages: which nodes are backward.
        slices: by block, the value that it was cut out of.
        roots: nodes that callers need.

    Raises:
        PassError: something cannot be done in a loop; the message says what.
        PlanError: the schedule of the plan is not that of the loop.
    """
    kept, mesh = list(roots), Mesh.of(plan.replicas_each, plan.microbatches)
    order, unconditional = order_of_bodies(graph, slices, kept)
    complete_stages(graph, stages)
    assert plan.pipeline is not None
    devices = _devices(plan, plan.pipeline)
    table = turns(mesh.size(MICRO), devices, plan.pipeline.stages // devices)
    prefixes = [prefix(r) for r in range(mesh.size(REPLICA))]
    loops = {kind: Loop(graph, prefixes, len(table[0]), scope, axis=STAGE) for kind, scope in SCOPES.items()}
    bodies = LoopBodies(graph, loops, {FORWARD: table, BACKWARD: table[::-1]})

    def cluster_of(node: Node) -> Cluster:
        return Cluster(BACKWARD if node in stages.backward else FORWARD, node.at(STAGE))

    bodies.fill(order, unconditional, cluster_of, mesh)
    eliminate_dead_code(graph, kept)
    require_closed(graph)


def _devices(plan: Plan, pipeline: Pipeline) -> int:
    """Return the number of devices of one replica; refuse a schedule that the loop does not have."""
    devices = len(pipeline.devices) // plan.replicas
    wanted = "gpipe" if devices == pipeline.stages else "circular"
    if pipeline.schedule != wanted:
        raise PlanError(
            f"the loop of {pipeline.stages} stages on {devices} devices has the schedule {wanted}, "
            f"and the plan says {pipeline.schedule}",
            hint=f"set pipeline.schedule to {wanted}, or micro.loop to false",
        )
    return devices


def _roll(rewrite: Rewrite) -> None:
    """Make the micro-batches the iterations of a loop (`form: loop`)."""
    graph, plan, slices = rewrite.graph, rewrite.plan, rewrite.slices
    rewrite.is_rolled = True
    if rewrite.has(Stages):
        roll_stages(graph, rewrite.get(Stages), plan, slices, rewrite.roots)
    else:
        roll_micro_batches(graph, Mesh.of(plan.replicas_each, plan.microbatches), slices, rewrite.roots)


ROLL_LOOP = Pass("roll-loop", _roll, lambda rewrite: rewrite.plan.looped, (Homes,))
