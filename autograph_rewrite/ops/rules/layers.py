"""Layers: biases, softmax and its losses."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import (
    Labels,
    Signature,
    axes,
    every,
    signed,
)


def _channels(n: Op, rank: int) -> int:
    """Return the dimension that a bias is added along."""
    if n.op == "BiasAddV1":
        return rank - 1
    return 1 if n.attr("data_format") == b"NCHW" else rank - 1


def _bias_labels(n: Op) -> Labels | None:
    rank = n.rank(0)
    if rank is None or rank < 2:
        return None
    channels = _channels(n, rank)
    return tuple("channel" if i == channels else label for i, label in enumerate(axes(rank)))


def _bias_add(n: Op) -> Signature | None:
    """Every dimension stays split; along the channels the bias is cut likewise."""
    labels = _bias_labels(n)
    return None if labels is None else Signature((labels, ("channel",)), (labels,), additive=True)


def _bias_add_grad(n: Op) -> Signature | None:
    """Split channels stay split; any other dimension is summed over."""
    labels = _bias_labels(n)
    if labels is None:
        return None
    return Signature((labels,), (("channel",),), frozenset(labels) - {"channel"}, linear=(0,))


RULES: dict[str, Rule] = {
    **every(signed(_bias_add), "BiasAdd BiasAddV1"),
    "BiasAddGrad": signed(_bias_add_grad),
    **every(factors("... -c -> ... -c"), "Softmax LogSoftmax"),
    "SoftmaxCrossEntropyWithLogits": factors("n -c, n -c -> n, n -c", broadcast=True),
    "SparseSoftmaxCrossEntropyWithLogits": factors("n -c, n -> n, n -c"),
    "InTopK": factors("n ., n -> n"),
    "InTopKV2": factors("n ., n, * -> n"),
}
