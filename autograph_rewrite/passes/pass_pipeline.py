"""All passes, in order, and the two ways through them: to a plan, and to a distributed graph.

    eliminate-dead-code ► shard-variables ► propagate ► decompose ► place-reductions ► rematerialize ► resolve-plan
      ► insert-reshards ► pad-empty-blocks ► merge-instances ► order-accesses ► assign-devices ► update-rows ► expand

Everything up to `expand` works on the folded graph, whose size does not depend on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import PassError, PlanError
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.verify.dead_values import check_arrivals, on_other_replicas
from autograph_rewrite.passes.alternatives import add_alternatives
from autograph_rewrite.passes.base.pass_manager import Observer, Pass, run_passes
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.conversion_passes import CONVERSION
from autograph_rewrite.passes.emission_passes import EXPAND, PLACE, ROWS, finished
from autograph_rewrite.passes.preconditions import require_no_servers
from autograph_rewrite.passes.propagation_passes import ANALYSIS, PLANNING, PROPAGATION
from autograph_rewrite.passes.user_passes import with_user_passes
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.replica_devices import run_devices
from autograph_rewrite.training_graph import TrainingGraph

PIPELINE: tuple[Pass, ...] = (*PROPAGATION, *CONVERSION, PLACE, ROWS, EXPAND)


def rewrite(
    request: Request, *, verify: bool = False, observers: Sequence[Observer] = (), in_place: bool = False
) -> TrainingGraph:
    """Distribute a normalised item over the replicas of a plan.

    Args:
        request: the item, which is not changed, and the plan; its edges, if it has any, must be those of this graph.
        verify: check the folded graph after each pass that has edited it.
        observers: called after each pass.
        in_place: the caller owns the item's graph and has no more use for it.

    Raises:
        GraphError: no batch input, or nothing to distribute.
        PlanError: the plan was resolved on another graph.
        PassError: an edge cannot be lowered; with `strict`, an op without a rule.
    """
    with no_garbage_collection():
        item, original = request.item, request.item.graph
        kept = original.clone() if in_place and request.plan.microbatches > 1 else original
        graph = original if in_place else original.clone()
        if request.certificate is not None:
            request.certificate.begin(graph, item.targets)
        try:
            return _rewrite(request, graph, verify=verify, observers=observers)
        except (PassError, PlanError) as error:

            def attempt(other: Plan) -> None:
                graph = kept.clone()
                _rewrite(Request(replace(item, source=graph), other, request.task, request.training), graph)

            add_alternatives(error, request.plan, attempt)
            raise


def _rewrite(
    request: Request, graph: Graph, *, verify: bool = False, observers: Sequence[Observer] = ()
) -> TrainingGraph:
    state = Rewrite.of(request, graph)
    require_no_servers(state.job)
    run_passes(state, with_user_passes(PIPELINE[:-1], state.plan), verify=verify, observers=observers)
    if verify and len(set(run_devices(state.plan))) > 1:
        check_arrivals(graph, {node.name for node in state.get(Propagation).order}, on_other_replicas)
    run_passes(state, PIPELINE[-1:])
    return finished(state)


def resolve(item: TrainingGraph, plan: Plan, batch: int | None = None) -> Plan:
    """Return the plan with the edges that follow from it on this graph, and its coverage; nothing is edited.

    Args:
        item: flat graph.
        plan: the request.
        batch: as for `rewrite`.

    Raises:
        GraphError: the graph has no batch input.
    """
    with no_garbage_collection():
        state = Rewrite.of(Request(item, replace(plan, edges=()), batch=batch), item.graph.clone())
        run_passes(state, with_user_passes(PLANNING, state.plan))
        return replace(state.plan, devices=plan.devices, mode=plan.mode, mesh=plan.mesh, variables=plan.variables)


def analyse(graph: Graph, item: TrainingGraph, plan: Plan, batch: int | None = None) -> tuple[Propagation, list[Value]]:
    """Propagate placements through `graph`, decomposing what mixes examples; return them with the declared outputs.

    Args:
        graph: which is edited; the outputs of the item are its anchors.
        item: the item.
        plan: the request.
        batch: examples of all replicas together, where the graph does not say.
    """
    state = Rewrite(Request(item, plan, batch=batch), graph, plan, item, plan)
    run_passes(state, with_user_passes(ANALYSIS, plan))
    return state.get(Propagation), state.outputs
