"""Give hand-written batch normalisation local statistics: the values in between are varying, none is reduced.

    m = Mean(x)   v = Mean((x - m)^2)   y = (x - m) * rsqrt(v)        as if the block were the whole batch
    dv ──► BroadcastTo(dv, Shape(x)) / size(x) ──► dx                 and backwards alike

The nodes between the statistics and their gradients are marked: their values vary between blocks, and are not added up.
A value leaves its block through an exit: a contribution to a parameter's gradient is added up, a statistic that feeds a
moving average is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.replace_op import take_name
from autograph_rewrite.ir.traversal import descendants, reachable
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import is_update, variable_dependent_nodes
from autograph_rewrite.ops.facts.symbolic_dims import to_global
from autograph_rewrite.ops.rules.base import OWN_VALUE, LocalEntry
from autograph_rewrite.ops.rules.marked import AVERAGE, OF_BLOCK, OWN, SUM, as_mark, kind_of, mark, marked
from autograph_rewrite.ops.rules.normalization import is_of_block
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


def _localize_batch_norm(rewrite: Rewrite) -> None:
    """Mark the batch normalisations whose statistics are to be those of each micro-batch (`batch_norm: local`).

    Raises:
        PassError: a node inside a batch normalisation mixes examples of several blocks.
    """
    state = rewrite.state  # before means are decomposed
    if state.loops or state.cells:
        return
    moments = _moments_of(state)
    means = [mean for one in moments for mean in one.both]
    if state.semantics.extent.units is not None and _restate_sizes(state, means):
        state = revise(state)
    if found := _batch_norms(state, moments):
        _mark_blocks(state, found, rewrite.plan.instances)
        state = revise(state)
        _require_apart(state)
    rewrite.put(state)


def _mark_blocks(state: Propagation, found: list[BatchNorm], instances: int) -> None:
    """Mark the nodes that each block computes alone."""
    backward = {node for norm in found for node in norm.backward}
    forward = {node for norm in found for node in norm.forward} - backward
    inside = forward | backward | {node for norm in found for node in norm.split}
    for node in inside:
        mark(node, OF_BLOCK, OWN)
    for division in [division for norm in found for division in norm.divisions]:
        size, marks = division.inputs[1].node, as_mark(OF_BLOCK, OWN)
        own = Builder.at(size).op("Cast", *size.inputs, what="of_block", marks=marks, DstT=size.output_dtypes[0])
        division.set_input(1, own)
    for kind, nodes in ((AVERAGE, forward), (SUM, backward)):
        for node in sorted(nodes, key=lambda node: node.name):
            _leave(state, node, inside, kind, instances)


def block_statistics(state: Propagation) -> list[Node]:
    """Return the nodes with statistics of a block: fused batch normalisations, and the means of hand-written ones."""
    return [
        node
        for node in state.order
        if (node.op == "Mean" and marked(node, OF_BLOCK) == OWN)
        or (has(node.op, "fused_batch_norms") and is_of_block(node))
    ]


def _require_apart(state: Propagation) -> None:
    """Check that a block's varying values stay in the block, and that no values of other blocks get in.

    Raises:
        PassError: a node breaks this, so only statistics of the whole batch are possible.
    """
    for node in state.order:
        own = kind_of(node) == OF_BLOCK
        converted = state.transfers[node].operand_reshards.items() if own else ()
        mixed = [node.inputs[i] for i, reshard in converted if not isinstance(reshard, LocalEntry)]
        mixed = [value for value in mixed if state.facts[value].placement.differs]
        leaks = [value for value in node.inputs if state.facts[value].placement == OWN_VALUE and not own]
        if mixed or (leaks and not has(node.op, "measures")):
            raise PassError(
                f"'{node.name}' joins examples of several blocks in the middle of a batch normalisation",
                node=node,
                hint="set semantics.batch_norm to sync",
            )


def _leave(state: Propagation, node: Node, inside: set[Node], kind: str, instances: int) -> None:
    """Let readers outside of the block read an exit instead of the block's value."""
    graph = state.graph
    for value in node.read_outputs:
        others = [use.node for use in value.uses if use.node not in inside and use.node.op != "Shape"]
        anchored = [name for name, anchor in graph.anchors.items() if anchor is value]
        if not others and not anchored:
            continue
        build = Builder.at(value.node)
        if kind == SUM:
            exit_ = build.node("Identity", value, what="contribution")
        else:
            exit_ = build.node("Mul", value, build.const(1 / instances, value.dtype, "share"), what="average")
        mark(exit_, OF_BLOCK, kind)
        readers = {use.node for use in value.uses}
        value.replace_all_uses_with(exit_.output(), keep={exit_, *(readers - set(others))})
        if anchored and len(node.output_dtypes) == 1:
            name = node.name
            take_name(graph, node, graph.unique_name(f"{name}/of_block"))
            take_name(graph, exit_, name)


