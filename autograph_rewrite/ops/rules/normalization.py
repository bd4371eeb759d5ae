"""Batch normalisation mixes the examples of a batch, so in training `decompose` rewrites it.

`batch_norm: sync` takes the statistics of the whole batch: the op is decomposed into sums, which are partial.
`batch_norm: local` keeps the op, marked as `STATISTICS` by the same pass. Each block's statistics are then
contributions (partial). The pass divides those that feed moving averages by the number of replicas, so that these
average the replicas' mean; the op's gradient reads its block's statistics unchanged.

Each channel is normalised by itself: an op that is split along channels stays, with its parameters split, too.
"""

from __future__ import annotations

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Placement, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import is_local
from autograph_rewrite.ops.rules.base import Op, Placed, Reshard, Rule, block_of, others_whole, whole
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.marked import STATISTICS, kind_of
from autograph_rewrite.ops.rules.signature import every


def place_forward(n: Op) -> Placed:
    """Normalise images by the statistics of the batch, or by given ones (inference); each channel by itself."""
    dim, own = n.placement(0).dim if n.placement(0).is_split else -1, is_of_block(n)
    if dim < 0 or (dim and (own or not n.semantics.extent.is_known)):
        return whole(n)
    if dim == _channel(n):
        return _per_channel(n, images=1, outputs=_SPLIT_STATISTICS[: len(n.output_dtypes) - 1])
    statistics = PARTIAL if own else REPLICATED
    outputs = (split(dim), *[statistics] * (len(n.output_dtypes) - 1))
    return Placed(outputs, others_whole(n, 0), decompose=_to_be_decomposed(n))


def _to_be_decomposed(n: Op) -> bool:
    return bool(n.attr("is_training")) and not is_of_block(n)


def is_of_block(n: Op | Node) -> bool:
    """Return whether a batch normalisation, or its gradient, works on its block only."""
    return kind_of(n) == STATISTICS


def _channel(n: Op) -> int:
    """Return the dimension of the channels, -1 where it is not known."""
    return 1 if n.attr("data_format", b"NHWC").startswith(b"NC") else (n.rank(0) or 0) - 1


_SPLIT_STATISTICS: tuple[Placement, ...] = (*[split(0)] * 4, PARTIAL)
"""Means and variances, and the vector that the kernel keeps for its gradient, which no other op can read."""


def _per_channel(n: Op, images: int, outputs: tuple[Placement, ...]) -> Placed:
    """Place an op that works on each channel by itself.

    Args:
        images: how many of its operands are images; the others are vectors of channels.
        outputs: placements of its outputs after the images.
    """
    dim, size = _channel(n), next(f.split_size for f in n.inputs[:images] if f.placement == split(_channel(n)))
    wants: dict[int, Reshard] = {}
    for i, fact in enumerate(n.inputs):
        at = dim if i < images else 0
        if fact.shape == (0,) or (i == _RESERVE and (fact.placement == PARTIAL or not fact.placement.differs)):
            continue
        block = block_of(at, size)
        if block is None or n.semantics.extent.units is None:  # the kernel refuses a block without channels
            return whole(n)
        if fact.placement != split(at) or fact.split_size != size:
            wants[i] = block
    return Placed((split(dim), *outputs), wants)


_RESERVE = 5


def place_gradient(n: Op) -> Placed:
    """Gradients of scale and offset are sums over the images; the images' gradient stays split."""
    cut = [n.placement(i).dim for i in (0, 1) if n.placement(i).is_split]
    dims = [dim for dim in cut if dim == 0 or n.semantics.extent.is_known]
    if not dims or (dims[0] and is_of_block(n)):
        return whole(n)
    dim = dims[0]
    if dim == _channel(n):
        return _per_channel(n, images=2, outputs=(split(0), split(0), REPLICATED, REPLICATED))
    size = next(n.inputs[i].split_size for i in (0, 1) if n.placement(i) == split(dim))
    operand_reshards: dict[int, Reshard] = {}
    block = block_of(dim, size)
    for i in (0, 1):
        if n.placement(i) == split(dim) and n.inputs[i].split_size == size:
            continue
        if block is None:
            return whole(n)
        operand_reshards[i] = block
    of_block = [i for i in range(3, len(n.inputs)) if is_of_block(n) and n.placement(i) == PARTIAL]
    operand_reshards |= others_whole(n, 0, 1, *of_block)
    outputs: tuple[Placement, ...] = (split(dim), PARTIAL, PARTIAL, REPLICATED, REPLICATED)
    return Placed(outputs, operand_reshards, decompose=_to_be_decomposed(n))


def shape_forward(n: Op) -> tuple[Shape | None, ...]:
    """Return the shapes of images and statistics."""
    return (n.shape(0), *_vectors(n, n.shape(0)))


def shape_gradient(n: Op) -> tuple[Shape | None, ...]:
    """Return the shapes of the gradients of images and statistics."""
    image = n.shape(1) if n.shape(1) is not None else n.shape(0)
    return (image, *_vectors(n, image))


def _vectors(n: Op, image: Shape | None) -> tuple[Shape | None, ...]:
    """Return the shapes of the outputs after the images: a number per channel, or as stated.

    The output that a kernel keeps for its gradient is a vector in oneDNN's kernel, and a number in others.
    """
    channels = image[_channel(n)] if image else None
    return tuple(
        (channels,) if is_local(channels) and stated != (0,) and at < _RESERVE else stated
        for at, stated in enumerate(n.static[1:], 1)
    )


RULES: dict[str, Rule] = {
    **every(Rule(place_forward, shape_forward), "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"),
    **every(Rule(place_gradient, shape_gradient), "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3"),
    # Local response normalisation looks at neighbouring channels only.
    "LRN": factors("n h w . -> n h w ."),
    "LRNGrad": factors("n h w ., n h w ., n h w . -> n h w .", linear=(0,)),
}
