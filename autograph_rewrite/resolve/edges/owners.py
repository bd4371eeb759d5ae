"""Owners of edges: the variable whose update an edge reaches along values of that variable's shape; else the step.

dw: partial(sum) ──► sum ──► ResourceApplyAdam(w)      belongs to w
loss: partial(sum) ──► sum ──► output                  belongs to the step
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from autograph_rewrite.analysis.facts.placement import Shape
from autograph_rewrite.analysis.facts.symbolic_dims import is_local
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.analysis.rule_table import TABLE, families
from autograph_rewrite.analysis.variables.readers import declared_trained
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, is_update
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import STEP
from autograph_rewrite.training_graph import Variable

MIXES_ROWS = families("contraction", "convolutions", "layers", "normalization", "pooling", "recurrent", "reduce")
"""Families of rules that the rows of a sparse gradient never pass: what does was gathered in the forward pass."""
MAX_REACH = 400
"""How many nodes to look at for the owner of an edge."""


class Owners:
    """Finds the variable that an edge serves."""

    def __init__(self, state: Propagation, variables: Mapping[str, Variable]) -> None:
        self._state = state
        self._by_handle = {variable.handle: variable for variable in variables.values()}
        self._trained = declared_trained(variables)

    def of(self, value: Value) -> str:
        """Return the owner of the reduction or gather of `value`."""
        fact = self._state.source(value)
        sparse = fact.placement.is_split
        if not sparse and not fact.shape:
            return STEP if fact.shape == () and not self._scalar_variables() else self._search(value, fact.shape, False)
        return self._search(value, fact.shape, sparse)

    def _scalar_variables(self) -> bool:
        return any(variable.shape == () and variable.trainable is not False for variable in self._by_handle.values())

    def _search(self, value: Value, shape: Shape | None, sparse: bool) -> str:
        reached: list[Variable] = []
        seen = {value}
        pending = deque([value])
        visited = 0
        while pending and visited < MAX_REACH:
            current = pending.popleft()
            for node, index in current._uses:
                visited += 1
                variable = self._updated_by(node)
                if variable is not None:
                    reached.append(variable)
                    # A slot is written first, then read again for the update of its variable.
                    pending.extend(read for read in self._reads(node.inputs[0]) if read not in seen)
                    seen.update(self._reads(node.inputs[0]))
                    continue
                if sparse and (_mixes_rows(node) or has(node.op, "measures")):  # a number of rows is not the rows
                    continue
                for other in [node.output(index)] if node.op == "IdentityN" else self._made(node):
                    if other not in seen and self._follows(other, shape, sparse):
                        seen.add(other)
                        pending.append(other)
        alike = [v for v in reached if v.shape == shape] or reached
        owners = [v for v in alike if v.name in self._trained] if self._trained else alike
        return next((v.name for v in owners), STEP)

    def _updated_by(self, node: Node) -> Variable | None:
        if not is_update(node):
            return None
        return self._by_handle.get(handle_node(node.inputs[0]).name)

    def _reads(self, handle: Value) -> list[Value]:
        """Return what is read from a variable, also inside branches and loops."""
        uses = handle_uses(handle_node(handle))
        return [node.output() for node, _ in uses if node.op == "ReadVariableOp"]

    def _made(self, node: Node) -> list[Value]:
        transferred = self._state.transfers.get(node)
        return [] if transferred is None else [node.output(i) for i in range(len(transferred.outputs))]

    def _follows(self, value: Value, shape: Shape | None, sparse: bool) -> bool:
        fact = self._state.facts[value]
        if sparse:  # rows: their number changes when duplicates are merged
            return fact.shape is None or len(fact.shape) >= 1
        if fact.shape is None or shape is None:
            return True
        return fact.shape == shape or _elements(fact.shape) == _elements(shape)


def _mixes_rows(node: Node) -> bool:
    rule = TABLE.get(node.op)
    return rule is not None and rule.family in MIXES_ROWS


def _elements(shape: Shape) -> int | None:
    if any(not isinstance(dim, int) or is_local(dim) for dim in shape):
        return None
    return math.prod(dim for dim in shape if isinstance(dim, int))
