"""Refuse unsupported combinations, and graphs with nothing to distribute."""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation, notes
from autograph_rewrite.errors import GraphError, PassError, PlanError
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.ir.types.device_names import process_of
from autograph_rewrite.ir.variable_ops import is_update
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


def require_no_servers(plan: Plan) -> None:
    """Refuse micro-batches, stages and model axes in several processes if variables live on servers.

    Raises:
        PlanError: the plan combines them.
    """
    several = plan.microbatches > 1 and len(plan.processes) > 1
    driven = plan.is_driven or (plan.pipeline is not None and not _lives_here(plan))
    if plan.server_homes and (several or driven):
        name, home = next(iter(plan.server_homes.items()))
        what = "micro-batches in several processes"
        if driven:
            parts = "stages" if plan.pipeline is not None else "model axes"
            what = (
                f"{parts} in several processes (one session drives all {parts}, each worker's own reaches the servers)"
            )
        raise PlanError(
            f"'{name}' lives on {home}, which does not go together with {what} yet",
            hint="use the strategy AllReduce or PartitionedAR, or leave microbatches, pipeline or mesh out",
        )


def _lives_here(plan: Plan) -> bool:
    """Return whether the process that trains holds all variables."""
    return {process_of(home) for home in plan.server_homes.values()} <= set(plan.processes)


def require_training(graph: Graph, item: TrainingGraph, state: Propagation) -> None:
    """Refuse a graph that updates no variable, or none with a value that depends on the batch."""
    step = ancestors(graph.nodes[name] for name in item.targets if name in graph.nodes)
    updates = [node for node in step if is_update(node)]
    if not item.targets:
        raise GraphError(
            "this function updates no variable when it is called, so there is nothing to distribute",
            hint="let it take gradients and apply them (optimizer.apply_gradients, or variable.assign_sub)",
        )
    if not updates:
        raise GraphError(
            "the train op updates no variable, so there is nothing to distribute",
            hint="pass the op that applies the gradients as train_op",
        )
    if ancestors(updates).isdisjoint(value.node for value in state.whole_inputs):
        names = ", ".join(f"'{value.name}'" for value in state.whole_inputs)
        raise GraphError(
            f"no variable update depends on the batch ({names}), so there is nothing to distribute",
            hint="name the inputs that carry examples in batch_inputs",
        )


def _check(rewrite: Rewrite) -> None:
    """Refuse ops without a rule under `strict`, and graphs with nothing to distribute."""
    state = rewrite.get(Propagation)
    found = notes(state)
    if rewrite.plan.semantics.strict and found:
        node, text = found[0]
        many = f"{len(found)} ops have no rule, the first is " if len(found) > 1 else "an op has no rule: "
        raise PassError(
            f"{many}{node.op} '{node.name}': {text}",
            hint="set semantics.strict to false to run them whole, which is correct but slower",
        )
    if rewrite.request.training:
        require_training(rewrite.graph, rewrite.item, state)


CHECK_TRAINING = Pass("check-training", _check, needs=(Propagation,))
