"""Batch normalisation mixes the examples of a batch, so in training `decompose` rewrites it.

`batch_norm: sync` takes the statistics of the whole batch: the op is decomposed into sums, which are partial.
`batch_norm: local` keeps the op, marked `BLOCK_STATISTICS` by the same pass. Each block's statistics are then
contributions (partial); the pass divides those that feed moving averages by the number of replicas, so what
is averaged is the replicas' mean, and the op's own gradient reads its block's as they are.
"""

from __future__ import annotations

from autograph_rewrite.analysis.facts.placement import PARTIAL, REPLICATED, Placement, Shape, split
from autograph_rewrite.analysis.rules.base import Op, Placed, Reshard, Rule, block_of, whole
from autograph_rewrite.analysis.rules.signature import Signature, every, fixed

BLOCK_STATISTICS = "_block_statistics"
"""Attribute of a batch normalisation, or of its gradient, that works on its own block only."""


def place_forward(n: Op) -> Placed:
    """Normalise images by the statistics of the batch, or by given ones (inference)."""
    if n.placement(0) != split(0):
        return whole(n)
    statistics = PARTIAL if n.attr(BLOCK_STATISTICS, False) else REPLICATED
    outputs = (split(0), *[statistics] * (len(n.output_dtypes) - 1))
    operand_reshards: dict[int, Reshard] = {i: REPLICATED for i in range(1, 5) if n.placement(i).differs}
    return Placed(outputs, operand_reshards, decompose=_to_be_decomposed(n))


def _to_be_decomposed(n: Op) -> bool:
    return bool(n.attr("is_training")) and not n.attr(BLOCK_STATISTICS, False)


def place_gradient(n: Op) -> Placed:
    """Gradients of scale and offset sum over the images; the images' gradient stays split."""
    blocks = [n.inputs[i].split_size for i in (0, 1) if n.placement(i) == split(0)]
    if not blocks:
        return whole(n)
    operand_reshards: dict[int, Reshard] = {}
    block = block_of(0, blocks[0])
    for i in (0, 1):
        if n.placement(i) == split(0) and n.inputs[i].split_size == blocks[0]:
            continue
        if block is None:
            return whole(n)
        operand_reshards[i] = block
    for i in range(2, len(n.inputs)):
        of_block = i > 2 and n.attr(BLOCK_STATISTICS, False)
        if n.placement(i).differs and not (of_block and n.placement(i) == PARTIAL):
            operand_reshards[i] = REPLICATED
    outputs: tuple[Placement, ...] = (split(0), PARTIAL, PARTIAL, REPLICATED, REPLICATED)
    return Placed(outputs, operand_reshards, decompose=_to_be_decomposed(n))


def shape_forward(n: Op) -> tuple[Shape | None, ...]:
    """Images as they came in, statistics per channel."""
    return (n.shape(0), *n.static[1:])


def shape_gradient(n: Op) -> tuple[Shape | None, ...]:
    """The images' gradient has their shape."""
    image = n.shape(1) if n.shape(1) is not None else n.shape(0)
    return (image, *n.static[1:])


# Local response normalisation looks at neighbouring channels only.
PIXELS = ("n", "h", "w", "")
FORWARD = Rule(place_forward, shape_forward)
GRADIENT = Rule(place_gradient, shape_gradient)

RULES: dict[str, Rule] = {
    **every(FORWARD, "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"),
    **every(GRADIENT, "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3"),
    "LRN": fixed(Signature((PIXELS,), (PIXELS,))),
    "LRNGrad": fixed(Signature((PIXELS,) * 3, (PIXELS,), linear=(0,))),
}
