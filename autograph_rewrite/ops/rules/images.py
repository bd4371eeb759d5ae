"""Image ops are independent per image (`n`); those that crop boxes out of a batch need it replicated."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.signature import (
    Labels,
    Signature,
    axes,
    every,
    fixed,
    signed,
    without,
)

IMAGE = ("n", "", "", "")
VOLUME = ("n", "", "", "", "")


def _apart(closed: int) -> Rule:
    """Return the rule of an op on stacks of images, whose last `closed` dimensions are one image."""

    def describe(n: Op) -> Signature | None:
        """All dimensions in front of one image stay split."""
        rank = n.rank(0)
        if rank is None or rank < closed:
            return None
        labels: Labels = without(axes(rank), *range(-closed, 0)) if closed else axes(rank)
        return Signature((labels,) + (None,) * (len(n.inputs) - 1), (labels,))

    return signed(describe)


def _resize(parameters: int) -> Rule:
    """Interpolation is linear in the images."""
    return fixed(Signature((IMAGE,) + (None,) * parameters, (IMAGE,), linear=(0,)))


def _resize_gradient(parameters: int = 0) -> Rule:
    """The second operand is the image that was resized, of which only the shape matters."""
    return fixed(Signature((IMAGE, IMAGE) + (None,) * parameters, (IMAGE,), linear=(0,)))


def _projected(n: Op) -> Signature:
    """One transformation for all images, or one for each."""
    return Signature((IMAGE, ("n", "")) + (None,) * (len(n.inputs) - 2), (IMAGE,), broadcast=True)


def _suppressed(n: Op) -> Signature | None:
    """Boxes [n, k, q, 4] and scores [n, k, classes]; `clip_boxes` and the rest are parameters."""
    inputs: tuple[Labels | None, ...] = (("n", "", "", ""), ("n", "", ""), None, None, None, None)
    return Signature(inputs, (("n", "", ""), ("n", ""), ("n", ""), ("n",)))


WHOLE = Rule(whole, lambda n: n.static)

RULES: dict[str, Rule] = {
    # The kernel rounds to the images' element type only where it returns integers.
    **every(_resize(1), "ResizeBilinear ResizeBicubic ResizeArea ResizeNearestNeighbor"),
    "ResizeNearestNeighborGrad": _resize(1),
    **every(_resize_gradient(), "ResizeBilinearGrad ResizeBicubicGrad"),
    "ScaleAndTranslate": _resize(3),
    "ScaleAndTranslateGrad": _resize_gradient(2),
    "ExtractImagePatches": fixed(Signature((IMAGE,), (IMAGE,), linear=(0,))),
    "ExtractVolumePatches": fixed(Signature((VOLUME,), (VOLUME,), linear=(0,))),
    **every(fixed(Signature((IMAGE,), (IMAGE,), linear=(0,))), "SpaceToDepth DepthToSpace"),
    **every(signed(_projected), "ImageProjectiveTransformV2 ImageProjectiveTransformV3"),
    "CombinedNonMaxSuppression": signed(_suppressed),
    "AdjustContrastv2": _apart(3),
    **every(_apart(1), "AdjustHue AdjustSaturation RGBToHSV HSVToRGB"),
    "DrawBoundingBoxes": fixed(Signature((IMAGE, ("n", "", "")), (IMAGE,))),
    "DrawBoundingBoxesV2": fixed(Signature((IMAGE, ("n", "", ""), None), (IMAGE,))),
    # Space moves into the batch block by block, so the pieces of one example lie far apart.
    **every(WHOLE, "SpaceToBatchND BatchToSpaceND SpaceToBatch BatchToSpace"),
    # Boxes name their image by its index in the whole batch.
    **every(WHOLE, "CropAndResize CropAndResizeGradImage CropAndResizeGradBoxes"),
    **every(
        WHOLE,
        "NonMaxSuppression NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4",
        "NonMaxSuppressionV5 NonMaxSuppressionWithOverlaps ExtractGlimpse ExtractGlimpseV2",
        "DecodeJpeg DecodePng DecodeImage DecodeBmp DecodeGif EncodeJpeg EncodePng",
        "ExtractJpegShape DecodeAndCropJpeg",
    ),
}
