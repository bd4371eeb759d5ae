"""Who reads each variable, and for what: its own update, or something else.

    table ──► ResourceGather ──► loss        sparse: only looked up, so its gradient consists of rows
    table ──► MatMul ──────────► loss        dense
    moment ──► Mul ──► AssignVariableOp      serves an update only, as the state of an optimizer does

Read off the graph alone. What costs a walk over all of it is found when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.shapes.functions import constant
from autograph_rewrite.ir.shapes.recorded import Shape
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import Variable


def declared_trained(variables: Mapping[str, Variable]) -> set[str]:
    """Return the names of the variables that are said to be trained; none where nobody says anything."""
    return {name for name, variable in variables.items() if variable.trainable}


def reads_of(handle: Node) -> tuple[Use, ...]:
    """Return what reads a variable's contents, by its handle or as the value that was read; no update is a read."""
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
        graph: the graph.
        variables: of the item, by name.
        outputs: nodes that the outside reads.
        updates: the nodes of the step, or of all of the graph, that write a variable.
    """

    graph: Graph
    variables: Mapping[str, Variable]
    outputs: Collection[Node]
    updates: Collection[Node]

    def is_trained(self, variable: Variable, reads: Iterable[Use]) -> bool:
        """Return whether a step updates a variable by a gradient.

        Where nothing says what is trained, it is what a step updates and an output depends on.
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
        """By shape, the bits of what may be an optimizer's state."""
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
        outputs: nodes that the outside reads.
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
