"""What a value is for each replica alone, as if its block were the whole batch: copies of what mixes examples.

    before   m = Mean(x)   v = Mean((x - m)^2)        x: split(0); m and v of the whole batch
    after    m' = Mean(x)  v' = Mean((x - m')^2)      of the block: own

What comes in front of the values that are mixed (convolutions, products: all that is no elementwise op) stays that of
the exact step. A variable with components is read as the replica's own.
"""

from __future__ import annotations

from collections.abc import Callable

from autograph_rewrite.analysis.propagate import Propagation, is_pinned
from autograph_rewrite.analysis.rule_table import TABLE, families
from autograph_rewrite.analysis.rules.base import OF_BLOCK, OF_ONE, OWN
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.opdefs import is_pure
from autograph_rewrite.ir.types.replica_marks import VARYING
from autograph_rewrite.ops.traits import has

_ELEMENTWISE = families("elementwise", "ensure_shape")
Component = Callable[[Node], Value | None]
"""Returns what a replica has of a variable, in the place of what a node reads of it; None: all have the same."""


class ReplicaContext:
    """Makes such copies, each once.

    Args:
        state: placements of the graph, which is edited; the means not yet taken apart.
        component: what is read of variables with components.
        reads: the nodes that read such variables.
    """

    def __init__(self, state: Propagation, component: Component, reads: set[Node]) -> None:
        self._state, self._component, self._reads = state, component, reads
        sources = {value.node for value in state.whole_inputs} | reads
        sources |= {node for node in state.order if VARYING in node.attrs}
        self._moving = descendants(sources, controls=False) | sources
        self._copied: dict[Node, bool] = {}
        self._copies: dict[Node, Node] = {}

    def of(self, value: Value) -> Value:
        """Return a value as a replica has it alone; what all have alike, as it is.

        Raises:
            GraphError: it is made in a branch or a loop, or of what only one run can make.
        """
        for node in self._in_order(value.node):
            self._copied[node] = self._is_copied(node)
            if self._copied[node]:
                self._copy(node)
        return self._replaced(value)

    def _in_order(self, start: Node) -> list[Node]:
        """Return the nodes that decide, producers first."""
        order: list[Node] = []
        seen: set[Node] = set()
        stack = [(start, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen and node not in self._copied:
                seen.add(node)
                stack.append((node, True))
                stack += [(value.node, False) for value in node.inputs if self._looks_behind(node)]
        return order

    def _looks_behind(self, node: Node) -> bool:
        return node in self._moving and not self._ends(node)

    def _ends(self, node: Node) -> bool:
        """Return whether a replica takes what a node makes as it is."""
        if node in self._reads or VARYING in node.attrs or (self._is_split(node) and not _is_elementwise(node)):
            return True
        facts = [self._state.facts[node.output(i)] for i in range(len(self._state.transfers[node].outputs))]
        return not facts or any(fact.is_local for fact in facts) or node in {v.node for v in self._state.whole_inputs}

    def _is_split(self, node: Node) -> bool:
        return any(fact.placement.is_split for fact in self._state.transfers[node].outputs)

    def _is_copied(self, node: Node) -> bool:
        if node not in self._moving or self._ends(node):
            return False
        mixes = not self._is_split(node) and any(self._state.facts[v].placement.differs for v in node.inputs)
        if not (mixes or any(self._is_replaced(value) for value in node.inputs)):
            return False
        rule_pins = is_pinned(node) or not is_pure(node.op)
        if has(node.op, "routes") or rule_pins or any(_is_handle(v) for v in (*node.inputs, *node.outputs)):
            raise GraphError(
                f"'{node.name}' ({node.op}) runs once for all replicas, and a policy asks for the value of each",
                node=node,
                hint="compute what the variable is updated with outside of branches and loops, or leave it out",
            )
        return True

    def _is_replaced(self, value: Value) -> bool:
        return self._copied.get(value.node, False) or (
            value.node in self._reads and self._component(value.node) is not None
        )

    def _replaced(self, value: Value) -> Value:
        if value.node in self._reads:
            return self._component(value.node) or value
        copy = self._copies.get(value.node)
        return value if copy is None else copy.output(value.index)

    def _copy(self, node: Node) -> None:
        copy = copy_node(
            self._state.graph, node, [self._replaced(v) for v in node.inputs], name=f"{node.name}/of_replica"
        )
        copy.set_raw_attr(OF_BLOCK, encode("string", OWN if self._is_split(node) else OF_ONE))
        self._copies[node] = copy


def _is_elementwise(node: Node) -> bool:
    rule = TABLE.get(node.op)
    return has(node.op, "forwards") or (rule is not None and rule.family in _ELEMENTWISE)


def _is_handle(value: Value) -> bool:
    return dtypes.base(value.dtype) in (dtypes.RESOURCE, dtypes.VARIANT)
