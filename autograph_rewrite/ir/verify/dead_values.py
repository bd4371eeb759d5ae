"""Checks that no live node waits for a dead value (a result of an untaken branch).

    p ─► Switch ─► true:  a ─┐
                └► false: b ─┴► Add       needs what both branches make: never runs, and who waits for it waits for ever

    Enter (device 0) ─► Mul (device 1)    sent in the first iteration only, and awaited in every one

TensorFlow reports neither: the value is dead, and a loop that waits for it hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from autograph_rewrite.ir.control_flow import OPENS, Frame, Guard, Guards, frames_of, guards_of, opened
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.mesh import ONCE, Select, common_name
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.verify.folded import Fault, raise_for
from autograph_rewrite.ops.traits import BACK_EDGES, ENTERS, EXITS, MERGES

Apart = Callable[[Node, Node, Select | None], bool]
"""Whether a node is certainly on another device than a producer; the selector says which instances it reads."""


def check_arrivals(graph: Graph, known: Collection[str], apart: Apart) -> None:
    """Check that every value that a graph needs arrives; see `values_arrive`.

    Raises:
        VerifyError: names every value that does not.
    """
    raise_for(list(values_arrive(graph, known, apart)))


def values_arrive(graph: Graph, known: Collection[str], apart: Apart) -> Iterator[Fault]:
    """Every node that a pass added can run; a value that another device sends into a loop arrives in every iteration.

    Args:
        known: names of the original nodes, which may need both branches: they never run in the original either.
        apart: tells which edges connect two devices.
    """
    if any(node.op in OPENS for node in graph):
        order = topological_order(graph)
        frames = frames_of(order)
        for node, fault in _behind_both_branches(order, frames):
            if common_name(node.name) not in known:
                yield fault
        yield from _awaited_again(order, frames, apart)


def on_other_devices(node: Node, producer: Node, _: Select | None) -> bool:
    """Return whether two nodes of a finished graph, which has no instances to select, are on different devices."""
    one, other = device_specs.canonical(node.device), device_specs.canonical(producer.device)
    return bool(one) and bool(other) and one != other


def on_other_replicas(node: Node, producer: Node, select: Select | None) -> bool:
    """Return whether an edge of a folded graph connects different replicas; a node that runs once is on the first."""
    return (node.span == ONCE) is not (producer.span == ONCE) and select is not Select.FIRST


def _behind_both_branches(order: Sequence[Node], frames: dict[Node, Frame]) -> Iterator[tuple[Node, Fault]]:
    """Yield the first nodes that need values of both branches of one condition."""
    guards = guards_of(order, frames)
    both: dict[Guards, frozenset[Guard]] = {}
    for node, behind in guards.items():
        if behind not in both:
            both[behind] = frozenset(g for g in behind if g._replace(taken=not g.taken) in behind)
        if not both[behind] or node.op in MERGES:
            continue
        given = [opened(value, frames, guards.get(value.node, frozenset())) for value in node._inputs]
        given += [guards.get(control, frozenset()) for control in node._controls]
        new = {g for g in both[behind] if not any({g, g._replace(taken=not g.taken)} <= one for one in given)}
        if new:
            predicate = min(g.predicate.name for g in new)
            problem = f"'{node.name}' never runs: it needs what is made where '{predicate}' is true, and where it is"
            hint = "what the branches share must be made before them, or in each of them"
            yield node, Fault(f"{problem} false", node, hint)


def _awaited_again(order: Sequence[Node], frames: Mapping[Node, Frame], apart: Apart) -> Iterator[Fault]:
    """Yield the nodes that wait in every iteration for a value that another device sends in the first one only."""
    first = _first_only(order, frames)
    for node in frames if first else ():
        for producer, select in _given(node):
            if producer in first and frames[node] == frames[producer] and apart(node, producer, select):
                problem = f"'{node.name}' waits in every iteration for '{producer.name}', which another device sends"
                hint = "let the value enter the loop on each device that reads it"
                yield Fault(f"{problem} in the first one only", node, hint)


def _first_only(order: Sequence[Node], frames: Mapping[Node, Frame]) -> set[Node]:
    """Return the nodes that run only in the first iteration of their loop: those between an Enter and a Merge."""
    first: set[Node] = set()
    for node in order:
        if node.op in ENTERS:
            early = not node.attr("is_constant", False)
        elif node.op in MERGES or node.op in EXITS or node not in frames:
            early = False
        else:
            early = any(producer in first and frames[producer] == frames[node] for producer, _ in _given(node))
        if early:
            first.add(node)
    return first


def _given(node: Node) -> Iterator[tuple[Node, Select | None]]:
    """Yield the nodes that a node reads or waits for, each with the selector."""
    for index, value in enumerate(node._inputs):
        if value.node.op not in BACK_EDGES:
            yield value.node, node.selects.get(index)
    for control in node._controls:
        yield control, None
