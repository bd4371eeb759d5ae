"""Find how a step uses each variable: reads and writes, slots of its optimizer, nodes that serve its update only.

    ResourceApplyAdam(w, m, v, ...)                       m and v are written together with w
    m := b m + dw;  w := w - rate m                       m has w's shape, and serves no variable but w
    r := mean(dw dw, 0);  w := w - rate dw / sqrt(r)      r is computed from w's gradient, and serves no variable but w
    a := c a + (1 - c) w                                  a is an average: it is computed from w only, and serves none

Nothing here depends on names or kinds of optimizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.recorded_shapes import Shape, constant
from autograph_rewrite.ir.traversal import (
    ancestors,
    dependencies,
    grouped,
    marks_before,
    topological_order,
    traced_back,
)
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import (
    dense_inputs,
    handle_node,
    handle_uses,
    is_handle,
    is_update,
    storage_key,
    updates,
    updates_rows,
    written,
)
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, SWITCHES, has
from autograph_rewrite.training_graph import TrainingGraph, Variable

_PASSES = families("elementwise", "gather_scatter", "control", "layout", "concat_split", "slicing", "segment")
"""The families of rules through which the contents of a slot reach an update, also row by row."""
MAX_REACH = 400
"""How many values to search for the slots of one update."""


@dataclass(frozen=True)
class VariableUse:
    """The use of one variable in a step.

    Attributes:
        readers: of all variables of the graph.
        slots: the variables that an optimizer keeps for it, by name.
        owner: the variable that it is a slot of, None where it is no slot.

    `reads`, `sparse` and `trained` are found when they are first asked for.
    """

    variable: Variable
    handle: Node
    updates: tuple[Node, ...]
    readers: Readers = field(repr=False, compare=False)
    slots: tuple[str, ...] = ()
    owner: str | None = None

    @cached_property
    def reads(self) -> tuple[Use, ...]:
        """The uses that read its contents, through its handle or through a value read from it."""
        return reads_of(self.handle)

    @cached_property
    def sparse(self) -> bool:
        """Whether it is only looked up by row, so that its gradient consists of rows."""
        return self.readers.is_sparse(self.variable, self.reads)

    @cached_property
    def trained(self) -> bool:
        """Whether the step updates it by a gradient; where nothing declares that, as far as the graph shows it."""
        return self.owner is None and self.readers.is_trained(self.variable, self.reads)


def variable_uses(
    state: Propagation,
    variables: Mapping[str, Variable],
    *,
    step: Collection[Node] | None = None,
    owners: Collection[str] | None = None,
    gradients: Mapping[Value, str] | None = None,
    averages: bool = False,
) -> dict[str, VariableUse]:
    """Return how a step uses each variable that its graph has.

    Args:
        step: the nodes of the step, None for all.
        owners: the variables whose slots are wanted; None: those declared as trained, or all where none are declared.
        gradients: the owners of gradients, by value, where they are known. They reveal slots of other shapes.
        averages: averages and earlier values of a variable are its slots, too.
    """
    nodes = state.order if step is None else [node for node in state.order if node in step]
    uses = plain_uses(nodes, variables, state.graph, [value.node for value in state.graph.anchors.values()])
    handles = {use.handle: name for name, use in uses.items()}
    by_handle = {use.handle: use.updates for use in uses.values()}
    trained = declared_trained(variables)
    is_known = bool(trained) or owners is not None
    wanted = (trained or variables.keys()) if owners is None else owners
    found = _slots_by_gradient(state, variables, gradients, trained, wanted) if gradients and is_known else {}
    settled = {handle for handle, name in handles.items() if name in wanted or name in trained or name in found}
    for handle, name in handles.items():
        if not is_known and (name in found or not _is_written_first(handle, by_handle)):
            continue  # it is written together with another variable, or read only for another's update
        if name in wanted or name in found:
            for slot in _slots_by_shape(state, handle, handles, variables, by_handle, settled if is_known else ()):
                found.setdefault(handles[slot], found.get(name, name))
    if averages:
        others = [handle for handle, name in handles.items() if handle not in settled and name not in found]
        found |= {
            handles[handle]: handles[owner]
            for handle in others
            if (owner := _averaged(state, handle, by_handle[handle])) is not None
            and handles.get(owner) in wanted
            and variables[handles[owner]].shape == variables[handles[handle]].shape
        }
    found = {slot: owner for slot, owner in found.items() if owner not in found}
    slots = grouped((owner, name) for name, owner in found.items())
    return {name: replace(use, slots=tuple(slots.get(name, ())), owner=found.get(name)) for name, use in uses.items()}


def _updates(nodes: Iterable[Node], handles: Collection[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that write each variable, also by another handle of the same storage."""
    same = {storage_key(handle): handle for handle in handles}
    found: dict[Node, list[Node]] = {}
    for handle, made in updates(nodes).items():
        known = same.get(storage_key(handle), handle) if has(handle.op, "variables") else handle
        found.setdefault(known, []).extend(made)
    return found


