"""Layers: biases, softmax and its losses."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import every


def _channels(n: Op) -> str:
    """Return the dimensions of the value to which a bias is added."""
    return "n c ..." if n.attr("data_format", b"") == b"NCHW" else "n ... c"


def _bias_add(n: Op) -> str:
    """Every dimension stays split; if that is the channels, the bias is split too."""
    return f"{_channels(n)}, c -> {_channels(n)}"


def _bias_add_grad(n: Op) -> str:
    """Split channels stay split; any other dimension is summed over."""
    return f"{_channels(n)} -> c | n ..."


RULES = {
    **every(factors(_bias_add, additive=True), "BiasAdd BiasAddV1"),
    "BiasAddGrad": factors(_bias_add_grad, linear=(0,)),
    **lines("""
... -c -> ... -c : Softmax LogSoftmax
n -c, n -c -> n, n -c; stretches n -c : SoftmaxCrossEntropyWithLogits
n -c, n -> n, n -c : SparseSoftmaxCrossEntropyWithLogits
n ., n -> n : InTopK
n ., n, * -> n : InTopKV2
"""),
}
