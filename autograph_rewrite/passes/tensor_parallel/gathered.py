"""What reads a value whole of which the devices hold blocks: every gather of a step, told with who asks for it.

    z: split(1) ──► Sort      model axis: Sort 'Sort' reads 'z' whole, of which each device has a block (split(1))

That is right, and costs a gather; what has no rule at all has a note of its own, which `semantics.strict` refuses.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from autograph_rewrite.analysis.facts.placement import REPLICATED
from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.ir.graph import Node


def gathered_reads(state: Propagation, step: Container[Node]) -> Iterator[str]:
    """Yield a note for each node that reads blocks whole, and has no other note.

    Args:
        state: the placements.
        step: the nodes that one step runs.
    """
    for node in state.order:
        made = state.transfers[node]
        if node not in step or made.note or not made.inputs or any(fact.placement.differs for fact in made.outputs):
            continue
        for index, want in made.operand_reshards.items():
            placement = made.inputs[index].placement
            if want == REPLICATED and placement.is_split:
                value = node.inputs[index].name
                yield (
                    f"model axis: {node.op} '{node.name}' reads '{value}' whole, of which each device has a block "
                    f"({placement!r})"
                )
                break
