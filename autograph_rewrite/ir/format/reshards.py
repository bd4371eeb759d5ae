"""`ar.reshard`: a value with other placements along some axes, until a pass lowers it to ops.

    %dw: float32[4,8] @ {micro: partial(sum), replica: partial(sum)} = MatMul(%x, %dy) {transpose_a=true} each
    %dw/block: float32[4,8] @ split(0) = ar.reshard(%dw) {after="split(0)", before="...", over=["micro", "replica"]}

One node stands for all members of the exchange, so it reads every instance along the axes that it is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import placements_of
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types.placement import Placement


@dataclass(frozen=True)
class Reshard:
    """What an `ar.reshard` says.

    Attributes:
        over: the axes along which the value changes, in the order in which that is done.
        before: placements of the operand by axis; replicated is left out.
        after: those of the result.
        edge: of the plan; -1 where none is planned.
    """

    over: tuple[str, ...]
    before: Mapping[str, Placement]
    after: Mapping[str, Placement]
    edge: int = -1


def reshard_of(node: Node) -> Reshard:
    """Return what a node says of its exchange.

    Raises:
        GraphError: an attribute is missing or cannot be read.
    """
    missing = [key for key in ("over", "before", "after") if key not in node.attrs]
    if missing:
        raise GraphError(f"'{node.name}' does not say its {' and '.join(missing)}", node=node)
    before, after = (_placements(node, key) for key in ("before", "after"))
    return Reshard(tuple(one.decode() for one in node.attr("over")), before, after, node.attr("edge"))


def _placements(node: Node, key: str) -> dict[str, Placement]:
    try:
        return placements_of(node.attr(key).decode())
    except GraphError as error:
        raise GraphError(f"'{node.name}' says {key}: {error.problem}", node=node, hint=error.hint) from None