def plain_uses(
    nodes: Collection[Node], variables: Mapping[str, Variable], graph: Graph, outputs: Collection[Node] = ()
) -> dict[str, VariableUse]:
    """Return how each variable is used in a graph without a propagation: its slots are not known.

    Args:
        nodes: of the step.
    """
    handles = {graph.nodes[v.handle]: name for name, v in variables.items() if v.handle in graph.nodes}
    by_handle = _updates(nodes, handles)
    readers = Readers(graph, variables, outputs, list(chain.from_iterable(by_handle.values())))
    return {
        name: VariableUse(variables[name], handle, tuple(by_handle.get(handle, ())), readers)
        for handle, name in handles.items()
    }


def _is_written_first(handle: Node, by_handle: Mapping[Node, Sequence[Node]]) -> bool:
    made = by_handle[handle]
    return bool(made) and all(written(update)[0] is handle for update in made)


def _slots_by_shape(
    state: Propagation,
    owner: Node,
    handles: Mapping[Node, str],
    variables: Mapping[str, Variable],
    by_handle: Mapping[Node, Sequence[Node]],
    settled: Collection[Node],
) -> list[Node]:
    """Return the variables of an owner's shape that are written together with it, or that serve its update only.

    A variable that an op writes together with the owner is a slot whatever is declared: an op has all its variables on
    one device.
    """
    shape = variables[handles[owner]].shape
    group = {owner: None}
    pending = [owner]
    while pending:
        handle = pending.pop()
        for update in by_handle[handle]:
            together = [node for node in written(update) if node in handles]
            read = [node for node in _read_by(state, update) if _serves_only(node, {*group, node})]
            for node in (*together, *read):
                alike = node in handles and variables[handles[node]].shape == shape
                is_open = node not in settled or (node in together and together[0] is handle is owner)
                if node not in group and is_open and alike:
                    group[node] = None
                    pending.append(node)
    return [node for node in group if node is not owner]


def _averaged(state: Propagation, handle: Node, made: Sequence[Node]) -> Node | None:
    """Return the one variable from which another is computed that nothing else in a step needs; None if none is."""
    sources = {node for update in made for node in _read_by(state, update)} - {handle}
    return sources.pop() if len(sources) == 1 and _serves_only(handle, {handle}) else None


def _read_by(state: Propagation, update: Node) -> Iterable[Node]:
    """Return the variables from which an update is computed element by element, or row by row."""
    of_rows = [i for i, value in enumerate(update.inputs) if not is_handle(value)]
    positions = of_rows if updates_rows(update) else dense_inputs(update)
    pending = deque(update.inputs[i] for i in positions)
    seen = set(pending)
    found: dict[Node, None] = {}
    while pending and len(seen) < MAX_REACH:
        value = pending.popleft()
        node = value.node
        if node.op in ("ReadVariableOp", "ResourceGather"):
            found[handle_node(node.inputs[0])] = None
            continue
        if family_of(node.op) not in _PASSES or state.facts[value].shape == ():
            continue
        new = [other for other in node.inputs if other not in seen]
        seen.update(new)
        pending += new
    return found


