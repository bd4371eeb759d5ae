"""Batch inputs: which values are split, along which axis, and whether the batch size is static."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.batch_groups import BatchGroups
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.plan.parts.batch_split import limits
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph


def batch_values(graph: Graph, item: TrainingGraph, plan: Plan) -> tuple[dict[Value, int], int | None]:
    """Return the batch inputs with their axes, and the batch size where it is static.

    Args:
        graph: where the inputs are read.
        item: its signature.
        plan: names the batch inputs and their axes.

    Raises:
        GraphError: there is no batch input, its rank is unknown, static sizes differ, or are less than the replicas.
    """
    axes = {given.name: given.axis for given in plan.batch_inputs}
    values: dict[Value, int] = {}
    sizes: dict[str, int] = {}
    for name, info in item.inputs.items():
        axis = axes.get(name)
        if axis is None:
            continue
        if info.tensor.partition(":")[0] not in graph.nodes:
            continue  # no output or target needs it
        axis = _checked_axis(info, axis)
        values[graph.value(info.tensor)] = axis
        size = info.shape[axis] if info.shape is not None else None
        if size is not None:
            sizes[name] = size
    if not values:
        known = ", ".join(item.inputs) or "none"
        raise GraphError(
            f"no input of the graph is a batch, so there is nothing to split (inputs: {known})",
            hint=_where_examples_are(item),
        )
    _require_outside_of_loops(graph, values, plan)
    if len(set(sizes.values())) > 1:
        values, sizes = _of_the_largest(values, sizes, item, plan)
    static = next(iter(sizes.values()), None)
    if static is not None:
        _require_enough(static, plan)
    return values, static


_LOOP_OUTSIDE = "let the loop stand outside, as in `for batch in dataset: step(batch)`, and distribute the step"


def _require_outside_of_loops(graph: Graph, values: Mapping[Value, int], plan: Plan) -> None:
    """Refuse a batch that is drawn in a loop of a job: the processes tell each other its size once per step.

    Raises:
        GraphError: naming what draws it.
    """
    if len(plan.processes) == 1:
        return
    frames = frames_of(topological_order(graph))
    for value in values:
        if frames.get(value.node):
            raise GraphError(
                f"'{value.name}' is drawn from a dataset or an iterator in a loop inside of the function, which "
                f"{len(plan.processes)} processes cannot do together",
                node=value.node,
                hint=_LOOP_OUTSIDE,
            )


def _where_examples_are(item: TrainingGraph) -> str:
    """Return what to do where no input is a batch."""
    infos = item.inputs.values()
    if infos and all(dtypes.NUMBERS[info.dtype] in (dtypes.VARIANT, dtypes.RESOURCE) for info in infos):
        return f"the function draws its examples itself, and their shape is not known: {_LOOP_OUTSIDE}"
    return "name the inputs that carry examples: batch_inputs={'x': 0}"


def _of_the_largest(
    values: Mapping[Value, int], sizes: Mapping[str, int], item: TrainingGraph, plan: Plan
) -> tuple[dict[Value, int], dict[str, int]]:
    """Return the batch inputs that are cut where static sizes differ: those of the size that most elements have.

    The shapes that a graph states hold for one size, so every replica has all of the others.

    Raises:
        GraphError: there are several processes, each of which is given a part of every batch.
    """
    listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    if len(plan.processes) > 1 or len(sizes) < len(values):
        raise GraphError(
            f"the batch inputs have different sizes ({listed})",
            hint="leave them open (None), or give None as the axis of the inputs that all replicas share: "
            "batch_inputs={'name': None}",
        )
    elements: Counter[int] = Counter()
    for name, size in sizes.items():
        elements[size] += math.prod(dim or 1 for dim in item.inputs[name].shape or ())
    (chosen, _), *_ = elements.most_common()
    kept = {name: size for name, size in sizes.items() if size == chosen}
    tensors = {item.inputs[name].tensor.removesuffix(":0") for name in kept}
    return {value: axis for value, axis in values.items() if value.name in tensors}, kept


def shared_by_size(item: TrainingGraph, plan: Plan, state: Propagation) -> list[TensorInfo]:
    """Return the batch inputs that every replica has all of, because their static size is another one.

    Args:
        item: the signature.
        plan: names the batch inputs.
        state: a propagation, which knows what is split.
    """
    asked, cut = {given.name for given in plan.batch_inputs}, {value.name for value in state.whole_inputs}
    infos = [info for name, info in item.inputs.items() if name in asked]
    present = [info for info in infos if info.tensor.partition(":")[0] in state.graph.nodes]
    return [info for info in present if info.tensor.removesuffix(":0") not in cut]


def _require_enough(batch: int, plan: Plan) -> None:
    """Refuse a batch of static size that cannot be cut as asked.

    Raises:
        GraphError: there are blocks without an example, or of different sizes where they must be equal.
    """
    replicas, micro = plan.replicas, plan.microbatches
    if batch < plan.instances:
        parts = f"{replicas} replicas" if micro == 1 else f"{replicas} x {micro} micro-batches"
        use = f"{batch} devices" if micro == 1 else f"{max(1, batch // replicas)} micro-batches"
        raise GraphError(
            f"the batch has {batch} examples, fewer than the {parts}",
            hint=f"use at most {use}, or leave the batch dimension of the inputs open (None)",
        )
    if plan.micro is not None and not plan.micro.uneven and batch % plan.instances:
        raise GraphError(
            f"the batch of {batch} examples cannot be divided among {replicas} x {micro} micro-batches",
            hint="choose another number of them, or set accumulation.uneven to allow",
        )


def _checked_axis(info: TensorInfo, axis: int) -> int:
    if info.shape is None:
        raise GraphError(
            f"the batch input '{info.name}' has an unknown rank, so its examples cannot be counted",
            hint="give the placeholder a shape such as [None, 28, 28]",
        )
    if not -len(info.shape) <= axis < len(info.shape):
        raise GraphError(f"the batch input '{info.name}' has {len(info.shape)} dimensions, so no axis {axis}")
    return axis % len(info.shape)


def measured_input(state: Propagation) -> Value:
    """Return the batch input whose size stands for all: the one that most of the graph depends on."""
    inputs = list(state.whole_inputs)
    if len(inputs) == 1:
        return inputs[0]
    masks = Counter(state.behind.values())
    reach = [sum(count for mask, count in masks.items() if mask >> i & 1) for i in range(len(inputs))]
    return inputs[reach.index(max(reach))]


def inputs_behind(state: Propagation) -> dict[Node, tuple[Value, ...]]:
    """Return the batch inputs that each node depends on."""
    inputs = list(state.whole_inputs)
    sets = {mask: tuple(v for i, v in enumerate(inputs) if mask >> i & 1) for mask in set(state.behind.values())}
    return {node: sets[mask] for node, mask in state.behind.items()}


def named_groups(
    found: BatchGroups | None, item: TrainingGraph, state: Propagation, shared: Sequence[TensorInfo]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the batch inputs in groups of one size; none where all of them are.

    Args:
        found: inputs in groups of equal sizes; None: all are in one.
        item: the signature.
        shared: inputs that are not split, a group each.
    """
    names = {info.tensor.removesuffix(":0"): name for name, info in item.inputs.items()}
    groups = found.groups if found is not None else (tuple(state.whole_inputs),)
    named = [tuple(names[value.name] for value in group) for group in groups]
    named += [(info.name,) for info in shared]
    return tuple(named) if len(named) > 1 else ()


def own_inputs(item: TrainingGraph, plan: Plan, state: Propagation, task: int) -> dict[str, TensorInfo]:
    """Return the inputs as this process is fed them: where one states the size of its batch, all that are cut have it.

    Args:
        item: the signature.
        plan: its processes.
        state: a propagation, which knows the batch size.
        task: number of this process.
    """
    batch = state.semantics.extent.units
    if batch is None:
        return dict(item.inputs)
    ends = limits(batch, len(plan.processes), 1)
    own = ends[task + 1] - ends[task]
    axes = {value.name: axis for value, axis in state.whole_inputs.items()}
    inputs = {}
    for name, info in item.inputs.items():
        axis, shape = axes.get(info.tensor.removesuffix(":0")), info.shape
        if axis is not None and shape is not None:
            info = replace(info, shape=(*shape[:axis], own, *shape[axis + 1 :]))
        inputs[name] = info
    return inputs
