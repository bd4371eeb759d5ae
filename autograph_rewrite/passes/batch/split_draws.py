"""Slice random numbers where they are drawn: with `random: exact`, all replicas draw the numbers of one device.

    before   noise = RandomNormal([b, 4]) ──► MatMul(noise, w)        the noise is whole, and so is all that follows
    after    noise ──► BroadcastTo(noise, [b, 4]) ──► MatMul          whole only here; each replica has its rows

Among blocks a mask is cut by who reads it; noise that a generator begins with meets none. Of the size that it has
anyway, the BroadcastTo hands on what it reads. What still wants all of it reads what was drawn.
"""

from __future__ import annotations

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.facts.symbolic_dims import is_local
from autograph_rewrite.ops.rules.random import SHAPES
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite


def split_draws(state: Propagation) -> Propagation:
    """Let the readers of draws whose shape counts a block read their rows; return the placements as they are then."""
    drawn = [node for node in state.order if _is_drawn_whole(state, node)]
    if not drawn:
        return state
    cuts = [(node, _cut(node)) for node in drawn]
    state = revise(state)
    if not (back := [(node, cut) for node, cut in cuts if _give_back(state, node, cut)]):
        return state
    for _, cut in back:
        if not cut.output().uses:
            state.graph.erase(cut)
    return revise(state)


def _is_drawn_whole(state: Propagation, node: Node) -> bool:
    index = SHAPES.get(node.op)
    if index is None or not node.output().uses:
        return False
    transferred = state.transfers[node]
    shape, made = transferred.inputs[index], transferred.outputs[0]
    count = sum(is_local(size) for size in shape.value or ())
    return shape.is_local and count == 1 and made.placement == REPLICATED


def _cut(node: Node) -> Node:
    drawn, shape = node.output(), node.inputs[SHAPES[node.op]]
    cut = Builder.at(node).node("BroadcastTo", drawn, shape, what="rows")
    for reader, index in drawn.uses:
        if reader is not cut:
            reader.set_input(index, cut.output())
    return cut


def _give_back(state: Propagation, node: Node, cut: Node) -> bool:
    """Let what wants all of it read the draw itself; return whether there is such a reader."""
    whole = state.facts[cut.output()].placement == REPLICATED
    back = [use for use in cut.output().uses if whole or state.operand_reshards(use.node).get(use.index) == REPLICATED]
    for reader, index in back:
        reader.set_input(index, node.output())
    return bool(back)


def _run(rewrite: Rewrite) -> None:
    """Replicate random numbers only where they are drawn, and split them afterwards."""
    rewrite.put(split_draws(rewrite.get(Propagation)))


SPLIT_DRAWS = Pass("split-draws", _run, needs=(Propagation,), gives=(Propagation,))