def _serves_only(handle: Node, group: Collection[Node]) -> bool:
    """Return whether the contents of a variable reach no variable outside of a group."""
    pending = [handle]
    seen = {handle}
    while pending:
        node = pending.pop()
        for value in node.read_outputs:
            for reader, _ in value.uses:
                if has(reader.op, "writes") and any(other not in group for other in written(reader)):
                    return False
                if reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
    return True


def converted_uses(state: Propagation, value: Value) -> Iterator[Node]:
    """Yield the readers that read the whole of a value."""
    for node, index in value.uses:
        reshard = state.transfers[node].operand_reshards.get(index)
        if reshard == REPLICATED or (reshard is None and value in state.reduced):
            yield node


def _slots_by_gradient(
    state: Propagation,
    variables: Mapping[str, Variable],
    gradients: Iterable[Value],
    trained: Collection[str],
    wanted: Collection[str],
) -> dict[str, str]:
    """Return the variables that are computed from gradients and serve the update of one trained variable only."""
    by_handle = {variable.handle: name for name, variable in variables.items()}
    bits = {name: 1 << i for i, name in enumerate(variables)}
    grads = 1 << len(bits)
    sources = {node for value in gradients for node in converted_uses(state, value)}
    marks: dict[Node, int] = {}  # the variables that a node's values come from, and a bit for gradients
    learnt: dict[str, int] = dict.fromkeys(variables, 0)
    for node in state.order:
        mask = grads if node in sources else 0
        for value in node._inputs:
            mask |= marks.get(value.node, 0)
        if node.name in by_handle:
            mask |= bits[by_handle[node.name]]
        marks[node] = mask
        if is_update(node):
            for value in node._inputs:
                name = by_handle.get(handle_node(value).name) if value.dtype == dtypes.RESOURCE else None
                if name is not None:
                    learnt[name] |= mask
    trained = {*trained, *wanted}
    found: dict[str, str] = {}
    while True:
        new: dict[str, str] = {}
        for name in [name for name in variables if name not in trained and name not in found]:
            serves = [owner for owner in trained if learnt[owner] & bits[name]] if learnt[name] & grads else []
            if len(serves) == 1 and serves[0] in wanted:
                new[name] = serves[0]
        if not new:
            return found
        found |= new
        for name in new:  # a variable that accumulates gradients is a source of them, too
            grads |= bits[name]


def update_regions(
    order: Collection[Node],
    uses: Mapping[str, VariableUse],
    gradients: Mapping[str, Collection[Node]],
    outputs: Iterable[Node],
) -> dict[Node, str]:
    """Return the nodes that serve only one variable's update and that its gradient does not need, with the variable.

    Args:
        order: the nodes, producers first.
        gradients: the nodes that make the gradients of each variable.
    """
    bit = {name: 1 << i for i, name in enumerate(gradients)}
    other = 1 << len(bit)
    bits = {use.handle.name: bit.get(use.owner or name, other) for name, use in uses.items()}
    serves = updates_behind(order, bits, other, outputs)
    marks: dict[Node, int] = {}
    for name, made in gradients.items():
        marks |= {node: marks.get(node, 0) | bit[name] for node in made}
    before = _leading_to(order, marks)
    by_bit = {mask: name for name, mask in bit.items()}
    found = {}
    for node in order:
        owner = by_bit.get(serves[node])
        is_made = not has(node.op, "variables") and node.op != "Placeholder"
        if owner is not None and not before.get(node, 0) & serves[node] and is_made:
            found[node] = owner
    return found


def _leading_to(order: Collection[Node], marks: Mapping[Node, int]) -> dict[Node, int]:
    """Return, for each node, the marks (bit masks) of itself and of all nodes that it is needed for, joined."""
    found = dict(marks)
    again = True
    while again:
        again = False
        for node in reversed(list(order)):
            mask = found.get(node, 0)
            for value in node._inputs if mask else ():
                known = found.get(value.node, 0)
                if mask & ~known:
                    found[value.node] = known | mask
                    again = again or value.node.op in BACK_EDGES  # it is later in the order
    return found


