"""Compares the variables that runs write with those that the same fetches write in the original graph.

fetched          original writes       rewritten writes
loss             nothing               nothing
train            w, w/Adam, step       w, w/Adam, step
loss, train      w, w/Adam, step       w, w/Adam, step

Several fetches write the union of what each writes, so comparing them one by one compares all sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autograph_rewrite.ir.graph import ORIGIN_ATTR, Graph, Node
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import descendants, marks_before, topological_order
from autograph_rewrite.ir.variable_ops import written

Written = Mapping[str, frozenset[str]]
"""By node name, the names of the variables that a run of the node writes; nodes that write none are left out."""
_SHARD = re.compile(r"/part_\d+$")
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunWrites:
    """The variables that runs write in the original graph, and where a rewrite changed them.

    Attributes:
        changed: of the nodes that write other variables in the rewritten graph.
    """

    original: Written = field(default_factory=dict)
    changed: Written = field(default_factory=dict)

    def differences(self, nodes: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the variables that a run writes although the original does not, and those that it does not write."""
        if self.changed.keys().isdisjoint(names := list(nodes)):
            return [], []
        wanted = _NONE.union(*(self.original.get(name, _NONE) for name in names))
        found = _NONE.union(*(self.changed.get(name, self.original.get(name, _NONE)) for name in names))
        return sorted(found - wanted), sorted(wanted - found)


def writes_of(graph: Graph, name_of: Callable[[str], str | None] = lambda name: name) -> Written:
    """Return the variables that a run of each node writes.

    Args:
        name_of: maps names of handles to names of variables; None: ignored.
    """
    order = topological_order(graph)
    bits: dict[str, int] = {}
    marks: dict[Node, int] = {}
    for node in order:
        for handle in written(node):
            if (name := name_of(handle.name)) is not None:
                marks[node] = marks.get(node, 0) | bits.setdefault(name, 1 << len(bits))
    behind = descendants(marks)  # for speed: few nodes depend on the updates of a step
    before = marks_before([node for node in order if node in behind], marks)
    found = {node.name: mask | marks.get(node, 0) for node, mask in before.items()}
    names = list(bits)
    sets = {mask: frozenset(_named(mask, names)) for mask in set(found.values())}
    return {name: sets[mask] for name, mask in found.items() if mask}


def _named(mask: int, names: Sequence[str]) -> Iterator[str]:
    """Yield the names whose bits are set, in time proportional to their number: most masks have few."""
    while mask:
        yield names[(mask & -mask).bit_length() - 1]
        mask &= mask - 1


def compared(original: Written, nodes: Collection[str], graph: Graph, elsewhere: Collection[str] = ()) -> RunWrites:
    """Compare the variables that runs write before and after a rewrite.

    Args:
        original: of the graph before the first pass.
        nodes: the names of its nodes.
        elsewhere: handles of variables that another process may write for this one.
    """
    handles = _NONE.union(*original.values())
    after = writes_of(graph, lambda name: found if (found := original_name(name, handles)) in handles else None)
    changed = {}
    for name in after.keys() | original.keys():
        if name in nodes and name in graph:
            wanted, found = original.get(name, _NONE), after.get(name, _NONE)
            if (found := found | wanted.intersection(elsewhere)) != wanted:
                changed[name] = found
    return RunWrites(original, changed)


def original_name(name: str, original: Container[str]) -> str:
    """Return the name of the original node of an instance or a shard; other names are returned unchanged."""
    found = common_name(name)
    while found not in original and _SHARD.search(found):  # a shard may be sharded again
        found = _SHARD.sub("", found)
    return found if found in original else name


def name_of_whole(node: Node) -> str:
    """Return the name of a shard's original node; the node's name if it is no shard or the original remains."""
    whole = node.name
    while _SHARD.search(whole):
        whole = _SHARD.sub("", whole)
    is_part = whole != node.name and node.attr(ORIGIN_ATTR, b"").decode() == whole
    return whole if is_part and whole not in node.graph.nodes else node.name
