"""Values of a block's own: batch normalisation that is written out, with the statistics of each block.

    m = Mean(x)   v = Mean((x - m)^2)   y = (x - m) * rsqrt(v)        as if the block were the whole batch
    dv ──► BroadcastTo(dv, Shape(x)) / size(x) ──► dx                 and backwards alike

Statistics are recognised by their pattern, their gradients by being spread over the shape of what the statistics were
taken of. Nodes between them are marked: what they make is a block's own, and nobody adds it up. It leaves through an
exit: a contribution to a parameter's gradient is added up, a statistic that feeds a moving average is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autograph_rewrite.analysis.fact import REPLICATED
from autograph_rewrite.analysis.own_static import restate_sizes
from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.analysis.rules.base import AVERAGE, OF_BLOCK, OWN, SUM
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.attrs import encode
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.rename import take_name
from autograph_rewrite.ir.walk import descendants

SPREADS = frozenset(("BroadcastTo", "Tile"))
COPIES = frozenset(("StopGradient", "Identity", "Reshape", "Squeeze", "Cast"))


@dataclass
class _Found:
    """What belongs to the normalisations of a graph: forward values, backward values, spread ones, and their sizes."""

    forward: set[Node] = field(default_factory=set)
    backward: set[Node] = field(default_factory=set)
    split: set[Node] = field(default_factory=set)
    divisions: list[Node] = field(default_factory=list)


def mark_statistics(state: Propagation, instances: int) -> Propagation:
    """Mark what each block shall compute by itself; return the placements as they are then.

    Args:
        state: placements, with the means not yet taken apart.
        instances: how many blocks there are.
    """
    if state.loops or state.cells:
        return state
    means = [mean for pair in _moments(state) for mean in pair]
    if means and state.semantics.batch is not None and restate_sizes(state, means):
        state = revise(state)
    found = _trace(state, means) if means else None
    if found is None:
        return state
    marked = found.forward | found.backward | found.split
    for node in marked:
        node.set_raw_attr(OF_BLOCK, encode("string", OWN))
    for division in found.divisions:
        _divide_by_own_size(state, division)
    for node in sorted(found.forward, key=lambda node: node.name):
        _leave(state, node, marked, AVERAGE, instances)
    for node in sorted(found.backward, key=lambda node: node.name):
        _leave(state, node, marked, SUM, instances)
    return revise(state)


def _moments(state: Propagation) -> list[tuple[Node, Node]]:
    """Return the means and variances over the batch: a mean of squared distances from a mean of the same values."""
    pairs = []
    for variance in state.order:
        if variance.op != "Mean" or not state.answers[variance].decompose:
            continue
        squares = variance.inputs[0].node
        if squares.op == "SquaredDifference":
            terms = squares.inputs
        elif squares.op == "Square" or (squares.op == "Mul" and squares.inputs[0] is squares.inputs[1]):
            terms = squares.inputs[0].node.inputs if squares.inputs[0].node.op == "Sub" else ()
        else:
            continue
        for x, centre in (terms, terms[::-1]) if len(terms) == 2 else ():
            mean = _behind_copies(centre.node)
            if mean.op == "Mean" and state.answers[mean].decompose and mean.inputs[0] is x:
                pairs.append((mean, variance))
                break
    return pairs


def _behind_copies(node: Node) -> Node:
    while node.op in COPIES:
        node = node.inputs[0].node
    return node


def _is_split(state: Propagation, node: Node) -> bool:
    answer = state.answers.get(node)
    return answer is not None and any(fact.placement.is_split for fact in answer.outputs)


def _trace(state: Propagation, means: list[Node]) -> _Found | None:
    """Return what belongs to the normalisations; None where something of them is not understood."""
    found = _Found()
    after = descendants(means, controls=False)
    for mean in means:
        for spread in _spread_gradients(state, mean):
            if not _divided_by_size(state, spread, found):
                return None
            if not _walk_back(state, spread.inputs[0].node, after, found):
                return None
    reached = _closure(state, means)
    useful = _leading_to(reached, lambda node: node in found.backward or _is_split(state, node))
    found.forward = (useful | set(means)) - found.backward
    _add_products(state, found)
    own = found.forward | found.backward
    found.split |= {node for node in _users(own) if _is_split(state, node)}
    return found if not any(state.answers[node].note for node in own | found.split) else None


def _spread_gradients(state: Propagation, mean: Node) -> list[Node]:
    """Return what gives each example its part of the gradient of a mean."""
    shapes = [use.node for use in mean.inputs[0].uses if use.node.op == "Shape"]
    users = [use for shape in shapes for use in shape.output().uses]
    spread = [use.node for use in users if use.node.op in SPREADS and use.index == 1]
    return [node for node in spread if node in state.answers and _is_split(state, node)]


def _divided_by_size(state: Propagation, spread: Node, found: _Found) -> bool:
    """Find the division of a spread gradient by the number of elements of the mean."""
    users = [use for use in spread.output().uses if use.node in state.answers]
    divisions = [use.node for use in users if use.node.op == "RealDiv" and use.index == 0]
    sizes = [node.inputs[1].node for node in divisions]
    if len(divisions) != len(users) or any(size.op != "Cast" for size in sizes):
        return False
    if any(not state.facts[size.inputs[0]].is_local for size in sizes):
        return False
    found.divisions += divisions
    found.split |= {spread, *divisions}
    return True


def _walk_back(state: Propagation, start: Node, after: set[Node], found: _Found) -> bool:
    """Collect what a gradient of a statistic is computed from, back to the sums over the examples."""
    pending = [start]
    while pending:
        node = pending.pop()
        if node in found.backward or node not in after:
            continue
        if _is_split(state, node):
            return False
        if not any(_is_split(state, value.node) for value in node.inputs):
            pending += [value.node for value in node.inputs]
        elif node.op in ("Mean", "MatMul") or any(want == REPLICATED for want in _split_wants(state, node)):
            continue  # a statistic itself
        found.backward.add(node)
    found.backward = {node for node in found.backward if _sums_examples(state, node, found.backward)}
    return True


def _split_wants(state: Propagation, node: Node) -> list[object]:
    wants = state.answers[node].wants
    return [wants.get(i) for i, value in enumerate(node.inputs) if _is_split(state, value.node)]


def _sums_examples(state: Propagation, node: Node, inside: set[Node]) -> bool:
    """Return whether a node is, or reads, a sum over examples among the given nodes: others are statistics."""
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if any(_is_split(state, value.node) for value in current.inputs):
            return True
        for value in current.inputs:
            if value.node in inside and value.node not in seen:
                seen.add(value.node)
                pending.append(value.node)
    return False


def _closure(state: Propagation, means: Iterable[Node]) -> set[Node]:
    """Return the means, and what is computed from them without the examples."""
    seen = set(means)
    pending = list(seen)
    while pending:
        for user in _users([pending.pop()]):
            if user not in seen and user in state.answers and not _is_split(state, user) and _has_values(user):
                seen.add(user)
                pending.append(user)
    return seen


def _has_values(node: Node) -> bool:
    return bool(node.output_dtypes) and dtypes.base(node.output_dtypes[0]) in dtypes.FLOATING


def _leading_to(nodes: set[Node], is_end: object) -> set[Node]:
    """Return those of the nodes from which an end is read, directly or through others of them."""
    assert callable(is_end)
    useful = {node for node in nodes if any(is_end(user) for user in _users([node]))}
    pending = list(useful)
    while pending:
        for value in pending.pop().inputs:
            if value.node in nodes and value.node not in useful:
                useful.add(value.node)
                pending.append(value.node)
    return useful


def _add_products(state: Propagation, found: _Found) -> None:
    """Add what multiplies a gradient by a statistic, as the gradient of a scale does: a contribution of the block."""
    pending = True
    while pending:
        users = {node for node in _users(found.backward) if node not in found.backward and node in state.answers}
        new = {n for n in users if not _is_split(state, n) and any(v.node in found.forward for v in n.inputs)}
        found.backward |= new
        pending = bool(new)


def _users(nodes: Iterable[Node]) -> set[Node]:
    return {use.node for node in nodes for value in node.read_outputs for use in value.uses}


def _divide_by_own_size(state: Propagation, division: Node) -> None:
    size = division.inputs[1].node
    own = state.graph.add(
        "Cast", size.inputs, name=f"{size.name}/of_block", attrs={"DstT": size.output_dtypes[0]}, origin=size
    )
    own.set_raw_attr(OF_BLOCK, encode("string", OWN))
    division.set_input(1, own.output())


def _leave(state: Propagation, node: Node, marked: set[Node], kind: str, instances: int) -> None:
    """Let whatever else reads a block's own value read what leaves the block."""
    graph = state.graph
    for value in node.read_outputs:
        others = [use.node for use in value.uses if use.node not in marked and use.node.op != "Shape"]
        anchored = [name for name, anchor in graph.anchors.items() if anchor is value]
        if not others and not anchored:
            continue
        exit_ = _exit(state, value, kind, instances)
        exit_.set_raw_attr(OF_BLOCK, encode("string", kind))
        readers = {use.node for use in value.uses}
        value.replace_all_uses_with(exit_.output(), keep={exit_, *(readers - set(others))})
        if anchored and len(node.output_dtypes) == 1:
            name = node.name
            take_name(graph, node, graph.unique_name(f"{name}/of_block"))
            take_name(graph, exit_, name)


def _exit(state: Propagation, value: Value, kind: str, instances: int) -> Node:
    graph, node = state.graph, value.node
    if kind == SUM:
        return graph.add("Identity", [value], name=f"{node.name}/contribution", origin=node)
    array = np.asarray(1 / instances, dtypes.numpy_dtype(value.dtype))
    attrs = {"value": array, "dtype": value.dtype}
    share = graph.add("Const", name=f"{node.name}/share", attrs=attrs, origin=node).output()
    return graph.add("Mul", [value, share], name=f"{node.name}/average", origin=node)
