"""Run a pipeline as two loops: in each iteration all stages work, on consecutive micro-batches.

    iteration      0   1   2   3   4   5                  forward loop of 3 stages and 4 micro-batches
    stage 0       F0  F1  F2  F3   -   -
    stage 1        -  F0  F1  F2  F3   -                  h of F0@0 is in the slot that F0@1 reads one iteration later
    stage 2        -   -  F0  F1  F2  F3

    after         slot = 0;  loop t < M+S-1:  per stage, if m = turn[t] is one:  h = body(slot, batch[m]);  slot = h
                  and the same backward, from the last stage to the first, by what the forward loop has kept

Nothing of a stage runs in an iteration that has no micro-batch for it: nothing has to be masked, no state repaired.
What a stage makes is handed on through slots that the loop carries, or kept in a list for the backward loop. Each
device has several stages where they go round (`circular_repeat`); one of them at most runs in an iteration. Relies on
the folded graph being complete, and on its stages (`resolve.stages.assignment`).
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
from autograph_rewrite.passes.pipeline_parallel.placement import complete_stages
from autograph_rewrite.plan.parts.messages import Pipeline
from autograph_rewrite.plan.parts.pipeline_schedule import BACKWARD, FORWARD, turns
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve.stages.assignment import Stages

SCOPES = {FORWARD: "autograph_pipeline/forward", BACKWARD: "autograph_pipeline/backward"}


def roll_stages(graph: Graph, stages: Stages, plan: Plan, slices: Mapping[Value, Value], roots: Iterable[Node]) -> None:
    """Turn the instances of EACH nodes into iterations; afterwards each has one instance per replica.

    Args:
        graph: the folded graph, complete.
        stages: what is known of its EACH nodes besides theirs.
        plan: says how many replicas, micro-batches and devices there are.
        slices: by block, what it was cut out of.
        roots: what the outside needs.

    Raises:
        PassError: something cannot be done in a loop; the message says what.
        PlanError: the plan has a schedule that a loop has not.
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
    """Return how many devices the stages of one replica have in turn."""
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
