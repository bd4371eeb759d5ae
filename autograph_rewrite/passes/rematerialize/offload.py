"""Offload: a value goes to the host's memory as soon as it is made, and comes back before gradients read it.

    before   h @gpu ─► forward                                        h @gpu ─► gradients
    after    h @gpu ─► forward;  h ─► Snapshot @cpu ─► Snapshot @gpu ^upstream ─► gradients

It comes back when the gradients behind those of the next later value are made, so that the transfer runs beside them.
An Identity would not do: TensorFlow 2.21 removes both, as that saves transfers. On CPUs there is nothing to move.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Graph, Node, Use
from autograph_rewrite.ir.traversal import descendants
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.rematerialize.rewrite import FIRST
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.decision import Left
from autograph_rewrite.resolve.remat.offloaded import OFFLOAD_ATTR
from autograph_rewrite.resolve.remat.triggers import triggers_of
from autograph_rewrite.resolve.stages.forward_backward import COPIES, copied, is_copy


def offload(acts: Activations, nodes: Sequence[Node]) -> tuple[list[str], list[Left], Propagation]:
    """Edit the graph; return what is offloaded, what is not, and the placements as they are then.

    Args:
        acts: forward and backward of the graph, what is computed again included.
        nodes: what is to be offloaded, those of the end of the forward last.
    """
    graph = acts.state.graph
    segments = _waits_of_copies(graph)
    done: list[str] = []
    left: list[Left] = []
    later: Collection[Node] = ()  # what the next later value waits for
    for node in reversed(nodes):
        readers = [use for value in node.read_outputs for use in value.uses if _is_later(acts, use.node)]
        if not readers:
            continue
        waits = dict.fromkeys(triggers_of(acts, [node], {use.node for use in readers if use.node in acts.backward}))
        for use in readers:
            waits |= dict.fromkeys(segments.get(_segment(use.node), ()))
        behind = descendants(use.node for use in readers)
        waits = {one: None for one in waits if one not in behind}
        if not waits:
            left.append(Left(node.name, FIRST))
            continue
        early = later if later and behind.isdisjoint(later) else tuple(waits)
        _move(graph, node, readers, early)
        later = tuple(waits)
        done.append(node.name)
    return done[::-1], left[::-1], revise(acts.state)


def _move(graph: Graph, node: Node, readers: Sequence[Use], waits: Collection[Node]) -> None:
    """Let the readers of a node read what has come back from the host."""
    for value in node.read_outputs:
        uses = [use for use in readers if use.node.inputs[use.index] is value]
        if not uses:
            continue
        away = Builder(graph, f"offload/{node.name}", node, device=node.device).node("Snapshot", value)
        away.set_raw_attr(OFFLOAD_ATTR, encode("string", "host"))
        name = f"{COPIES}/{len(graph)}/{node.name}"
        back = Builder(graph, name, node, device=node.device).node("Snapshot", away.output(), controls=waits)
        away.span = back.span = node.span
        for use in uses:
            use.node.set_input(use.index, back.output(), use.node.selects.get(use.index))


def _is_later(acts: Activations, node: Node) -> bool:
    return (node in acts.backward and not has(node.op, "sizes")) or is_copy(node.name)


def _segment(node: Node) -> str:
    return node.name.removesuffix(copied(node.name))


def _waits_of_copies(graph: Graph) -> dict[str, dict[Node, None]]:
    """Return what the copies of each segment wait for, by the scope of their names."""
    found: dict[str, dict[Node, None]] = {}
    for node in graph:
        if is_copy(node.name):
            found.setdefault(_segment(node), {}).update(dict.fromkeys(node.controls))
    return found
