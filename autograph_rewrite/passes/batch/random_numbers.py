"""Cut random numbers into blocks after the draw: with `random: exact`, all replicas draw the numbers of one device.

    before   noise = RandomNormal([b, 4]) ──► MatMul(noise, w)        the noise is whole, and so is all that follows
    after    noise ──► BroadcastTo(noise, [b, 4]) ──► MatMul          whole only here; each replica has its rows

A mask that meets blocks is cut by its reader anyway; the noise that a generator starts from meets none. The BroadcastTo
keeps the shape, so it forwards its operand. Readers that need the whole noise read the draw itself.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.analysis.propagate import Propagation, revise
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ops.facts.placement import REPLICATED
from autograph_rewrite.ops.facts.symbolic_dims import is_local
from autograph_rewrite.ops.rules import random
from autograph_rewrite.ops.rules.base import OWN_VALUE
from autograph_rewrite.ops.rules.random import SHAPES
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite, Site


def split_draws(state: Propagation) -> Propagation:
    """Let readers of a draw whose shape counts a block read the rows of their block; return the revised placements."""
    drawn = [node for node in state.order if _is_drawn_whole(state, node)]
    if not drawn:
        return state
    cuts = [(node, _cut(node)) for node in drawn]
    state = revise(state)
    back = [cut for node, cut in cuts if _give_back(state, node, cut)]
    for cut in back:
        if not cut.output().uses:
            state.graph.erase(cut)
    return revise(state) if back else state


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
    """Let readers that need the whole read the draw itself; return whether there are any."""
    whole = state.facts[cut.output()].placement == REPLICATED
    uses = cut.output().uses
    back = [(n, i) for n, i in uses if whole or state.transfers[n].operand_reshards.get(i) == REPLICATED]
    for reader, index in back:
        reader.set_input(index, node.output())
    return bool(back)


def _split(rewrite: Rewrite) -> None:
    """Replicate random numbers only where they are drawn, and split them afterwards."""
    rewrite.put(split_draws(rewrite.state))


SPLIT_DRAWS = Pass("split-draws", _split, needs=(Propagation,), gives=(Propagation,))


# Give the random ops of each replica a different seed, where each draws only its block (`random: independent`).
#
#     before   %u = RandomUniform(%shape)  seed2=7              each: the same numbers on every replica
#     after    %u = RandomUniform(%shape)  seed2=7 | 7 ^ k ...   one seed per replica
#
#     before   %u = StatelessRandomUniformV2(%shape, %key, %counter, %alg)
#     after    %u = StatelessRandomUniformV2(%shape, %key ^ own, %counter, %alg)
#
# Replica 0 keeps the original stream. An op without seeds (both 0) already draws a fresh seed in every instance. A seed
# that differs between replicas in the program (`ar.replica_id`) is kept.


STRIDE = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: its multiples differ in all bits, unlike the seeds that people choose."""
SEED_INPUTS = ("seed", "key")


def _decorrelate(rewrite: Rewrite) -> None:
    """Give the random ops that draw block by block a different seed on each replica (`random: independent`)."""
    for node in rewrite.state.order:
        if node.op not in random.RULES or not rewrite.fact(node.output()).placement.differs:
            continue
        names = [argument.name for argument in get_op(node.op).inputs]
        index = next((names.index(name) for name in SEED_INPUTS if name in names), None)
        if index is not None and rewrite.fact(node.inputs[index]).placement != OWN_VALUE:
            _give_own_key(rewrite, node, index)
        elif index is None:
            _give_own_seed(rewrite, node)


def own_bits(replica: int, width: int) -> int:
    """Return the signed number of `width` bits that replica `replica` mixes into its seed; 0 for replica 0."""
    bits = (STRIDE * replica) % 2**64 >> (64 - width)
    return bits - 2**width if bits >= 2 ** (width - 1) else bits


def _give_own_seed(rewrite: Rewrite, node: Node) -> None:
    first, second = node.attr("seed", 0), node.attr("seed2", 0)
    if first == 0 == second:
        return
    # If both were 0, the op would have no seed.
    seeds = [second ^ own_bits(r, 64) or (0 if first else STRIDE >> 1) for r in range(rewrite.replicas)]
    node.set_raw_attr("seed2", rewrite.each([encode("int", seed) for seed in rewrite.own(seeds)]))


def _give_own_key(rewrite: Rewrite, node: Node, index: int) -> None:
    seed = node.inputs[index]
    dtype = dtypes.numpy_dtype(seed.dtype)
    assert dtype is not None  # an integer, by the op's definition
    name = f"{node.name}/{'key' if seed.dtype == dtypes.UINT64 else 'seed'}"
    width = 8 * dtype.itemsize
    numbers = [own_bits(r, width) % 2**width for r in range(rewrite.replicas)]
    # A seed is a pair, and its second number is mixed; a key is one number.
    unsigned = np.dtype(f"u{dtype.itemsize}")
    contents = [np.array([n] if seed.dtype == dtypes.UINT64 else [0, n], unsigned).view(dtype) for n in numbers]
    own = rewrite.const_each(contents, dtype, name=f"{name}/of_replica", near=seed)
    mixed = rewrite.add("BitwiseXor", [seed, own], Site(name, EACH, node))
    node.set_input(index, mixed.output())


DECORRELATE_RANDOMNESS = Pass("decorrelate-randomness", _decorrelate, needs=(Homes,))
