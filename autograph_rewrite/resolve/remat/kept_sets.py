"""Sets of activations that are kept: what the others cost, and a floor under the peak of the step.

    kept     a b c     a b     a c     b c     a     ...
    FLOPs    0         3       5       9       8              what gradients need of the rest, computed once more
    floor    120       90      95      70      60             of the peak: no copy is made before it is read

Many sets are priced at once, as rows of bits; a search then asks for the peak of those alone that may be the best.
P. Jain et al., Checkmate (2020), chooses among the same sets by an integer program.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.resolve.remat.activations import Activations, root_of
from autograph_rewrite.resolve.remat.decide import worth_repeating
from autograph_rewrite.resolve.remat.step_memory import StepMemory
from autograph_rewrite.resolve.stages.flops import cost_of

_AT_ONCE = 4096
"""How many sets are held against the times of a step at once."""


class KeptSets:
    """Prices sets of activations.

    Args:
        acts: what may be computed again.
        memory: of the step.

    Attributes:
        nodes: those of which each may be kept or computed again, with reason; a set has a bit for each.
    """

    def __init__(self, acts: Activations, memory: StepMemory) -> None:
        self._acts, self._inside = acts, worth_repeating(acts, acts.repeatable)
        self.nodes = _choosable(acts, memory, self._inside)
        fixed, self._added = memory.floors(self.nodes)
        self._fixed = fixed + memory.kept

    def all(self) -> Any:
        """Return every set."""
        return (np.arange(1 << len(self.nodes))[:, None] >> np.arange(len(self.nodes)) & 1).astype(bool)

    def price(self, sets: Any) -> tuple[Any, Any]:
        """Return the FLOPs that each set adds, and the bytes below which its peak cannot be.

        Args:
            sets: their bits, one row for each.
        """
        starts = range(0, len(sets), _AT_ONCE)
        floors = [(self._fixed + sets[i : i + _AT_ONCE].astype(float) @ self._added).max(axis=1) for i in starts]
        return self._flops(sets), np.concatenate(floors)

    def _flops(self, sets: Any) -> Any:
        kept = {node: sets[:, i] for i, node in enumerate(self.nodes)}
        needed: dict[Node, Any] = {}
        total = np.zeros(len(sets))
        for node in reversed(self._acts.forward):
            if node not in self._inside or not (self._acts.is_kept_today(node) or node in needed):
                continue
            again = np.ones(len(sets), bool) if self._acts.is_kept_today(node) else needed[node]
            if (keeps := kept.get(root_of(node))) is not None:
                again = again & ~keeps
            total += again * cost_of(self._acts.state, node)
            for value in node.inputs:
                needed[value.node] = needed[value.node] | again if value.node in needed else again
        return total


def _choosable(acts: Activations, memory: StepMemory, inside: Collection[Node]) -> tuple[Node, ...]:
    """Return what may be kept with reason.

    What one node alone reads, and no gradient, need not be kept where what that makes of it takes no more.
    """
    needed: set[Node] = set()
    for node in reversed(acts.forward):
        if node in inside and (node in needed or acts.is_kept_today(node)):
            needed |= {node, *(value.node for value in node.inputs if value.node in inside)}
    read = {root_of(node) for node in needed if acts.is_kept_today(node)}
    users: dict[Node, set[Node]] = {}
    for node in needed:
        for value in node.inputs:
            if (root := root_of(value.node)) is not root_of(node):
                users.setdefault(root, set()).add(node)

    def is_passed_on(node: Node) -> bool:
        after = users.get(node, set())
        return node not in read and len(after) == 1 and all(0 < memory.nbytes(n) <= memory.nbytes(node) for n in after)

    return tuple(n for n in acts.forward if n in needed and memory.nbytes(n) and not is_passed_on(n))