# Replace constant sizes in the gradients of batch statistics by shapes, for graphs with a static batch.
#
#     before   RealDiv(Tile(dv, [8, 5, 5, 1]), 200.0)
#     after    RealDiv(BroadcastTo(dv, Shape(x)), Cast(Prod(Gather(Shape(x), [0, 1, 2]))))
#
# On the whole batch the results are the same; on a block they become those of the block.


def _restate_sizes(state: Propagation, means: Iterable[Node]) -> bool:
    """Restate the sizes in the gradients of means over a static batch; return whether there are any."""
    groups: dict[tuple[tuple[int, ...], int], list[Node]] = {}
    for mean in means:
        whole, axes = _whole_shape(state, mean.inputs[0]), _const(mean.inputs[1])
        if whole is not None and axes is not None:
            count = math.prod(whole[int(axis)] for axis in axes.ravel())
            groups.setdefault((tuple(whole), count), []).append(mean)
    after = descendants([mean for group in groups.values() for mean in group], controls=False)
    tiles = [node for node in state.order if node.op == "Tile" and node in after]
    found = False
    for (shape, count), group in groups.items():
        divided = [(tile, _divisions(state, tile, list(shape), count)) for tile in tiles]
        fitting = [(tile, divisions) for tile, divisions in divided if divisions]
        # Gradients are in reverse order: the gradient of an earlier layer is computed from that of a later one.
        owners = group[::-1] if len(fitting) == len(group) else group[:1] * len(fitting)
        for mean, (tile, divisions) in zip(owners, fitting, strict=True):
            _restate(mean, tile, divisions)
            found = True
    return found


def _whole_shape(state: Propagation, value: Value) -> list[int] | None:
    shape = state.facts[value].shape
    dims = [to_global(dim, state.semantics.extent.units) for dim in shape or ()]
    known = [dim for dim in dims if isinstance(dim, int)]
    return known if shape is not None and len(known) == len(shape) else None


def _const(value: Value) -> np.ndarray[Any, Any] | None:
    content = value.node.attr("value") if value.node.op == "Const" else None
    return content if isinstance(content, np.ndarray) else None


def _divisions(state: Propagation, tile: Node, whole: list[int], count: int) -> list[Node]:
    """Return the divisions of a spread gradient by the size of a mean; none if the gradient is of another mean."""
    given, times = state.facts[tile.inputs[0]].shape, _const(tile.inputs[1])
    if given is None or times is None or len(given) != len(whole) or tile not in state.transfers:
        return []
    if any(not isinstance(dim, int) or dim * int(n) != size for dim, n, size in zip(given, times, whole, strict=True)):
        return []
    users = [use for use in tile.output().uses if use.node in state.transfers]
    sizes = [_const(use.node.inputs[1]) if use.node.op == "RealDiv" and use.index == 0 else None for use in users]
    fits = all(size is not None and size.size == 1 and float(size.ravel()[0]) == count for size in sizes)
    return [use.node for use in users] if users and fits else []


def _restate(mean: Node, tile: Node, divisions: list[Node]) -> None:
    build, add = Builder.at(tile), Builder.at(tile).op
    shape = add("Shape", mean.inputs[0], what="shape")
    tile.output().replace_all_uses_with(add("BroadcastTo", tile.inputs[0], shape, what="spread"))
    sizes = add("GatherV2", shape, mean.inputs[1], build.const(0, dtypes.INT32, "first"), what="sizes")
    count = add("Prod", sizes, build.const([0], dtypes.INT32, "all"), what="count", keep_dims=False)
    for division in divisions:
        division.set_input(1, add("Cast", count, what="number", DstT=division.output_dtypes[0]))


