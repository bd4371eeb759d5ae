"""Group the batch inputs that must have equal batch sizes, because the graph combines their rows.

    mean(square(x w)) + mean(abs(u w))      x: 2 rows, u: 6      two groups: their sizes never meet
    mean(square(x w - y))                   x, y                 one group: the subtraction takes rows of both

Propagation uses one block size `b` for all inputs. Two inputs need equal sizes only where an op reads blocks, or
sizes, that come from both. So after propagation the inputs are joined where they meet, and each group is cut by
separate limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ops.facts.placement import REPLICATED, Fact
from autograph_rewrite.ops.facts.symbolic_dims import BATCH, BLOCK, Dim, Sym


@dataclass
class BatchGroups:
    """The batch inputs in groups of one size.

    Attributes:
        masks: for each value with the size of a batch, the inputs that it comes from, as bits.
        at: for each node that reads blocks or sizes, the inputs that these come from, as bits.
    """

    inputs: tuple[Value, ...]
    masks: dict[Value, int] = field(default_factory=dict)
    at: dict[Node, int] = field(default_factory=dict)
    _group: list[int] = field(default_factory=list)

    @property
    def groups(self) -> tuple[tuple[Value, ...], ...]:
        """The inputs, group by group, in their order."""
        masks = dict.fromkeys(self._group)
        return tuple(self.within(mask) for mask in masks)

    @property
    def is_one(self) -> bool:
        """Whether all inputs have to be of one size."""
        return len(set(self._group)) == 1

    def within(self, mask: int) -> tuple[Value, ...]:
        """The inputs of a mask."""
        return tuple(value for i, value in enumerate(self.inputs) if mask >> i & 1)

    def joined(self, mask: int) -> int:
        """The mask of the inputs of a mask and of all others in their groups."""
        for i, group in enumerate(self._group):
            if mask >> i & 1:
                mask |= group
        return mask

    def join(self, mask: int) -> None:
        """Note that the inputs of a mask meet."""
        whole = self.joined(mask)
        self._group = [whole if whole >> i & 1 else group for i, group in enumerate(self._group)]

    def of(self, node: Node) -> tuple[Value, ...]:
        """The inputs, all of one size, that a node's blocks and sizes come from; empty where it has no blocks."""
        mask = self.at.get(node, 0)
        for value in () if mask else node.outputs:
            mask |= self.masks.get(value, 0)
        return self.within(self.joined(mask))


def batch_groups(state: Propagation) -> BatchGroups | None:
    """Return the batch inputs in groups whose sizes meet; None where all have to be of one size.

    Args:
        state: placements, under one block size for all.
    """
    inputs = tuple(state.whole_inputs)
    masks = {value: 1 << i for i, value in enumerate(inputs)}
    found = BatchGroups(inputs, masks, {}, list(masks.values()))
    cells: dict[str, int] = {}
    changed = True
    while changed and not found.is_one:  # once, except for loops, whose back edges may carry a mask
        changed = _walk(state, found, cells) and (state.loops or bool(state.cells))
    return None if found.is_one else found


def _walk(state: Propagation, found: BatchGroups, cells: dict[str, int]) -> bool:
    changed = False
    masks = found.masks
    for node in state.order:
        if not cells and masks.keys().isdisjoint(node._inputs):
            continue
        transferred = state.transfers[node]
        together = everything = 0
        facts = [state.facts[value] for value in node.inputs]
        for index, (value, fact) in enumerate(zip(node.inputs, facts, strict=True)):
            mask = masks.get(value, 0) | cells.get(fact.cell, 0)
            everything |= mask
            reshard = transferred.operand_reshards.get(index)
            if reshard != REPLICATED if reshard is not None else fact.placement.differs:
                together |= mask
        if not everything:
            continue
        kept = [
            fact
            for index, fact in enumerate(facts)
            if fact.is_local and transferred.operand_reshards.get(index) is None
        ]
        if transferred.constant or kept:  # a size of blocks may be compared with one of the whole batch
            together = everything
        if together:
            found.join(together)
            if found.is_one:  # most graphs end here early
                return False
            found.at[node] = together
        for index, fact in enumerate(transferred.outputs):
            value = node.output(index)
            if not (_carries(fact) or transferred.holds is not None) or value in state.whole_inputs:
                continue
            before = masks.get(value, 0)
            after = before | (together if together and not _is_of_whole(fact) else everything)
            if after != before:
                masks[value] = after
                changed = True
        if transferred.holds is not None:
            cell = state.facts[node.inputs[transferred.holds[0]]].cell
            changed |= cells.get(cell, 0) | everything != cells.get(cell, 0)
            cells[cell] = cells.get(cell, 0) | everything
    return changed


def _carries(fact: Fact) -> bool:
    """Return whether the size of a batch is in the shape or the contents of a value."""
    return fact.placement.is_split or _any_of_batch(fact.shape) or _any_of_batch(fact.value)


def _is_of_whole(fact: Fact) -> bool:
    """Return whether a value has the size of a whole batch, perhaps from an operand that was read whole."""
    return _any_of_batch(fact.shape, (BATCH,)) or _any_of_batch(fact.value, (BATCH,))


def _any_of_batch(dims: Iterable[Dim] | None, marks: tuple[str, ...] = (BLOCK, BATCH)) -> bool:
    return any(isinstance(dim, Sym) and any(f.startswith(marks) for f in dim.factors) for dim in dims or ())
