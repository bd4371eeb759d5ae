"""Layers: biases, convolutions, softmax and its losses.

Only the images of a batch (`n`) are ever split in a convolution; its filter gradient sums over them.
"""

from __future__ import annotations

from autograph_rewrite.analysis.rules.base import Op, Rule
from autograph_rewrite.analysis.rules.signature import (
    Labels,
    Signature,
    axes,
    every,
    fixed,
    signed,
    without,
)

N4 = ("n", "", "", "")
N5 = ("n", "", "", "", "")
CLOSED4 = ("", "", "", "")
CLOSED5 = ("", "", "", "", "")
OVER_IMAGES = frozenset("n")


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


def _all_but_last(n: Op) -> Signature | None:
    """All but the last dimension stay split."""
    rank = n.rank(0)
    if not rank:
        return None
    labels = without(axes(rank), -1)
    return Signature((labels,), (labels,))


def _convolution(image: Labels, filters: Labels) -> Signature:
    return Signature((image, filters), (image,), linear=(0, 1))


def _input_gradient(image: Labels, filters: Labels) -> Signature:
    """The first operand is the input's shape."""
    inputs = (image, filters, image)
    return Signature(inputs, (image,), linear=(1, 2), sizes=frozenset({0}))


def _filter_gradient(image: Labels, filters: Labels) -> Signature:
    """The second operand is the filter's shape."""
    return Signature((image, None, image), (filters,), OVER_IMAGES, linear=(0, 2))


def _input_gradient_of_values(image: Labels, filters: Labels) -> Signature:
    """The first operand is the input itself, of which only the shape matters."""
    return Signature((image, filters, image), (image,), linear=(1, 2))


def _filter_gradient_of_values(image: Labels, filters: Labels) -> Signature:
    return Signature((image, None, image), (filters,), OVER_IMAGES, linear=(0, 2))


def _dilation_gradient(output: Labels) -> Signature:
    """Input, filter and output gradient; linear in the last."""
    return Signature((N4, ("", "", ""), N4), (output,), OVER_IMAGES, linear=(2,))


ROWS = Signature((("n", "-c"), ("n", "-c")), (("n",), ("n", "-c")), broadcast=True)
LABELLED_ROWS = Signature((("n", "-c"), ("n",)), (("n",), ("n", "-c")))
HITS = Signature((("n", ""), ("n",)), (("n",),))
HITS_OF = Signature((("n", ""), ("n",), None), (("n",),))

RULES: dict[str, Rule] = {
    **every(signed(_bias_add), "BiasAdd BiasAddV1"),
    "BiasAddGrad": signed(_bias_add_grad),
    **every(signed(_all_but_last), "Softmax LogSoftmax"),
    "SoftmaxCrossEntropyWithLogits": fixed(ROWS),
    "SparseSoftmaxCrossEntropyWithLogits": fixed(LABELLED_ROWS),
    "InTopK": fixed(HITS),
    "InTopKV2": fixed(HITS_OF),
    **every(fixed(_convolution(N4, CLOSED4)), "Conv2D DepthwiseConv2dNative"),
    **every(
        fixed(_input_gradient(N4, CLOSED4)),
        "Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput",
    ),
    **every(
        fixed(_filter_gradient(N4, CLOSED4)),
        "Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter",
    ),
    "Conv2DBackpropInputV2": fixed(_input_gradient_of_values(N4, CLOSED4)),
    "Conv2DBackpropFilterV2": fixed(_filter_gradient_of_values(N4, CLOSED4)),
    "Conv3D": fixed(_convolution(N5, CLOSED5)),
    "Conv3DBackpropInput": fixed(_input_gradient_of_values(N5, CLOSED5)),
    "Conv3DBackpropInputV2": fixed(_input_gradient(N5, CLOSED5)),
    "Conv3DBackpropFilter": fixed(_filter_gradient_of_values(N5, CLOSED5)),
    "Conv3DBackpropFilterV2": fixed(_filter_gradient(N5, CLOSED5)),
    "Dilation2D": fixed(Signature((N4, ("", "", "")), (N4,))),
    "Dilation2DBackpropInput": fixed(_dilation_gradient(N4)),
    "Dilation2DBackpropFilter": fixed(_dilation_gradient(("", "", ""))),
}
