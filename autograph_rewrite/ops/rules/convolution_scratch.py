"""The patches of images that TensorFlow's own CPU kernels of a convolution's gradients hold while they run.

    image [9, 9, 3], filter [3, 3, 3, 8]     a patch for each of 7 x 7 places: [49, 27], multiplied as a matrix

As `conv_grad_filter_ops.cc` and `conv_grad_input_ops.h` of TensorFlow do: as many images at a time as 30 MiB hold with
their operands, whether the batch has so many or not. oneDNN's kernels hold none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Shape = Sequence[int]

HELD = 30 * 2**20
"""Bytes that the operands of the images of one product may take."""
SMALL = 256 * 2**10
"""Bytes of operands for each thread from which on the gradient of an input takes its images one by one."""


def filter_patches(inputs: Sequence[Shape], outputs: Sequence[Shape], width: int, threads: int) -> int:
    """Return how many elements of patches the gradient of the filter holds; 0 where a shape is not known.

    Args:
        inputs: the shapes of its operands.
        outputs: the shape of its result.
        width: bytes of an element.
        threads: that share the work of one op.
    """
    return _patches(inputs, outputs[0], width)


def input_patches(inputs: Sequence[Shape], outputs: Sequence[Shape], width: int, threads: int) -> int:
    """Return how many elements of patches the gradient of the images holds; 0 where a shape is not known.

    Args:
        inputs: the shapes of its operands.
        outputs: the shape of its result.
        width: bytes of an element.
        threads: that share the work of one op.
    """
    kernel = inputs[1] if len(inputs) == 3 else ()
    return _patches(inputs, kernel, width, one_by_one=lambda operands: operands // threads >= SMALL // width)


def _patches(
    inputs: Sequence[Shape], kernel: Shape, width: int, one_by_one: Callable[[int], bool] | None = None
) -> int:
    if len(inputs) != 3 or len(inputs[2]) != 4 or len(kernel) != 4:
        return 0
    if not math.prod(inputs[2]) or not math.prod(kernel):
        return 0
    images, places = inputs[2][0], math.prod(inputs[2][1:3])
    patch, depth = math.prod(kernel[:3]), kernel[3]
    operands = places * patch + places * depth + patch * depth
    if one_by_one is not None and (images == 1 or one_by_one(operands)):
        return places * patch
    return math.ceil(HELD // width / operands) * places * patch