# The role of a variable in a training step: trained, sparse (its gradient has indexed rows).
#
# Found from the graph alone, before any plan: strategy builders use it to decide where a variable lives.


@dataclass(frozen=True)
class Role:
    """The role of one variable.

    Attributes:
        trained: a step updates it by a gradient.
        use: how the graph uses it; None where it does not.
    """

    trained: bool
    use: VariableUse | None = field(default=None, repr=False, compare=False)

    @property
    def sparse(self) -> bool:
        """Whether it is only looked up by row, so that its gradient consists of rows."""
        return self.use is not None and self.use.sparse


def roles(item: TrainingGraph) -> dict[str, Role]:
    """Return the role of every variable of an item.

    Where nothing is declared as trained, a variable is if a step updates it and an output depends on it.
    """
    return dict(item.graph.remembered("roles", lambda: _roles(item), of=item))


def _roles(item: TrainingGraph) -> dict[str, Role]:
    graph = item.graph
    names = (info.tensor.partition(":")[0] for info in item.outputs.values())
    outputs = [graph.nodes[name] for name in names if name in graph.nodes]
    uses = plain_uses(list(graph), item.variables, graph, outputs)
    trains = any(is_update(node) for node in graph)
    absent = {name: Role(bool(variable.trainable) and not trains) for name, variable in item.variables.items()}
    return absent | {name: Role(use.trained, use) for name, use in uses.items()}


# Whether a variable can be sharded: a use that needs the full value is an obstacle.
#
# ReadVariableOp, ResourceGather, ResourceApplyAdam, AssignVariableOp      each shard has its own
# Enter, ReadVariableOp                                                    a loop reads it: it is read before the loop
# Enter, AssignVariableOp                                                  a loop writes its shard in each iteration
# ResourceStridedSliceAssign                                               all of it is written
# ResourceCountUpTo                                                        it works on a whole variable only


WRITE_ELEMENTS = {
    "ResourceStridedSliceAssign": "TensorStridedSliceUpdate",
    **{f"ResourceScatterNd{how}": f"TensorScatter{how}" for how in ("Update", "Add", "Sub", "Min", "Max")},
}
"""Ops that write some elements of a variable, with the op that makes the whole new value."""


class Obstacle(NamedTuple):
    """A use that needs the whole variable, and why."""

    reason: str
    node: Node


def obstacle(handle: Node, cut: Collection[Node] | None = None, *, rewritten: bool = False) -> Obstacle | None:
    """Return a use that needs the whole variable, None where it can be cut.

    Args:
        cut: the handles of all variables that are cut the same way; None where that is not known yet.
        rewritten: ignore uses that `passes.canonicalize.whole_uses` turns into uses of all of it.
    """
    loops = reads_in_loops(handle) if rewritten else ()
    settled = {node for loop in loops for node in (*loop.carriers, *loop.reads, *loop.lookups, *loop.shapes)}
    for node, index in handle_uses(handle):
        if node in settled or (rewritten and index == 0 and node.op in WRITE_ELEMENTS):
            continue
        if has(node.op, "routes") and node.op not in _CARRIERS:
            return Obstacle("a loop hands on its handle", node)
        if not (has(node.op, "forwards_handle") or _is_known(node, index, cut)):
            return Obstacle(f"{node.op} needs the whole variable", node)
    return None


def require_cuttable(name: str, handle: Node, cut: Collection[Node]) -> None:
    """Refuse a variable with a use that needs the whole of it.

    Raises:
        GraphError: an op reads or writes it that works on whole variables only.
    """
    found = obstacle(handle, cut)
    if found is not None:
        raise GraphError(f"'{name}' cannot be cut into shards: {found.reason}", node=found.node, hint="leave it whole")