# Recognise hand-written batch normalisation: its batch statistics, and the nodes that compute with them.
#
#     m = Mean(x)   v = Mean((x - m)^2)   y = (x - m) * rsqrt(v) * scale + offset
#     average += rate * (m - average)
#     dv ──► BroadcastTo(dv, Shape(x)) / size(x) ──► dx       dv: sums over examples, times statistics
#
# A mean and a variance of the same values are those of a batch normalisation if the values depend on variables, if the
# moments normalise them, with a variable as scale or offset or with moving averages, and if the moments have no other
# use: a loss on a variance, or a spread of labels, is another quantity. If a part is not recognised, it is none.


CHAIN_LENGTH = 6
"""How many ops after the statistics are searched for a scale or an offset."""


@dataclass(frozen=True)
class Moments:
    """The mean and the variance of the same values over the batch."""

    mean: Node
    variance: Node

    @property
    def both(self) -> tuple[Node, Node]:
        """The two nodes."""
        return self.mean, self.variance


@dataclass
class BatchNorm:
    """A batch normalisation.

    Attributes:
        forward: the moments, and the nodes computed from them alone that are used with examples or in `backward`.
        backward: gradients of statistics or parameters: sums over the examples, and nodes computed from these.
        split: the readers of `forward` and `backward` that compute a value for each example.
        divisions: of the gradients of statistics by the number of examples.
    """

    moments: Moments
    forward: set[Node] = field(default_factory=set)
    backward: set[Node] = field(default_factory=set)
    split: set[Node] = field(default_factory=set)
    divisions: list[Node] = field(default_factory=list)


def _moments_of(state: Propagation) -> list[Moments]:
    """Return the means and variances, over the batch, of values that depend on variables."""
    learnt, found = variable_dependent_nodes(state.order), []
    for variance in state.order:
        if variance.op != "Mean" or not state.transfers[variance].decompose or variance not in learnt:
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
            if mean.op == "Mean" and state.transfers[mean].decompose and mean.inputs[0] is x:
                found.append(Moments(mean, variance))
                break
    return found


def _batch_norms(state: Propagation, moments: Sequence[Moments]) -> list[BatchNorm]:
    """Return the batch normalisations among some moments, with the nodes that belong to them."""
    found = [norm for one in moments if (norm := _Tracer(state, one).trace()) is not None]
    if state.semantics.extent.units is not None and len(found) < len(moments):
        return []  # `_restate_sizes` told gradients apart by constant shapes, which may be equal
    while True:  # other moments must not be inside a batch normalisation
        others = [one for one in moments if all(norm.moments is not one for norm in found)]
        statistics = {node for one in others for node in one.both}
        kept = [norm for norm in found if statistics.isdisjoint(norm.forward | norm.backward | norm.split)]
        if len(kept) == len(found):
            return found
        found = kept


def _behind_copies(node: Node) -> Node:
    while has(node.op, "copies") and node.op != "ExpandDims":
        node = node.inputs[0].node
    return node


def _is_split(state: Propagation, node: Node) -> bool:
    """Return whether a node makes a value of which each replica has a block."""
    transferred = state.transfers.get(node)
    return transferred is not None and any(fact.placement.is_split for fact in transferred.outputs)


def _users_of(nodes: Iterable[Node]) -> set[Node]:
    """Return the readers of some nodes."""
    return {use.node for node in nodes for value in node.read_outputs for use in value.uses}


NOTHING, STATISTIC, SUMMED = range(3)
"""Kinds of values: independent of the batch; computed from statistics alone; a sum over examples, times statistics."""


