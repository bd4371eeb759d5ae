"""Pooling and its gradients are independent per image and channel; rows are split as for convolutions."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule
from autograph_rewrite.ops.rules.convolutions import images
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import every
from autograph_rewrite.ops.rules.spatial import X_SIZES, X, Y, windowed


def _apart(rank: int, inputs: int, linear: tuple[int, ...] = (), *, of_sizes: bool = False) -> Rule:
    """Return the rule of a pooling.

    Args:
        inputs: how many operands there are, all of them images.
        of_sizes: the first operand states the shape of the pooled images.
    """

    def text(n: Op) -> str:
        """Images stay split, and so do channels if windows and strides have size 1 along them."""
        at = images(n, rank, "c").split().index("c")
        reaches = not n.semantics.extent.is_known or n.attr("ksize")[at] != 1 or n.attr("strides")[at] != 1
        term = images(n, rank, "." if reaches else "c")
        return f"{'# ' if of_sizes else ''}{', '.join([term] * inputs)} -> {term}"

    return factors(text, linear=linear, fragile="c")


def _unless_from_start(text: str, fragile: str = "") -> Rule:
    def within_image(n: Op) -> str | None:
        """Images stay split unless the indices count from the start of the batch."""
        return None if n.attr("include_batch_in_index") else text

    return factors(within_image, fragile=fragile)


RULES: dict[str, Rule] = {
    "AvgPool": windowed(_apart(4, 1, linear=(0,)), (X,), Y),
    "AvgPool3D": _apart(5, 1, linear=(0,)),
    "AvgPoolGrad": windowed(_apart(4, 2, linear=(1,), of_sizes=True), (X_SIZES, Y), X),
    "AvgPool3DGrad": _apart(5, 2, linear=(1,), of_sizes=True),
    "MaxPool": windowed(_apart(4, 1), (X,), Y, lowest=True),
    "MaxPool3D": _apart(5, 1),
    "MaxPoolGrad": windowed(_apart(4, 3), (X, Y, Y), X, lowest=True),
    "MaxPoolGradGrad": _apart(4, 3),
    "MaxPool3DGrad": _apart(5, 3),
    "MaxPoolWithArgmax": _unless_from_start("n . . . -> n . . ., n . . .", fragile="n"),
    **every(
        _unless_from_start("n . . ., n . . ., n . . . -> n . . ."), "MaxPoolGradWithArgmax MaxPoolGradGradWithArgmax"
    ),
    **lines("""
n . . ., *, * -> n . . . : MaxPoolV2
n . . ., n . . ., n . . ., *, * -> n . . . : MaxPoolGradV2 MaxPoolGradGradV2
n . . . ., n . . . ., n . . . . -> n . . . .; fragile n : MaxPool3DGradGrad
# Their pooling regions are drawn at random, once for the batch.
once : FractionalMaxPool FractionalMaxPoolGrad FractionalAvgPool FractionalAvgPoolGrad
"""),
}
