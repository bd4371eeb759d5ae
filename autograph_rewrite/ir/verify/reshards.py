"""Checks the package's ops: a reshard agrees with its axes and placements, and a finished graph has none left.

%sum: float32[4,8] = ar.reshard(%dw) {after="replicated", before="partial(sum)", over=["model"]}
fault: 'sum' changes along 'replica', and is not over it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.format.annotations import placements_of
from autograph_rewrite.ir.graph import PASS_ATTR, Node
from autograph_rewrite.ir.mesh import Mesh, is_axis
from autograph_rewrite.ir.types.opdefs import OWN, RESHARD
from autograph_rewrite.ir.types.placement import REPLICATED, Placement


def reshard_faults(nodes: Iterable[Node], mesh: Mesh) -> Iterator[tuple[Node, str]]:
    """Yield the reshards that contradict themselves or their operands, each with the problem."""
    alone = {axis.name for axis in mesh.axes if axis.size == 1}  # along these there is nothing to exchange
    for node in nodes:
        if node.op == RESHARD:
            try:
                found = reshard_of(node)
            except GraphError as error:
                yield node, error.problem
                continue
            yield from ((node, f"'{node.name}' {problem}") for problem in _faults(node, found, mesh, alone))


def _faults(node: Node, found: Reshard, mesh: Mesh, alone: set[str]) -> Iterator[str]:
    unknown = [axis for axis in found.over if not is_axis(axis)]
    if unknown or len(set(found.over)) != len(found.over) or not found.over:
        yield f"is over {', '.join(found.over) or 'nothing'}: axes of a mesh are wanted, each once"
        return
    if found.edge < -1:
        yield f"is of the edge {found.edge}: edges are counted from 0"
    for axis in dict.fromkeys((*found.over, *found.before, *found.after)):
        before, after = (one.get(axis, REPLICATED) for one in (found.before, found.after))
        # A value sent from one stage to the next changes its place, but keeps its placements.
        changes = before != after or (axis in node.place and _is_elsewhere(node, axis)) or bool(node.attr("rows"))
        if changes and axis not in found.over:
            yield f"changes along '{axis}', and is not over it"
        elif not changes and axis in found.over:
            yield f"is over '{axis}', along which its value is {before!r} before and after"
    for value in node.inputs:
        for axis in sorted(value.node.span - mesh.whole(node.span) - set(found.over) - alone):
            yield f"reads '{value.name}', which has instances along '{axis}', and is not over it"


def _is_elsewhere(node: Node, axis: str) -> bool:
    """Return whether an operand has another place; an operand without a place is wherever its reader is."""
    return any(axis in value.node.place and value.node.place[axis] != node.place[axis] for value in node.inputs)


def unlowered(nodes: Iterable[Node]) -> Iterator[tuple[Node, str]]:
    """Yield the ops of the package in a graph that must not have any, each with the problem."""
    for node in nodes:
        if node.op in OWN:
            made = node.attr(PASS_ATTR)
            by = f", which '{made.decode()}' has made," if made is not None else ""
            yield node, f"'{node.name}'{by} is still an {node.op}: a pass has to lower it before 'expand'"


# `ar.reshard`: a value with other placements along some axes, until a pass lowers it to ops.
#
#     %dw: float32[4,8] @ {micro: partial(sum), replica: partial(sum)} = MatMul(%x, %dy) {transpose_a=true} each
#     %dw/block: float32[4,8] @ split(0) = ar.reshard(%dw) {after="split(0)", before="...", over=["micro", "replica"]}
#
# One node stands for all members of the exchange, so it reads every instance along the axes that it is over.


@dataclass(frozen=True)
class Reshard:
    """The exchange that an `ar.reshard` states.

    Attributes:
        over: the axes along which the value changes, in the order of the exchanges.
        before: placements of the operand by axis; replicated axes are left out.
        after: placements of the result.
        edge: of the plan; -1 where none is planned.
    """

    over: tuple[str, ...]
    before: Mapping[str, Placement]
    after: Mapping[str, Placement]
    edge: int = -1


def reshard_of(node: Node) -> Reshard:
    """Return the exchange that a node states.

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