class _Tracer:
    """Finds the nodes that belong to one pair of moments."""

    def __init__(self, state: Propagation, moments: Moments) -> None:
        self._state = state
        self._norm = BatchNorm(moments)
        self._after = descendants(moments.both, controls=False)
        self._kinds: dict[Node, int | None] = {}

    def trace(self) -> BatchNorm | None:
        """Return the batch normalisation; None if it is none, or a part of it is not recognised."""
        norm, state = self._norm, self._state
        for mean in norm.moments.both:
            for spread in self._spread_gradients(mean):
                if not self._divided_by_size(spread) or self._kind(spread.inputs[0].node) is not SUMMED:
                    return None
        norm.backward = {node for node, kind in self._kinds.items() if kind is SUMMED}
        reached = self._closure()
        if reached is None:
            return None
        useful = _leading_to(reached, lambda node: node in norm.backward or _is_split(state, node))
        norm.forward = (useful | set(norm.moments.both)) - norm.backward
        self._add_products()
        own = norm.forward | norm.backward
        norm.split |= {node for node in _users_of(own) if _is_split(state, node)}
        is_divided_by_deviation = any(has(node.op, "roots") for node in norm.forward)
        if any(state.transfers[node].note for node in own | norm.split) or not is_divided_by_deviation:
            return None
        averages = self._moving_averages(own | norm.split)
        if averages is None or not (averages or self._is_scaled()):
            return None
        return norm

    def _spread_gradients(self, mean: Node) -> list[Node]:
        """Return the nodes that spread the gradient of a mean over the examples."""
        state = self._state
        shapes = [use.node for use in mean.inputs[0].uses if use.node.op == "Shape"]
        users = [use for shape in shapes for use in shape.output().uses]
        spread = [use.node for use in users if has(use.node.op, "broadcasts") and use.index == 1]
        return [node for node in spread if node in self._after and node in state.transfers and _is_split(state, node)]

    def _divided_by_size(self, spread: Node) -> bool:
        """Record the divisions of a spread gradient by the size of the mean; return whether it has no other uses."""
        state = self._state
        users = [use for use in spread.output().uses if use.node in state.transfers]
        divisions = [use.node for use in users if use.node.op == "RealDiv" and use.index == 0]
        sizes = [node.inputs[1].node for node in divisions]
        if len(divisions) != len(users) or any(size.op != "Cast" for size in sizes):
            return False
        if any(not state.facts[size.inputs[0]].is_local for size in sizes):
            return False
        self._norm.divisions += divisions
        self._norm.split |= {spread, *divisions}
        return True

    def _kind(self, start: Node) -> int | None:
        """Return the kind of a gradient of a statistic, from the kinds of its inputs; None: not recognised."""
        pending = [start]
        while pending:
            node = pending[-1]
            if node in self._kinds:
                pending.pop()
                continue
            needed = self._needed(node)
            waiting = [one for one in needed if one not in self._kinds]
            if waiting:
                pending += waiting
                continue
            self._kinds[node] = self._kind_by(node, [self._kinds[one] for one in needed])
        return self._kinds[start]

    def _needed(self, node: Node) -> list[Node]:
        """Return the inputs on which the kind of a node depends."""
        if node in self._norm.moments.both or self._reads_examples(node) or not self._is_traced(node):
            return []
        inputs = [value.node for value in node.inputs]
        return inputs[:1] if has(node.op, "linear") else inputs

    def _is_traced(self, node: Node) -> bool:
        """Return whether the kind of a node depends on its inputs."""
        transferred = self._state.transfers.get(node)
        return node in self._after or (
            transferred is not None and any(f.placement.is_partial for f in transferred.outputs)
        )

    def _reads_examples(self, node: Node) -> bool:
        return any(_is_split(self._state, value.node) for value in node.inputs)

    def _kind_by(self, node: Node, kinds: list[int | None]) -> int | None:
        if node in self._norm.moments.both:
            return STATISTIC
        if _is_split(self._state, node):
            return None
        if self._reads_examples(node):
            plain = node.op in ("Sum", "BiasAddGrad") and not self._state.transfers[node].operand_reshards
            return SUMMED if plain else None
        if not self._is_traced(node):
            return NOTHING
        if None in kinds:
            return None
        if has(node.op, "linear"):
            return kinds[0]
        sums = kinds.count(SUMMED)
        if not sums:
            return STATISTIC if STATISTIC in kinds else NOTHING
        if has(node.op, "terms"):
            zero = [self._state.facts[value].zero for value in node.inputs]
            return SUMMED if all(k is SUMMED or z for k, z in zip(kinds, zero, strict=True)) else None
        if has(node.op, "factors"):
            return SUMMED if sums == 1 and (node.op == "Mul" or kinds[0] is SUMMED) else None
        return SUMMED if has(node.op, "linear_in_second") and sums == 1 and kinds[1] is SUMMED else None

    def _closure(self) -> set[Node] | None:
        """Return the statistics, and the nodes computed from them alone; None if one of these reads examples."""
        state, summed = self._state, descendants(self._norm.backward, controls=False)
        statistics = self._norm.moments.both

        def computed(node: Node) -> list[Node]:
            users = _users_of([node]) - summed if node in statistics or not self._reads_examples(node) else ()
            return [user for user in users if user in state.transfers and not _is_split(state, user) and _is_real(user)]

        found = set(reachable(statistics, computed))
        return None if any(map(self._reads_examples, found.difference(statistics))) else found

    def _add_products(self) -> None:
        """Add products of a gradient and a statistic, such as the gradient of a scale: it is a block's contribution."""
        norm, state = self._norm, self._state

        def products(node: Node) -> list[Node]:
            users = [user for user in _users_of([node]) if user in state.transfers and not _is_split(state, user)]
            return [user for user in users if any(value.node in norm.forward for value in user.inputs)]

        norm.backward = set(reachable(norm.backward, products))

    def _moving_averages(self, inside: Collection[Node]) -> list[Node] | None:
        """Return the updates that use the statistics; None if anything else uses them."""
        forward = self._norm.forward
        if any(self._is_told(node) for node in forward):
            return None

        def averages(node: Node) -> bool:
            is_fit = has(node.op, "scales") or node.op in ("Switch", "Merge")
            return is_fit and node not in inside and not _is_split(self._state, node) and not self._is_told(node)

        def users(node: Node) -> Collection[Node]:
            return _users_of([node]) if averages(node) and not is_update(node) else ()

        first = [user for user in _users_of(forward) if user not in inside and not has(user.op, "measures")]
        found = reachable(first, users)
        updates = [node for node in found if is_update(node)]
        return updates if all(map(averages, found.keys() - set(updates))) else None

    def _is_told(self, node: Node) -> bool:
        """Return whether a node has an anchor, unless it is one of the statistics or a copy of one."""
        if _behind_copies(node) in self._norm.moments.both:
            return False
        return any(anchor.node is node for anchor in self._state.graph.anchors.values())

    def _is_scaled(self) -> bool:
        """Return whether a variable scales or shifts the statistics or the normalised values."""
        learnt = variable_dependent_nodes(self._state.order)
        forward = self._norm.forward
        if any(self._is_parameter(v, learnt) for node in forward if has(node.op, "scales") for v in node.inputs):
            return True
        seen: set[Node] = set()
        pending = {node for node in _users_of(forward) if _is_split(self._state, node)}
        for _ in range(CHAIN_LENGTH):
            pending = {node for node in pending if has(node.op, "scales") and node not in seen}
            if any(self._is_parameter(value, learnt) for node in pending for value in node.inputs):
                return True
            seen |= pending
            pending = {node for node in _users_of(pending) if _is_split(self._state, node)}
        return False

    def _is_parameter(self, value: Value, learnt: Collection[Node]) -> bool:
        """Return whether a value is computed from variables, not from examples, and can have the shape of the mean."""
        if value.node not in learnt or value.node in self._after or _is_split(self._state, value.node):
            return False
        one, other = (self._state.facts[v].shape for v in (value, self._norm.moments.mean.output()))
        fits = one is None or other is None or [d for d in one if d != 1] == [d for d in other if d != 1]
        return fits and self._state.facts[value].placement.kind == "replicated"


def _is_real(node: Node) -> bool:
    return bool(node.output_dtypes) and dtypes.base(node.output_dtypes[0]) in dtypes.FLOATING


def _leading_to(nodes: set[Node], is_end: Callable[[Node], bool]) -> set[Node]:
    """Return those of the nodes that an end reads, directly or through others of them."""
    read = [node for node in nodes if any(map(is_end, _users_of([node])))]
    return set(reachable(read, lambda node: [value.node for value in node.inputs if value.node in nodes]))


def _has_local_statistics(rewrite: Rewrite) -> bool:
    """Return whether hand-written ones are local: without micro-batches only fused ones are (`decompose`)."""
    return rewrite.plan.semantics.batch_norm == "local" and rewrite.plan.microbatches > 1


LOCAL_BATCH_NORM = Pass("local-batch-norm", _localize_batch_norm, _has_local_statistics, (Propagation,), (Propagation,))
