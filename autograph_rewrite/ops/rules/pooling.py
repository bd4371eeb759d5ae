"""Pooling and its gradients are independent per image and channel; rows are split as those of convolutions are."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.convolutions import images
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import Signature, every, signed
from autograph_rewrite.ops.rules.spatial import X_SIZES, X, Y, windowed

N4 = ("n", "", "", "")


REFUSED = frozenset("n")


def _apart(rank: int, inputs: int, linear: tuple[int, ...] = (), sizes: frozenset[int] = frozenset()) -> Rule:
    """Return the rule of a pooling.

    Args:
        rank: of the images.
        inputs: how many operands there are, all of images.
        sizes: those that state the shape of images.
    """

    def describe(n: Op) -> Signature:
        """Images stay split, and channels over which no window reaches."""
        first = n.attr("data_format", b"NHWC").startswith(b"NC")
        at = 1 if first else rank - 1
        reaches = not n.semantics.extent.is_known or n.attr("ksize")[at] != 1 or n.attr("strides")[at] != 1
        labels = images(n, rank, "" if reaches else "c")
        return Signature((labels,) * inputs, (labels,), linear=linear, sizes=sizes, fragile=frozenset("c"))

    return signed(describe)


def _indexed(images: int, outputs: int, fragile: frozenset[str] = frozenset()) -> Rule:
    """Indices that count from the start of the batch mean something else in a block."""
    signature = Signature((N4,) * images, (N4,) * outputs, fragile=fragile)

    def describe(n: Op) -> Signature | None:
        """Images stay split unless the indices count from the start of the batch."""
        return None if n.attr("include_batch_in_index") else signature

    return signed(describe)


RULES: dict[str, Rule] = {
    "AvgPool": windowed(_apart(4, 1, linear=(0,)), (X,), Y),
    "AvgPool3D": _apart(5, 1, linear=(0,)),
    # The first operand of these gradients is the shape of the pooled images.
    "AvgPoolGrad": windowed(_apart(4, 2, linear=(1,), sizes=frozenset({0})), (X_SIZES, Y), X),
    "AvgPool3DGrad": _apart(5, 2, linear=(1,), sizes=frozenset({0})),
    "MaxPool": windowed(_apart(4, 1), (X,), Y),
    "MaxPoolV2": factors("n . . ., *, * -> n . . ."),
    "MaxPool3D": _apart(5, 1),
    "MaxPoolGrad": windowed(_apart(4, 3), (X, Y, Y), X),
    "MaxPoolGradGrad": _apart(4, 3),
    **every(factors("n . . ., n . . ., n . . ., *, * -> n . . ."), "MaxPoolGradV2 MaxPoolGradGradV2"),
    "MaxPool3DGrad": _apart(5, 3),
    "MaxPool3DGradGrad": factors("n . . . ., n . . . ., n . . . . -> n . . . .", fragile="n"),
    "MaxPoolWithArgmax": _indexed(1, 2, REFUSED),
    **every(_indexed(3, 1), "MaxPoolGradWithArgmax MaxPoolGradGradWithArgmax"),
    # Their pooling regions are drawn at random, once for the batch.
    **every(
        Rule(whole, pinned=True),
        "FractionalMaxPool FractionalMaxPoolGrad FractionalAvgPool FractionalAvgPoolGrad",
    ),
}
