"""The normal form that analysis and passes work on: one flat graph, resource variables, folded shape constants.

    clone ─► flatten (calls, branches, loops) ─► draws in turn ─► XLA's annotations as identities
          ─► each identity alone ─► barriers of recompute_grad as edges ─► resource variables
          ─► one handle each ─► its copies as segments ─► folded ─► sizes of diagonals left open

Names of outputs, targets and variables resolve in it as they did before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autograph_rewrite.diagnostics.stages import stage
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.load.signature.inputs import default_axis, describe, is_drawn
from autograph_rewrite.load.signature.variables import merge_handles
from autograph_rewrite.load.sources.original import require_original
from autograph_rewrite.normalize.constant_folding import fold
from autograph_rewrite.normalize.functions.inline import flatten
from autograph_rewrite.normalize.open_diagonals import leave_open
from autograph_rewrite.normalize.recompute_barriers import wait_by_control_edges
from autograph_rewrite.normalize.recompute_copies import merge_copies
from autograph_rewrite.normalize.reference_variables.convert import convert
from autograph_rewrite.normalize.sequential_loops import run_in_turn
from autograph_rewrite.normalize.split_identities import separate_identities
from autograph_rewrite.normalize.xla_annotations import forward_annotated, require_automatic
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

PASS = "normalise"


def normalise(item: TrainingGraph, *, in_place: bool = False) -> TrainingGraph:
    """Return the item in normal form.

    Args:
        item: any item.
        in_place: use up the item's own graph instead of a copy of it.

    Raises:
        GraphError: a missing or recursive function, or a legacy op that has no resource form.
    """
    stage("normalise (%s nodes)", f"{len(item.graph):,}")
    graph = item.graph if in_place else item.graph.clone()
    graph.current_pass = PASS
    read_outside = {info.tensor.partition(":")[0] for info in item.outputs.values()}
    fetched = read_outside if item.targets or read_outside else graph.nodes
    has_batch = any(info.batch_axis is not None for info in item.inputs.values())
    flatten(graph, roots(item, graph), fetched, loops_over_data=not has_batch)
    run_in_turn(graph)
    forward_annotated(graph)
    named = {*item.targets, *read_outside, *(info.tensor.partition(":")[0] for info in item.inputs.values())}
    separate_identities(graph, named if item.targets or read_outside else graph.nodes)
    declared = [*item.targets, *read_outside]
    barriers = wait_by_control_edges(graph)
    converted = convert(graph, read_outside, declared)
    merge_handles(graph)
    merge_copies(graph, barriers)
    fold(graph, [graph.value(info.tensor) for info in item.inputs.values() if info.batch_axis is not None])
    leave_open(graph)
    graph.current_pass = ""
    variables = {
        name: replace(
            variable,
            handle=converted.handles.get(variable.handle, variable.handle),
            aliases=converted.aliases.get(variable.handle, variable.aliases),
            initializer=converted.updates.get(variable.initializer or "", variable.initializer),
        )
        for name, variable in item.variables.items()
    }
    inputs = {**item.inputs, **_revealed(item, graph)}
    return replace(item, source=graph, variables=variables, inputs=inputs, notes=(*item.notes, *converted.notes))


def normalise_original(item: TrainingGraph) -> TrainingGraph:
    """Return an item in normal form that a rewrite can start from.

    Raises:
        GraphError: as `normalise`, or this is no item, or the graph is distributed already, or partitioned by hand.
    """
    _require_item(item)
    flat = normalise(item)
    require_original(flat, PASS)
    require_automatic(flat.graph)
    return flat


def _require_item(item: object) -> None:
    if not isinstance(item, TrainingGraph):
        hint = "GraphItem.from_graph, from_function and from_keras make one; ar.distribute takes models and functions"
        raise GraphError(f"expected a GraphItem, not {type(item).__name__}", hint=hint)


def roots(item: TrainingGraph, graph: Graph) -> Iterable[Node]:
    """Return the nodes that a step of the item is run for; every node, when nothing is declared."""
    names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    return [graph.node(name) for name in dict.fromkeys(names)] if names else list(graph)


def _revealed(item: TrainingGraph, graph: Graph) -> dict[str, TensorInfo]:
    """Return the outputs of iterators that stood in function bodies; batches, unless the item has some already."""
    has_batch = any(info.batch_axis is not None for info in item.inputs.values())
    known = {info.tensor for info in item.inputs.values()}
    found = {}
    for node in graph:
        for value in node.outputs if is_drawn(node) else ():
            info = describe(value.name, value)
            if info.tensor not in known:
                found[info.name] = info if has_batch else replace(info, batch_axis=default_axis(info))
    return found
