"""The first value that differs: the original node all of whose operands are right, and whose own value is not.

    x ok ─► h ok ─► dw ok ─► [all-reduce] ─► update of w      w differs behind the step, dw does not: it is dw -> update

From what `verify` finds wrong, one goes back along values that differ; a value that cannot be looked at (in a loop, or
replaced by a pass) is passed through. What a variable's read gives depends on the updates before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autograph_rewrite.ir import variable_ops
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ops.traits import READS
from autograph_rewrite.runtime.bisect.side_steps import SideBySide, WrongStep
from autograph_rewrite.runtime.bisect.values import has_value, tensor_name


class FirstDivergence:
    """Finds where two graphs begin to differ in one step.

    Args:
        pair: both graphs.
        step: in which they differ.
    """

    def __init__(self, pair: SideBySide, step: WrongStep) -> None:
        self._step, self._rtol = step, pair.allowed.rtol
        self._graph, self._item = pair.flat.graph, pair.flat
        self._order = {node: at for at, node in enumerate(topological_order(self._graph))}
        self._updates = variable_ops.updates(self._order)

    def nodes(self) -> list[Node]:
        """Return the original nodes at which differences begin, in the order in which a step runs them."""
        firsts: dict[Node, None] = {}
        seen: set[Node] = set()
        pending = list(dict.fromkeys(self._wrong()))
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            wrong = self._wrong_before(node)
            pending += wrong
            if not wrong:
                firsts[node] = None
        return sorted(firsts, key=lambda node: self._order[node])

    def _wrong(self) -> Iterator[Node]:
        """Yield what makes the outputs and variables that are wrong: of a variable, its last update."""
        for name in self._step.outputs:
            yield self._graph.value(self._item.outputs[name].tensor).node
        for name in self._step.variables:
            handle = self._graph.nodes.get(self._item.variables[name].handle)
            found = self._updates.get(handle, []) if handle is not None else []
            step = [node for node in found if self._is_in_step(node)] or found
            yield from step[-1:]

    def _is_in_step(self, node: Node) -> bool:
        return node in ancestors(self._graph.nodes[name] for name in self._item.targets if name in self._graph.nodes)

    def _wrong_before(self, node: Node) -> list[Node]:
        """Return the nodes nearest before a node whose values differ."""
        found: dict[Node, None] = {}
        seen, pending = {node}, [node]
        while pending:
            for producer, differs in self._read_by(pending.pop()):
                if differs:
                    found[producer] = None
                elif differs is None and producer not in seen:
                    seen.add(producer)
                    pending.append(producer)
        return [one for one in found if one is not node]

    def _read_by(self, node: Node) -> Iterator[tuple[Node, bool | None]]:
        """Yield what a node's value is made of, with whether that differs; None: it was not looked at."""
        for value in node.inputs:
            if has_value(value):
                yield value.node, self._step.differs(tensor_name(value), self._rtol)
            elif node.op not in READS and not variable_ops.is_update(node):
                yield value.node, None
        if node.op in READS or variable_ops.is_update(node):
            handles = [variable_ops.handle_node(value) for value in node.inputs[:1]]
            yield from ((update, None) for update in self._before(node, handles))

    def _before(self, node: Node, handles: Iterable[Node]) -> list[Node]:
        """Return the updates of variables that come before a node."""
        earlier = ancestors([node])
        return [u for handle in handles for u in self._updates.get(handle, ()) if u in earlier and u is not node]
