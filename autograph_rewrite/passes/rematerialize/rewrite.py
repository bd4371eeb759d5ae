"""Insert the recomputed copies: each node of a segment again, behind its triggers, for the gradients that read it.

    before   c = Tanh(b) ─► d = MatMul(c, w) ─► ...       dc = TanhGrad(c, %dd)
    after    c = Tanh(b) ─► d = MatMul(c, w) ─► ...       c' = Tanh(b) ^%dd;  dc = TanhGrad(c', %dd)

A copy is the same op with the same operands on the same device, and nothing else. What waits are the copies that read
no other copy. Without that they would run at once, and nothing would be saved. The edges, and the attributes that say
what the copies are of, also keep TensorFlow from merging them with the originals. (An IdentityN that hands on operands
together with the trigger does not: TensorFlow 2.21 takes it apart, and merges.) Copies of a segment that has segments
within it are copied once more, from those of them that are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.copying import copy_node
from autograph_rewrite.ir.graph import Graph, Node, Use
from autograph_rewrite.resolve.remat.activations import Activations
from autograph_rewrite.resolve.remat.decision import Decision, Left, Segment
from autograph_rewrite.resolve.remat.triggers import triggers_of
from autograph_rewrite.resolve.stages.flops import cost_of
from autograph_rewrite.resolve.stages.forward_backward import COPIES, copied

FIRST = "no gradient comes before its own: all of it is read as soon as it has been made"


def rematerialize(acts: Activations, segments: Sequence[Segment]) -> tuple[Decision, Propagation]:
    """Edit the graph; return what was done, and the placements as they are then.

    Args:
        acts: what may be computed again in the graph.
        segments: what is, those of the end of the forward last.
    """
    graph = acts.state.graph
    done: list[Segment] = []
    left: list[Left] = []
    numbers = itertools.count(len(segments))
    for number in reversed(range(len(segments))):
        segment = segments[number]
        copies = copy_segment(acts, segment, graph.nodes, number)
        if copies is None:
            left.append(Left(segment.nodes[0], FIRST))
        elif segment.inside:
            done.append(_copy_again(acts, segment, copies, numbers))
        else:
            done.append(segment)
    return Decision(tuple(reversed(done)), tuple(reversed(left))), revise(acts.state)


def copy_segment(acts: Activations, segment: Segment, nodes: Mapping[str, Node], number: int) -> dict[str, Node] | None:
    """Copy a segment for its gradients; return the copies, or None where there is nothing that they can wait for.

    Args:
        acts: forward and backward of the graph.
        segment: what is copied.
        nodes: what stands for its nodes: the originals, or copies of them.
        number: of the copies, in their names.
    """
    inside = [nodes[name] for name in segment.nodes]
    readers = [list(acts.readers(node)) for node in inside]
    triggers = triggers_of(acts, inside, {use.node for uses in readers for use in uses})
    if not triggers:
        return None
    copies = copy_nodes(acts.state.graph, inside, f"{COPIES}/{number}", triggers)
    for uses in readers:
        read_copies(uses, copies)
    return {name: copies[nodes[name]] for name in segment.nodes}


def _copy_again(acts: Activations, segment: Segment, copies: dict[str, Node], numbers: Iterator[int]) -> Segment:
    """Copy the copies that are in segments within a segment, the last first; drop those that nobody reads then."""
    graph = acts.state.graph
    inside = [one for one in reversed(segment.inside) if copy_segment(acts, one, copies, next(numbers)) is not None]
    flops = 0.0
    for name in reversed(segment.nodes):
        if any(value.uses for value in copies[name].read_outputs):
            flops += cost_of(acts.state, graph.nodes[name])
        else:
            graph.erase(copies[name])
    return replace(segment, added_flops=flops, inside=tuple(reversed(inside)))


def copy_nodes(graph: Graph, nodes: Sequence[Node], scope: str, triggers: Sequence[Node]) -> dict[Node, Node]:
    """Add a copy of each node, producers first; those that read none of the copies wait for the triggers.

    Args:
        graph: edited in place.
        nodes: in topological order.
        scope: prefix of the copies' names.
        triggers: gradients after which they may run.
    """
    copies: dict[Node, Node] = {}
    for node in nodes:
        inputs = [copies[v.node].output(v.index) if v.node in copies else v for v in node.inputs]
        waits = triggers if not any(value.node in copies for value in node.inputs) else ()
        name = f"{scope}/{copied(node.name)}"
        copies[node] = copy_node(graph, node, inputs, name=name, controls=waits)
        copies[node].span = node.span
    return copies


def read_copies(uses: Sequence[Use], copies: dict[Node, Node]) -> None:
    """Let readers read the copies instead of the originals."""
    for use in uses:
        value = use.node.inputs[use.index]
        use.node.set_input(use.index, copies[value.node].output(value.index), use.node.selects.get(use.index))
