"""The role of a variable in a training step: trained, sparse (its gradient has indexed rows), used in a branch only.

Read off the graph alone, before any plan: strategy builders decide by it where a variable lives.

    table ──► ResourceGather ──► loss        sparse: only looked up, so its gradient consists of rows
    table ──► MatMul ──────────► loss        dense
    moment ──► Mul ──► AssignVariableOp      state of an optimizer: nothing but updates read it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autograph_rewrite.analysis.variables.uses import updates_behind
from autograph_rewrite.ir.graph import Graph, Node, Use, Value
from autograph_rewrite.ir.op_traits import forwards_handle, forwards_value
from autograph_rewrite.ir.shapes.functions import constant
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.item import GraphItem, Variable

CAPTURES = frozenset(
    ("Enter", "RefEnter", "Switch", "RefSwitch", "Merge", "RefMerge", "If", "StatelessIf", "Case", "StatelessCase")
) | {"While", "StatelessWhile"}
"""Control flow that a handle runs into."""
GATHERS = frozenset(("Gather", "GatherV2"))
MEASURES = frozenset(("Shape", "ShapeN", "Size", "Rank", "VariableShape", "VarIsInitializedOp"))
"""They ask how large a variable is, not what it holds."""


@dataclass(frozen=True)
class Role:
    """What one variable is.

    Attributes:
        trained: a step updates it by a gradient.
        sparse: it is only looked up by row, so that its gradient consists of rows.
        captured: a branch or a loop uses it.
    """

    trained: bool
    sparse: bool = False
    captured: bool = False


def roles(item: GraphItem) -> dict[str, Role]:
    """Return the role of every variable of an item.

    Where nothing says what is trained, it is what a step updates and an output depends on.
    """
    graph = item.graph
    forward = ancestors(_output_nodes(item), controls=False)
    updated = {handle_node(node.inputs[0]).name for node in graph if node.inputs and is_update(node)}
    knows = any(variable.trainable for variable in item.variables.values())
    serves = _Serves(item)
    found = {}
    for name, variable in item.variables.items():
        readers = [(n, i) for n, i in _readers(graph, variable) if not is_update(n) and n.op not in MEASURES]
        if knows:
            trained = bool(variable.trainable)
        else:
            inexact = dtypes.NUMBERS.get(variable.dtype) in dtypes.INEXACT
            used = any(not forward or node in forward for node, _ in readers)
            trained = variable.trainable is None and inexact and used
        uses = [(node, index) for node, index in readers if serves.others(node, variable)]
        found[name] = Role(
            trained=trained and (not updated or variable.handle in updated),
            sparse=bool(uses) and all(_looks_up(node, index) for node, index in uses),
            captured=any(node.op in CAPTURES for node, _ in _uses(graph, variable)),
        )
    return found


class _Serves:
    """Which updates and outputs are computed from each node."""

    def __init__(self, item: GraphItem) -> None:
        self._variables = item.variables
        self._bits = {variable.handle: 1 << i for i, variable in enumerate(item.variables.values())}
        other = 1 << len(self._bits)
        self._found = updates_behind(topological_order(item.graph), self._bits, other, _output_nodes(item))

    def others(self, node: Node, variable: Variable) -> bool:
        """Return whether a node serves more than the update of a variable and of what may be its optimizer's state."""
        alike = (v for v in self._variables.values() if v.shape == variable.shape and not v.trainable)
        own = self._bits[variable.handle]
        for state in alike:
            own |= self._bits[state.handle]
        return bool(self._found.get(node, 0) & ~own)


def _output_nodes(item: GraphItem) -> list[Node]:
    names = (info.tensor.partition(":")[0] for info in item.outputs.values())
    return [item.graph.nodes[name] for name in names if name in item.graph.nodes]


def _uses(graph: Graph, variable: Variable) -> Iterable[Use]:
    handle = graph.nodes.get(variable.handle)
    return handle_uses(handle) if handle is not None else ()


def _readers(graph: Graph, variable: Variable) -> Iterator[tuple[Node, int]]:
    """Yield what reads a variable by its handle, or the value that was read, and at which input."""
    for node, index in _uses(graph, variable):
        if node.op == "ReadVariableOp":
            yield from _readers_of(node.read_outputs)
        elif not forwards_handle(node.op):
            yield node, index


def _readers_of(values: Iterable[Value]) -> Iterator[tuple[Node, int]]:
    pending = list(values)
    while pending:
        for use in pending.pop().uses:
            if forwards_value(use.node.op):
                pending += use.node.read_outputs
            else:
                yield use.node, use.index


def _looks_up(node: Node, index: int) -> bool:
    """Return whether a reader takes rows of a variable: a gather along its first axis."""
    if node.op == "ResourceGather":
        return index == 0
    if node.op not in GATHERS or index != 0:
        return False
    if node.op == "Gather":
        return True
    axis = constant(node.inputs[2])
    return axis is not None and not int(axis)
