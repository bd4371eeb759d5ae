"""Find the batch inputs: which values are split, along which axis, and whether the batch size is static."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autograph_rewrite.analysis.batch_groups import BatchGroups
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import descendants, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Fact, Shape
from autograph_rewrite.ops.facts.symbolic_dims import COMMON, EXAMPLES_OF_ALL, Dim, is_local, rows_per_example
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Slice
from autograph_rewrite.ops.traits import READS, SWITCHES, has
from autograph_rewrite.plan.parts.batch_split import limits
from autograph_rewrite.plan.parts.messages import OUTPUT, EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph


def batch_values(graph: Graph, item: TrainingGraph, plan: Plan) -> tuple[dict[Value, int], int | None]:
    """Return the batch inputs with their axes, and the batch size where it is static.

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


def batch_facts(graph: Graph, item: TrainingGraph, plan: Plan) -> dict[Value, Fact]:
    """Return facts of the batch inputs with an open batch size: all batch inputs have the same number of examples."""
    values, static = batch_values(graph, item, plan)
    infos = {info.tensor.removesuffix(":0"): info for info in item.inputs.values()}
    facts = {}
    for value, axis in values.items():
        shape = infos[value.name].shape if value.name in infos else None
        if shape is not None and shape[axis] is None:
            size = EXAMPLES_OF_ALL if static is None else static
            facts[value] = Fact(REPLICATED, value.dtype, (*shape[:axis], size, *shape[axis + 1 :]))
    return facts


def _require_outside_of_loops(graph: Graph, values: Mapping[Value, int], plan: Plan) -> None:
    """Refuse a batch that is drawn in a loop of a job: the processes tell each other its size once per step.

    Raises:
        GraphError: naming the node that draws it.
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
    """Return a hint for a graph in which no input is a batch."""
    infos = item.inputs.values()
    if infos and all(dtypes.NUMBERS[info.dtype] in (dtypes.VARIANT, dtypes.RESOURCE) for info in infos):
        return f"the function draws its examples itself, and their shape is not known: {_LOOP_OUTSIDE}"
    return "name the inputs that carry examples: batch_inputs={'x': 0}"


def _of_the_largest(
    values: Mapping[Value, int], sizes: Mapping[str, int], item: TrainingGraph, plan: Plan
) -> tuple[dict[Value, int], dict[str, int]]:
    """Return the batch inputs that are cut where static sizes differ: those of the size that most elements have.

    The static shapes of a graph hold for one size, so every replica reads the other inputs whole.

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
    """Return the batch inputs that every replica reads whole, because their static size differs."""
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
    """Return the names of the batch inputs in groups of one size; empty where all are in one group.

    Args:
        found: inputs in groups of equal sizes; None: all are in one.
        shared: inputs that are not split, a group each.
    """
    names = {info.tensor.removesuffix(":0"): name for name, info in item.inputs.items()}
    groups = found.groups if found is not None else (tuple(state.whole_inputs),)
    named = [tuple(names[value.name] for value in group) for group in groups]
    named += [(info.name,) for info in shared]
    return tuple(named) if len(named) > 1 else ()


