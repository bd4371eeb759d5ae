"""Image ops are independent per image (`n`); those that crop boxes out of a batch need it replicated."""

from __future__ import annotations

from autograph_rewrite.ops.rules.factors import lines

RULES = lines("""
# Interpolation is linear; the kernel rounds to the images' element type only where it returns integers.
n . . ., * -> n . . .; linear 0 : ResizeBilinear ResizeBicubic ResizeArea ResizeNearestNeighbor
    ResizeNearestNeighborGrad
# The second operand is the image that was resized, of which only the shape matters.
n . . ., n . . . -> n . . .; linear 0 : ResizeBilinearGrad ResizeBicubicGrad
n . . ., *, *, * -> n . . .; linear 0 : ScaleAndTranslate
n . . ., n . . ., *, * -> n . . .; linear 0 : ScaleAndTranslateGrad
n . . . -> n . . .; linear 0 : ExtractImagePatches SpaceToDepth DepthToSpace
n . . . . -> n . . . .; linear 0 : ExtractVolumePatches
# One transformation for all images, or one for each.
n . . ., n . -> n . . .; stretches n : ImageProjectiveTransformV2 ImageProjectiveTransformV3
# Boxes [n, k, q, 4] and scores [n, k, classes].
n . . ., n . ., *, *, *, * -> n . ., n ., n ., n : CombinedNonMaxSuppression
... -h -w -c, * -> ... -h -w -c : AdjustContrastv2
... -c, * -> ... -c : AdjustHue AdjustSaturation
... -c -> ... -c : RGBToHSV HSVToRGB
n . . ., n . . -> n . . . : DrawBoundingBoxes
n . . ., n . ., * -> n . . . : DrawBoundingBoxesV2
# Space moves into the batch block by block, so the pieces of one example lie far apart.
whole : SpaceToBatchND BatchToSpaceND SpaceToBatch BatchToSpace
# Boxes name their image by its index in the whole batch.
whole : CropAndResize CropAndResizeGradImage CropAndResizeGradBoxes
whole : NonMaxSuppression NonMaxSuppressionV2 NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5
    NonMaxSuppressionWithOverlaps ExtractGlimpse ExtractGlimpseV2 DecodeJpeg DecodePng DecodeImage DecodeBmp DecodeGif
    EncodeJpeg EncodePng ExtractJpegShape DecodeAndCropJpeg
""")
