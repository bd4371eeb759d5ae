"""The patches of images that TensorFlow's own CPU kernels of a convolution's gradients hold while they run.

    image [9, 9, 3], filter [3, 3, 3, 8]     a patch for each of 7 x 7 places: [49, 27], multiplied as a matrix

As `conv_grad_filter_ops.cc` and `conv_grad_input_ops.h` of TensorFlow do: as many images at a time as 30 MiB hold with
their operands, whether the batch has so many or not. oneDNN's kernels hold none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]

HELD = 30 * 2**20
"""Bytes that the operands of the images of one product may take."""
SMALL = 256 * 2**10
"""Bytes of operands for each thread from which on the gradient of an input takes its images one by one."""

_FILTER, _INPUT = "Conv2DBackpropFilter", "Conv2DBackpropInput"
GRADIENTS = frozenset((_FILTER, _INPUT))


def patch_elements(op: str, inputs: Sequence[Shape], outputs: Sequence[Shape], width: int, threads: int) -> int:
    """Return how many elements of patches a kernel holds; 0 for other ops, and where a shape is not known.

    Args:
        op: its name.
        inputs: the shapes of its operands.
        outputs: the shape of its result.
        width: bytes of an element.
        threads: that share the work of one op.
    """
    if op not in GRADIENTS or len(inputs) != 3 or len(inputs[2]) != 4 or not math.prod(inputs[2]):
        return 0
    kernel = outputs[0] if op == _FILTER else inputs[1]
    if len(kernel) != 4 or not math.prod(kernel):
        return 0
    images, places = inputs[2][0], math.prod(inputs[2][1:3])
    patch, depth = math.prod(kernel[:3]), kernel[3]
    operands = places * patch + places * depth + patch * depth
    if op == _INPUT and (images == 1 or operands // threads >= SMALL // width):
        return places * patch
    return math.ceil(HELD // width / operands) * places * patch