def own_inputs(item: TrainingGraph, plan: Plan, state: Propagation, task: int) -> dict[str, TensorInfo]:
    """Return the inputs as this process is fed them: if the batch is static, with the size of its part.

    Args:
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


# Ragged dimensions: lengths, as of sequences, that may differ between the processes of a job without a wrong number.
#
#     worker 0   x [2, 3, 4]    every worker computes on its examples in their true length, nobody on padding:
#     worker 1   x [6, 5, 4]    mean over [b, T] = all_reduce(sum) / all_reduce(b*T) = sum / (2*3 + 6*5)
#
# An open dimension T of a batch input is ragged if no process needs another's T: no exchanged value has T among its
# dimensions (except for the rows of a gather, which may be uneven, and outputs, which are padded), and no value that
# must be equal everywhere (a variable, an output, the choice of a branch) depends on T itself. A walk from the input
# over replicated values finds the values that depend on T; blocks and contributions may have any length.
#
# The alternative, to pad all inputs to the longest, computes on padding, and is right only where masks remove it again
# (TPUStrategy's dynamic padding). TensorFlow's ragged tensors have the same meaning: a mean counts only real elements.


_CONTAINERS = (dtypes.RESOURCE, dtypes.VARIANT)
_MAX_WALKS = 8


@dataclass(frozen=True)
class Lengths:
    """The ragged dimensions of a step.

    Attributes:
        inputs: the ragged dimensions, by the name of the input.
        padded: the dimensions that differ between processes, by the name of an output in blocks.
        notes: why other open dimensions must have one length in all processes.
    """

    inputs: Mapping[str, tuple[int, ...]]
    padded: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Obstacle:
    """Why a dimension must have one length in all processes.

    Attributes:
        node: the node that needs it.
    """

    node: Node
    why: str


def ragged_dims(
    state: Propagation, edges: Sequence[EdgePlan], outputs: Sequence[Value], inputs: Mapping[str, Value]
) -> Lengths:
    """Return which lengths may differ between processes.

    Args:
        state: the final placements.
        edges: every conversion of the step.
        outputs: values that are read whole outside of the graph.
        inputs: the batch inputs of which each process is given its part, by name.
    """
    ragged: dict[str, tuple[int, ...]] = {}
    padded: dict[str, set[int]] = {}
    notes = []
    for name, value in inputs.items():
        for dim in _open_dims(state, value):
            spread = _Spread(state, value, dim)
            found = next(spread.obstacles(edges, outputs), None)
            if found is not None:
                where = f"{found.node.op} '{found.node.name}': {found.why}"
                notes.append(f"dimension {dim} of '{name}' has to have one length in all workers, because of {where}")
                continue
            ragged[name] = (*ragged.get(name, ()), dim)
            for output in outputs:
                if state.source(output).placement.is_split and (dims := spread.ragged(output)):
                    padded.setdefault(output.name, set()).update(dims)
    return Lengths(ragged, {name: tuple(sorted(dims)) for name, dims in padded.items()}, tuple(notes))


def _open_dims(state: Propagation, value: Value) -> Iterator[int]:
    """Yield the open dimensions of a batch input, except for the one that counts examples."""
    for dim, size in enumerate(state.source(value).shape or ()):
        if dim != state.whole_inputs[value] and not isinstance(size, int):
            yield dim


@dataclass
class _Spread:
    """The values that depend on one length.

    Attributes:
        value: the input.
        dim: its dimension.
        below: the nodes after the input.
        tainted: replicated values whose contents may depend on the length, so that they differ between processes.
        totals: replicated values that are equal everywhere although they depend on the length: sums and gathers over
            it. A product of sizes, B*T, is not one of them.
    """

    state: Propagation
    value: Value
    dim: int
    below: set[Node] = field(default_factory=set)
    tainted: set[Value] = field(default_factory=set)
    totals: set[Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.below = descendants([self.value.node], controls=False) | {self.value.node}
        order = [node for node in self.state.order if node in self.below and node is not self.value.node]
        for _ in range(_MAX_WALKS if self.state.loops else 1):
            before = len(self.tainted) + len(self.totals)
            for node in order:
                self._visit(node)
            if len(self.tainted) + len(self.totals) == before:
                break

    def ragged(self, value: Value) -> tuple[int, ...] | None:
        """Return the dimensions of a value, but for its split one, whose size may depend on the length; None: any."""
        fact = self.state.source(value)
        return self._ragged(fact, value.node in self.below)

    def obstacles(self, edges: Iterable[EdgePlan], outputs: Sequence[Value]) -> Iterator[Obstacle]:
        """Yield the obstacles to a length that differs between processes."""
        exchanged = [edge for edge in edges if edge.to == repr(REPLICATED)]
        for edge in exchanged:
            value = self.state.graph.value(edge.value)
            dims = () if self.state.source(value).is_local else self.ragged(value)
            if dims != () and not (dims and self._can_be_padded(edge, value)):
                yield Obstacle(value.node, "it is exchanged, and its shape may depend on the length")
        crossing = [edge for edge in exchanged if edge.lowered.crosses or edge.is_collective]
        loops = any(self.state.graph.value(edge.value).node in self.state.looped for edge in crossing)
        for node in self.state.order:
            if node in self.below:
                yield from self._at(node, loops)
        for value in outputs:
            if value in self.tainted:
                yield Obstacle(value.node, "it is an output that depends on the length")

    def _can_be_padded(self, edge: EdgePlan, value: Value) -> bool:
        """Return whether a value is read whole only outside of the graph, so that no op reads the zeros after it."""
        fact = self.state.source(value)
        return edge.reason == OUTPUT and rows_per_example(fact.split_size) is not None

    def _visit(self, node: Node) -> None:
        """Note which results of a node depend on the length."""
        transferred = self.state.transfers[node]
        for index, fact in enumerate(transferred.outputs if not transferred.constant else ()):
            value = node.output(index)
            if value in self.tainted or fact.dtype in _CONTAINERS or not _is_whole(self.state.facts[value]):
                continue
            sizes = self.state.facts[value].value if has(node.op, "selects") else None
            if sizes is not None and not any(self._is_open(entry) for entry in sizes):
                continue
            if any(self._reads_length(node, i) for i in range(len(node.inputs))):
                self.tainted.add(value)
                self.totals.discard(value)
            elif any(self._reads_total(node, i) for i in range(len(node.inputs))):
                self.totals.add(value)

    def _input(self, node: Node, index: int) -> Fact:
        """Return the fact of an input as a node sees it, before a conversion."""
        seen = self.state.transfers[node].inputs
        return seen[index] if seen else self.state.facts[node.inputs[index]]

    def _reads_length(self, node: Node, index: int) -> bool:
        """Return whether an operand, as the node reads it, is replicated and depends on the length."""
        value, transferred = node.inputs[index], self.state.transfers[node]
        fact, reshard = self._input(node, index), transferred.operand_reshards.get(index)
        if reshard is None and value in self.totals:
            return False
        if has(node.op, "lengths"):
            return fact.shape is None or any(self._is_open(dim) for dim in fact.shape)
        if fact.is_local:  # entries that count examples are added up; the others differ between processes
            return fact.value is None or any(self._is_open(e) and not is_local(e) for e in fact.value)
        if reshard is None and value in self.tainted:
            return True
        return self._is_whole_and_ragged(value, fact)

    def _reads_total(self, node: Node, index: int) -> bool:
        """Return whether an operand, as the node reads it, has been added up, or gathered, over the length."""
        value, reshard = node.inputs[index], self.state.transfers[node].operand_reshards.get(index)
        if reshard is None and value in self.totals:
            return True
        if reshard != REPLICATED and not (reshard is None and value in self.state.reduced):
            return False
        fact = self.state.source(value)
        if fact.is_local:
            return fact.value is None or any(is_local(entry) and self._is_open(entry) for entry in fact.value)
        return value.node in self.below and fact.placement.is_split and self._is_open(fact.split_size)

    def _at(self, node: Node, exchanges_in_loops: bool) -> Iterator[Obstacle]:
        transferred = self.state.transfers[node]
        reading = [index for index in range(len(node.inputs)) if self._reads_length(node, index)]
        for index, reshard in transferred.operand_reshards.items():
            if self._is_cut(node, index, reshard):
                yield Obstacle(node, "it takes its part of a whole whose size depends on the length")
        if not reading or (has(node.op, "routes") and node.op not in SWITCHES) or has(node.op, "forwards"):
            return
        if node.op == "LoopCond" and exchanges_in_loops:
            yield Obstacle(node, "it counts the iterations of a loop in which processes exchange something")
        elif has(node.op, "chooses") and not self._is_loop(node) and 1 in reading:
            yield Obstacle(node, "it chooses a branch by the length")
        elif self._mixes(node):
            yield Obstacle(node, "it meets a length with what all workers have added up or gathered over theirs")
        elif not is_pure(node.op) and node.op not in READS and all(_is_whole(fact) for fact in transferred.outputs):
            yield Obstacle(node, "it keeps something that depends on the length")

    def _mixes(self, node: Node) -> bool:
        """Return whether a node that reads a length makes a replicated value of it and of a total over the length."""
        whole = any(_is_whole(self.state.facts[node.output(i)]) for i in range(len(self.state.transfers[node].outputs)))
        selects = has(node.op, "selects") and node.op != "Reshape"
        return whole and not selects and any(self._reads_total(node, i) for i in range(len(node.inputs)))

    def _is_cut(self, node: Node, index: int, reshard: Reshard) -> bool:
        if isinstance(reshard, LocalEntry):
            return self._is_open(reshard.size)
        if not isinstance(reshard, Slice) and reshard != PARTIAL:
            return False
        value = node.inputs[index]
        return value in self.tainted or self._is_whole_and_ragged(value, self._input(node, index))

    def _is_whole_and_ragged(self, value: Value, fact: Fact) -> bool:
        """Return whether every replica holds all of a value, and its shape depends on the length."""
        return _is_whole(fact) and value.node in self.below and self._ragged(fact, True) != ()

    @staticmethod
    def _is_loop(node: Node) -> bool:
        return node.op in SWITCHES and any(value.node.op == "LoopCond" for value in node.inputs)

    def _ragged(self, fact: Fact, below: bool) -> tuple[int, ...] | None:
        if not below:
            return ()
        shape: Shape | None = fact.shape
        if shape is None:
            return None
        at = fact.placement.dim if fact.placement.is_split else -1
        return tuple(i for i, dim in enumerate(shape) if i != at and self._is_open(dim))

    def _is_open(self, dim: Dim) -> bool:
        """Return whether a size may depend on the length: its symbol was made for a value after the input."""
        if isinstance(dim, int):
            return False
        if dim is None:
            return True
        return any(self._is_length(factor) for factor in dim.factors)

    def _is_length(self, factor: str) -> bool:
        kind, _, origin = factor.partition(":")
        if "#" in factor:
            return True
        if kind != COMMON or not origin:
            return False
        name, _, at = origin.rpartition("/")
        if name == self.value.name:
            return at == str(self.dim)
        node = self.state.graph.nodes.get(name.partition(":")[0])
        return node is None or node in self.below


def _is_whole(fact: Fact) -> bool:
    """Return whether all replicas should have the same value."""
    return not fact.placement.differs and not fact.is_local
