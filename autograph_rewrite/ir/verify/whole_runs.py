"""Checks a folded graph before expansion: each fetch needs all members of a collective, or none.

    init = NoOp(^%all_reduce)                      waits for the members on all replicas
    init = NoOp(^%first), %first = all_reduce[0]   waits for that of replica 0, which waits for the others for ever

`collectives.runs_are_whole` checks finished graphs instance by instance; this check visits each folded node once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import MICRO, ONCE, Mesh, PerInstance, Select, Span
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.verify.collective_groups import GROUP_KEY, is_collective
from autograph_rewrite.ir.verify.folded import Fault, raise_for
from autograph_rewrite.ops.traits import BACK_EDGES


def check_runs(graph: Graph, mesh: Mesh, roots: Iterable[Node]) -> None:
    """Check that no fetch leaves a member of a collective waiting.

    Raises:
        VerifyError: names every root that would hang.
    """
    raise_for(list(runs_are_whole(graph, mesh, roots)))


def runs_are_whole(graph: Graph, mesh: Mesh, roots: Iterable[Node]) -> Iterator[Fault]:
    """A root that runs once needs all members of a collective along each axis that the collective spans, or none."""
    order = topological_order(graph)
    members = [(node, axis) for node in order if is_collective(node.op) for axis in _axes(node, mesh)]
    if not members:
        return
    reached = _Reached(mesh, members)
    # The second round propagates members from the body of a loop to its entry.
    for _ in range(2 if any(node.op in BACK_EDGES for node in order) else 1):
        for node in order:
            reached.visit(node)
    for root in roots:
        _, first, whole = reached.of.get(root, (0, 0, 0))
        missing = first & ~whole
        if root.span == ONCE and missing:
            node, axis = members[missing.bit_length() - 1]
            problem = f"running '{root.name}' alone hangs: it needs '{node.name}' of the first {axis}, but not of"
            yield Fault(f"{problem} others", node, "let it wait for all members")


class _Reached:
    """The members of collectives that a node needs, as bit masks: its instance's, the first ones, all."""

    def __init__(self, mesh: Mesh, members: Iterable[tuple[Node, str]]) -> None:
        self._mesh = mesh
        self._bits: dict[Node, int] = {}
        self._along: dict[str, int] = {}
        for i, (node, axis) in enumerate(members):
            self._bits[node] = self._bits.get(node, 0) | 1 << i
            self._along[axis] = self._along.get(axis, 0) | 1 << i
        self.of: dict[Node, tuple[int, int, int]] = {}

    def visit(self, node: Node) -> None:
        own, first, whole = self._bits.get(node, 0), 0, 0
        span = self._mesh.whole(node.span)
        read = [(value.node, node.selects.get(i)) for i, value in enumerate(node._inputs)]
        for producer, select in (*read, *((control, Select.ALL) for control in node._controls)):
            if producer not in self.of:
                continue
            made, one, every = self.of[producer]
            if made and (lacking := self._mesh.whole(producer.span) - span):
                crossed = made & sum(self._along.get(axis, 0) for axis in lacking)
                made &= ~crossed
                if select is None or select is Select.FIRST:
                    one |= crossed
                else:
                    every |= crossed
            if select in (Select.EVERY, Select.OWN):
                every |= made & sum(bits for axis, bits in self._along.items() if axis not in self._mesh.along)
            own, first, whole = own | made, first | one, whole | every
        if own or first or whole:
            self.of[node] = own, first, whole


def _axes(node: Node, mesh: Mesh) -> list[str]:
    """Return the axes of this process along which a collective has several members."""
    span = mesh.whole(node.span)
    key = node.inputs[GROUP_KEY].node if len(node.inputs) > GROUP_KEY else node
    lying = [name for name, size in mesh.axes if name in span and name != MICRO and size > 1]
    return [name for name in lying if _meets(key, name, span, mesh)]


def _meets(key: Node, axis: str, span: Span, mesh: Mesh) -> bool:
    """Return whether instances that differ along an axis have one group key."""
    raw = key.attrs.get("value")
    if not isinstance(raw, PerInstance):
        return True
    found: dict[tuple[tuple[str, int], ...], set[bytes]] = {}
    for i, content in enumerate(raw.raws):
        at = mesh.coordinates(key.span, i)
        others = tuple((name, k) for name, k in at.items() if name != axis and name in span)
        found.setdefault(others, set()).add(content)
    return all(len(contents) == 1 for contents in found.values())
