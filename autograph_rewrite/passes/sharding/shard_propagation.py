"""Propagate on the shard axis: find the values of an update that are sharded like the variable that they update.

    w, m: read in shards    dw: whole, cut where it arises
    m' = b m + dw           split      cloned for each shard
    n  = sum(m' * m')       partial    added up over the shards
    w - rate / n * m'       split      rate and n are common to all shards

The rules are those of the batch; here a block is a shard, and its size is known. Nodes before the gradient (the forward
and the backward pass) read whole values and stay as they are, and so do nodes that no rule can cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.transfer import NodeTransfer
from autograph_rewrite.analysis.transfer import transferred as answer_of
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import dependencies, reachable
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import dense_inputs, handle_node, is_handle
from autograph_rewrite.ops.facts.placement import LOCAL, Extent, Fact, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import local_symbol, unit
from autograph_rewrite.ops.rules.base import LocalEntry, Reshard, Semantics, Slice
from autograph_rewrite.ops.rules.marked import is_whole
from autograph_rewrite.ops.rules.table import families, family_of
from autograph_rewrite.ops.rules.variables import ALL_HAVE_A_VALUE
from autograph_rewrite.ops.traits import has

ELEMENTWISE = families("elementwise")
FAMILIES = families("elementwise", "layout", "reduce")
"""The families of rules whose ops are worth cutting in an update."""
_MEANS = frozenset((dtypes.FLOAT, dtypes.DOUBLE))


class ShardedVariable(NamedTuple):
    """A variable that is cut.

    Attributes:
        shape: of the whole.
        axis: along which it is cut.
        rows: number of rows per unit of a shard.
    """

    shape: tuple[int, ...]
    axis: int
    rows: int = 1

    @property
    def block(self) -> Shape:
        """The shape of one shard, counted in units."""
        size = local_symbol()._replace(coef=self.rows)
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


@dataclass
class ShardPlacements:
    """The placements that follow from one set of variables that are cut into shards of the same sizes.

    Attributes:
        state: of the whole graph, where nothing is cut.
        extent: the size of the axis that is cut.
        members: the variables, by the node that gives the handle.
        facts: of values that are cut, or sums over the shards, as readers in the update see them.
        transfers: of the nodes that run for each shard.
        gradients: whole values that are cut for their readers, with the axis.
        means: nodes that must be rewritten as sums first, with the number of elements of each mean.
    """

    state: Propagation
    extent: int
    members: Mapping[Node, ShardedVariable]
    facts: dict[Value, Fact] = field(default_factory=dict)
    transfers: dict[Node, NodeTransfer] = field(default_factory=dict)
    gradients: dict[Value, int] = field(default_factory=dict)
    means: dict[Node, int] = field(default_factory=dict)

    def fact(self, value: Value) -> Fact:
        """Return the fact of a value as readers in the update see it."""
        return self.facts.get(value) or self.state.facts[value]

    def member(self, node: Node) -> ShardedVariable | None:
        """Return the member that a node reads or writes, if any."""
        return self.members.get(handle_node(node.inputs[0])) if node.inputs and is_handle(node.inputs[0]) else None

    @property
    def propagation(self) -> Propagation:
        """The placements of the whole graph."""
        state = self.state
        wholes = {value: state.facts[value] for value in self.gradients}
        return replace(
            state,
            facts={**state.facts, **self.facts},
            raw=wholes,
            transfers={**state.transfers, **self.transfers},
            whole_inputs=self.gradients,
        )


def place(state: Propagation, members: Mapping[Node, ShardedVariable], step: set[Node]) -> ShardPlacements:
    """Find the values that can be cut with the variables.

    Args:
        state: placements of the graph in which nothing is cut.
        members: the variables, cut into shards of the same sizes.
        step: the nodes that one step runs.
    """
    first = next(iter(members.values()))
    shares = ShardPlacements(state, first.shape[first.axis], members)
    for node in state.order:
        if node in step and has(node.op, "writes") and (member := shares.member(node)) is not None:
            for value in gradients_of(state, node, member.shape):
                shares.gradients.setdefault(value, member.axis)
    before = reachable((value.node for value in shares.gradients), dependencies)
    writes = (node for node in state.order if node in step and has(node.op, "writes"))
    behind = reachable(writes, dependencies)
    for node in state.order:
        if node.op == "ReadVariableOp" and (member := shares.member(node)) is not None:
            shares.facts[node.output()] = _cut(node.output(), member)
        elif node.op == "VarIsInitializedOp" and shares.member(node) is not None:
            shares.facts[node.output()] = state.facts[node.output()]._replace(placement=ALL_HAVE_A_VALUE)
        elif node in behind and node not in before and is_of_updates(node):
            _visit(shares, node)
        for value in node.read_outputs:
            if value in shares.gradients:
                shares.facts[value] = _cut(value, ShardedVariable(_shape(state, value), shares.gradients[value]))
    return shares


def _cut(value: Value, member: ShardedVariable) -> Fact:
    return Fact(split(member.axis), value.dtype, member.block)


def _shape(state: Propagation, value: Value) -> tuple[int, ...]:
    return tuple(dim for dim in state.facts[value].shape or () if isinstance(dim, int))


def gradients_of(state: Propagation, update: Node, shape: tuple[int, ...]) -> list[Value]:
    """Return the values of the variable's shape from which an update is computed element by element.

    They are found from the update backwards; values that are read from variables are not included.

    Args:
        update: an op that updates the variable.
        shape: static, of the variable.
    """
    found: dict[Value, None] = {}
    pending = [update.inputs[i] for i in dense_inputs(update)]
    seen = set(pending)
    while pending:
        value = pending.pop()
        node = value.node
        if has(node.op, "weights") or state.facts[value].shape != shape:
            continue
        if family_of(node.op) not in ELEMENTWISE:
            found[value] = None
            continue
        new = [other for other in node.inputs if other not in seen]
        seen.update(new)
        pending += new
    return list(found)


def is_of_updates(node: Node) -> bool:
    """Return whether an op is worth cutting in an update."""
    return family_of(node.op) in FAMILIES and not is_whole(node)


def _visit(shares: ShardPlacements, node: Node) -> None:
    """Keep the transfer of a node if it runs for each shard."""
    inputs = tuple([shares.fact(value) for value in node.inputs])
    if not any(fact.placement.differs for fact in inputs) or any(is_handle(value) for value in node.inputs):
        return
    transferred = answer_of(node, inputs, {}, Semantics(extent=Extent(units=shares.extent)))
    if not _is_usable(shares, node, transferred):
        return
    if transferred.decompose:
        shares.means[node] = elements_per_mean(shares.state, node)
    shares.transfers[node] = transferred
    for index, fact in enumerate(transferred.outputs):
        if fact.placement.differs:
            shares.facts[node.output(index)] = fact


def _is_usable(shares: ShardPlacements, node: Node, transferred: NodeTransfer) -> bool:
    """Return whether a node differs between shards, and can be cloned for them."""
    placements = [fact.placement for fact in transferred.outputs]
    if not any(placement.differs for placement in placements) or LOCAL in placements:
        return False
    if any(fact.placement.is_split and unit(fact.split_size) is None for fact in transferred.outputs):
        return False
    if transferred.decompose:
        return node.op == "Mean" and node.output_dtypes[0] in _MEANS and elements_per_mean(shares.state, node) > 0
    return all(_can_give(shares.fact(node.inputs[i]), reshard) for i, reshard in transferred.operand_reshards.items())


def _can_give(fact: Fact, reshard: Reshard) -> bool:
    if isinstance(reshard, LocalEntry):  # a constant takes its place
        return all(isinstance(entry, int) for entry in fact.value or (None,))
    return isinstance(reshard, Slice) or not reshard.is_split


def elements_per_mean(state: Propagation, node: Node) -> int:
    """Return the number of elements of the whole value over which each mean is taken; 0 if unknown."""
    read, made = state.facts[node.inputs[0]].shape, state.facts[node.output()].shape
    if read is None or made is None or not all(isinstance(dim, int) for dim in (*read, *made)):
        return 0
    total, results = (math.prod(dim for dim in shape if isinstance(dim, int)) for shape in (read, made))
    return total // results if results else 0