class ReadInLoop(NamedTuple):
    """How a loop reads a variable.

    Attributes:
        enter: where its handle enters.
        carriers: nodes that forward the handle in the loop.
        reads: of all of it.
        lookups: of rows of it.
        shapes: nodes that ask for its shape.
    """

    enter: Node
    carriers: tuple[Node, ...]
    reads: tuple[Node, ...]
    lookups: tuple[Node, ...]
    shapes: tuple[Node, ...]


_READS_IN_LOOPS = ("ReadVariableOp", "ResourceGather", "VariableShape")
_IN_FRONT = SWITCHES | {"Identity"}
_CARRIERS = ENTERS | _IN_FRONT


def reads_in_loops(handle: Node) -> Iterator[ReadInLoop]:
    """Yield the outermost loops that read a variable and do nothing else with it."""
    for use in handle_uses(handle):
        enter = use.node
        if enter.op not in ENTERS or traced_back(enter.inputs[0], _IN_FRONT).node is not handle:
            continue
        carriers = [enter]
        found: dict[str, list[Node]] = {op: [] for op in (*_READS_IN_LOOPS, "")}
        for carrier in carriers:
            for value in carrier.read_outputs:
                for node, _ in value.uses:
                    if node.op in _CARRIERS:
                        carriers += [node] * (node not in carriers)
                    else:
                        found[node.op if node.op in _READS_IN_LOOPS else ""].append(node)
        # A lookup would need its axis as a constant of every loop that the handle enters.
        if not found[""] and not (found["ResourceGather"] and any(one.op in ENTERS for one in carriers[1:])):
            yield ReadInLoop(enter, tuple(carriers), *(tuple(found[op]) for op in _READS_IN_LOOPS))


def _is_known(node: Node, index: int, cut: Collection[Node] | None) -> bool:
    if not has(node.op, "writes"):
        is_known = has(node.op, "reads", "inspects") or node.op == "DestroyResourceOp"
        return is_known and index == 0
    handles = [handle_node(value) for value in node.inputs if is_handle(value)]
    return has(node.op, "writes_blocks") and (cut is None or all(handle in cut for handle in handles))


# The readers of each variable: its update, and others.
#
#     table ──► ResourceGather ──► loss        sparse: only looked up, so its gradient consists of rows
#     table ──► MatMul ──────────► loss        dense
#     moment ──► Mul ──► AssignVariableOp      serves an update only, as the state of an optimizer does
#
# Found from the graph alone. Walks over all of it are done when their results are first needed.


def declared_trained(variables: Mapping[str, Variable]) -> set[str]:
    """Return the names of the variables that are declared as trained; empty where nothing is declared."""
    return {name for name, variable in variables.items() if variable.trainable}


def reads_of(handle: Node) -> tuple[Use, ...]:
    """Return the uses that read a variable's contents, through its handle or a value read from it, without updates."""
    others = [use for use in _uses_of(handle) if not is_update(use.node)]
    return tuple(use for use in others if not has(use.node.op, "measures", "inspects"))


def _uses_of(handle: Node) -> Iterator[Use]:
    for use in handle_uses(handle):
        if use.node.op == "ReadVariableOp":
            yield from _uses_of_contents(use.node.read_outputs)
        elif not has(use.node.op, "forwards_handle"):
            yield use


def _uses_of_contents(values: Iterable[Value]) -> Iterator[Use]:
    pending = list(values)
    while pending:
        for use in pending.pop().uses:
            if has(use.node.op, "forwards"):
                pending += use.node.read_outputs
            else:
                yield use


def looks_up(use: Use) -> bool:
    """Return whether a read takes rows of a variable: a gather along its first axis."""
    node, index = use
    if node.op == "ResourceGather":
        return index == 0
    if not has(node.op, "gathers") or index != 0:
        return False
    if node.op == "Gather":
        return True
    axis = constant(node.inputs[2])
    return axis is not None and not int(axis)


