"""Pooling and its gradients are independent per image, so a split batch stays split."""

from __future__ import annotations

from autograph_rewrite.analysis.rules.base import Op, Rule, whole
from autograph_rewrite.analysis.rules.signature import Labels, Signature, every, fixed, signed

N4 = ("n", "", "", "")
N5 = ("n", "", "", "", "")


REFUSED = frozenset("n")


def _images(image: Labels, count: int, parameters: int = 0) -> Signature:
    return Signature((image,) * count + (None,) * parameters, (image,))


def _average_gradient(image: Labels) -> Signature:
    """The first operand is the shape of the pooled images."""
    return Signature((image, image), (image,), linear=(1,), sizes=frozenset({0}))


def _indexed(images: int, outputs: int, fragile: frozenset[str] = frozenset()) -> Rule:
    """Indices that count from the start of the batch mean something else in a block."""
    signature = Signature((N4,) * images, (N4,) * outputs, fragile=fragile)

    def describe(n: Op) -> Signature | None:
        """Images stay split unless the indices count from the start of the batch."""
        return None if n.attr("include_batch_in_index") else signature

    return signed(describe)


RULES: dict[str, Rule] = {
    "AvgPool": fixed(Signature((N4,), (N4,), linear=(0,))),
    "AvgPool3D": fixed(Signature((N5,), (N5,), linear=(0,))),
    "AvgPoolGrad": fixed(_average_gradient(N4)),
    "AvgPool3DGrad": fixed(_average_gradient(N5)),
    "MaxPool": fixed(_images(N4, 1)),
    "MaxPoolV2": fixed(_images(N4, 1, 2)),
    "MaxPool3D": fixed(_images(N5, 1)),
    **every(fixed(_images(N4, 3)), "MaxPoolGrad MaxPoolGradGrad"),
    **every(fixed(_images(N4, 3, 2)), "MaxPoolGradV2 MaxPoolGradGradV2"),
    "MaxPool3DGrad": fixed(_images(N5, 3)),
    "MaxPool3DGradGrad": fixed(_images(N5, 3)._replace(fragile=REFUSED)),
    "MaxPoolWithArgmax": _indexed(1, 2, REFUSED),
    **every(_indexed(3, 1), "MaxPoolGradWithArgmax MaxPoolGradGradWithArgmax"),
    # Their pooling regions are drawn at random, once for the batch.
    **every(
        Rule(whole, pinned=True),
        "FractionalMaxPool FractionalMaxPoolGrad FractionalAvgPool FractionalAvgPoolGrad",
    ),
}
