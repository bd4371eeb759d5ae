"""Image ops are independent per image (`n`); those that crop boxes out of a batch need it replicated."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import Signature, every, signed

IMAGE = ("n", "", "", "")


def _projected(n: Op) -> Signature:
    """One transformation for all images, or one for each."""
    return Signature((IMAGE, ("n", "")) + (None,) * (len(n.inputs) - 2), (IMAGE,), broadcast=True)


WHOLE = Rule(whole, lambda n: n.static)

RULES: dict[str, Rule] = {
    # Interpolation is linear; the kernel rounds to the images' element type only where it returns integers.
    **every(
        factors("n . . ., * -> n . . .", linear=(0,)),
        "ResizeBilinear ResizeBicubic ResizeArea ResizeNearestNeighbor ResizeNearestNeighborGrad",
    ),
    # The second operand is the image that was resized, of which only the shape matters.
    **every(factors("n . . ., n . . . -> n . . .", linear=(0,)), "ResizeBilinearGrad ResizeBicubicGrad"),
    "ScaleAndTranslate": factors("n . . ., *, *, * -> n . . .", linear=(0,)),
    "ScaleAndTranslateGrad": factors("n . . ., n . . ., *, * -> n . . .", linear=(0,)),
    **every(factors("n . . . -> n . . .", linear=(0,)), "ExtractImagePatches SpaceToDepth DepthToSpace"),
    "ExtractVolumePatches": factors("n . . . . -> n . . . .", linear=(0,)),
    **every(signed(_projected), "ImageProjectiveTransformV2 ImageProjectiveTransformV3"),
    # Boxes [n, k, q, 4] and scores [n, k, classes].
    "CombinedNonMaxSuppression": factors("n . . ., n . ., *, *, *, * -> n . ., n ., n ., n"),
    "AdjustContrastv2": factors("... -h -w -c, * -> ... -h -w -c"),
    **every(factors("... -c, * -> ... -c"), "AdjustHue AdjustSaturation"),
    **every(factors("... -c -> ... -c"), "RGBToHSV HSVToRGB"),
    "DrawBoundingBoxes": factors("n . . ., n . . -> n . . ."),
    "DrawBoundingBoxesV2": factors("n . . ., n . ., * -> n . . ."),
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