@dataclass(frozen=True)
class Readers:
    """The readers of all variables of a graph.

    Attributes:
        updates: the nodes of the step, or of all of the graph, that write a variable.
    """

    graph: Graph
    variables: Mapping[str, Variable]
    outputs: Collection[Node]
    updates: Collection[Node]

    def is_trained(self, variable: Variable, reads: Iterable[Use]) -> bool:
        """Return whether a step updates a variable by a gradient.

        Where nothing is declared as trained, a variable is if a step updates it and an output depends on it.
        """
        if self._declared:
            trained = bool(variable.trainable)
        else:
            inexact = dtypes.NUMBERS.get(variable.dtype) in dtypes.INEXACT
            used = any(not self._forward or node in self._forward for node, _ in reads)
            trained = variable.trainable is None and inexact and used
        return trained and (not self._updated or variable.handle in self._updated)

    def is_sparse(self, variable: Variable, reads: Iterable[Use]) -> bool:
        """Return whether a variable is only looked up by row, so that its gradient consists of rows."""
        # reads for the update of the variable, or of a possible slot, do not count
        own = self._bits[variable.handle] | self._state_bits.get(variable.shape, 0)
        others = [use for use in reads if self._serves.get(use.node, 0) & ~own]
        return bool(others) and all(looks_up(use) for use in others)

    @cached_property
    def _declared(self) -> set[str]:
        return declared_trained(self.variables)

    @cached_property
    def _forward(self) -> set[Node]:
        return ancestors(self.outputs, controls=False)

    @cached_property
    def _updated(self) -> set[str]:
        return {handle_node(node.inputs[0]).name for node in self.updates if is_update(node)}

    @cached_property
    def _bits(self) -> dict[str, int]:
        return {variable.handle: 1 << i for i, variable in enumerate(self.variables.values())}

    @cached_property
    def _serves(self) -> dict[Node, int]:
        return updates_behind(topological_order(self.graph), self._bits, 1 << len(self._bits), self.outputs)

    @cached_property
    def _state_bits(self) -> dict[Shape | None, int]:
        """By shape, the bits of the variables that may be an optimizer's state."""
        found: dict[Shape | None, int] = {}
        for variable in self.variables.values():
            if not variable.trainable:
                found[variable.shape] = found.get(variable.shape, 0) | self._bits[variable.handle]
        return found


def updates_behind(
    order: Iterable[Node], bits: Mapping[str, int], other: int, outputs: Iterable[Node]
) -> dict[Node, int]:
    """Return which updates each node serves, as bits.

    Args:
        order: the nodes, producers first.
        bits: the bit of the updates of a variable, by the name of the node that gives its handle.
        other: the bit of other updates, and of outputs.
    """
    found = dict.fromkeys(outputs, other)
    for node in reversed(list(order)):
        mask = found.get(node, 0)
        if is_update(node) and node._inputs:
            mask |= bits.get(handle_node(node._inputs[0]).name, other)
        found[node] = mask
        for value in node._inputs if mask else ():
            found[value.node] = found.get(value.node, 0) | mask
    return found


# Where an access to a variable is complete: at its node, or, in a loop or a branch, at the first nodes after that.
#
#     Enter ─► Merge ─► Switch ─► body: read(w) ─► ...        read(w) is complete at each Exit that follows from it
#                         └─► Exit ─► ...
#
# A node after only one of those Exits may run while the loop still reads: the loop's counter can be iterations ahead.


def completions(
    order: Sequence[Node], unconditional: Collection[Node], accesses: Iterable[Node]
) -> dict[Node, list[Node]]:
    """Return, for each access, the unconditional nodes after all of which it has happened, if it happens at all.

    Args:
        order: the nodes, producers first.
        accesses: nodes that read or write variables.
    """
    found = {node: [node] if node in unconditional else [] for node in accesses}
    marks = {node: 1 << i for i, node in enumerate(node for node, ends in found.items() if not ends)}
    if not marks:
        return found
    before = marks_before(order, marks)
    for node in order:
        if node not in unconditional:
            continue
        mask = 0
        for producer in dependencies(node):
            if producer not in unconditional:
                mask |= before[producer] | marks.get(producer, 0)
        if mask:
            for access, mark in marks.items():
                if mask & mark:
                    found[access].append(node)
    return found
