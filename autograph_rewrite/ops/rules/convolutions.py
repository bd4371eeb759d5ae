"""Convolutions: split along images, channels or rows.

    Conv2D                 n..c , ..co        -> n..o     split n or o: stays; split c: contracted, so it is partial
    Conv2DBackpropInput    n..c , ..co , n..o -> n..c     the first operand is the input's shape
    Conv2DBackpropFilter   n..c , ..co , n..o -> ..co     the second is the filter's; over images it sums

Channels are split where the sizes of blocks are known. In a grouped convolution the filter has other channels than the
images, so only images are split. Rows and columns are split where blocks can be read with rows of their neighbours
(`spatial`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autograph_rewrite.ops.facts.symbolic_dims import Dim, to_global
from autograph_rewrite.ops.rules.base import Attr, Numbers, Op, Rule
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.spatial import FILTER, FILTER_SIZES, X_SIZES, X, Y, windowed

# Patches of images that TensorFlow's Eigen CPU kernels of convolution gradients hold while they run.
#
#     image [9, 9, 3], filter [3, 3, 3, 8]     a patch for each of 7 x 7 places: [49, 27], multiplied as a matrix
#
# Source: `conv_grad_filter_ops.cc`, `conv_grad_input_ops.h` of TensorFlow. They hold as many images at a time as fit
# into 30 MiB with their operands, even if the batch has fewer. oneDNN's kernels hold none.


Shape = Sequence[int]

HELD = 30 * 2**20
"""Bytes that the operands of one product of several images may take."""
SMALL = 256 * 2**10
"""Bytes of operands per thread; with more, the gradient of an input takes images one by one."""


def filter_patches(inputs: Sequence[Shape], outputs: Sequence[Shape], width: int, threads: int) -> int:
    """Return how many elements of patches the gradient of the filter holds; 0 where a shape is not known.

    Args:
        width: bytes of an element.
        threads: that share the work of one op.
    """
    return _patches(inputs, outputs[0], width)


def input_patches(inputs: Sequence[Shape], outputs: Sequence[Shape], width: int, threads: int) -> int:
    """Return the same for the gradient of the images, which may take images one by one."""
    return _patches(inputs, inputs[1] if len(inputs) == 3 else (), width, threads)


def _patches(inputs: Sequence[Shape], kernel: Shape, width: int, threads: int = 0) -> int:
    if len(inputs) != 3 or len(inputs[2]) != 4 or len(kernel) != 4 or not math.prod((*inputs[2], *kernel)):
        return 0
    images, places = inputs[2][0], math.prod(inputs[2][1:3])
    patch, depth = math.prod(kernel[:3]), kernel[3]
    operands = places * patch + places * depth + patch * depth
    if threads and (images == 1 or operands // threads >= SMALL // width):
        return places * patch
    return math.ceil(HELD // width / operands) * places * patch


def images(n: Op, rank: int, channel: str) -> str:
    """Return the factors of images: `n`, `channel` for the channels, and "." for pixels, which cannot be split."""
    pixels = " .".join([""] * (rank - 1))
    first = n.attr("data_format", b"NHWC").startswith(b"NC")
    return f"n {channel}{pixels}" if first else f"n{pixels} {channel}"


def _terms(n: Op, rank: int, depthwise: bool) -> tuple[str, str, str]:
    """Return the factors of the input, the filter and the output of a convolution."""
    sides = (_dims(n, 0, rank)[images(n, rank, "c").split().index("c")], *_dims(n, 1, rank)[-2:])
    given, kept, last = [to_global(dim, n.semantics.extent.units) for dim in sides]
    into = out = "."
    if n.semantics.extent.is_known and given is not None and given == kept:
        into, out = ("c", "o") if not depthwise else ("c", "c") if last == 1 else (".", ".")
    each = ". " * (rank - 2) + into
    return images(n, rank, into), f"{each} {'.' if depthwise else out}", images(n, rank, out)


def _dims(n: Op, index: int, rank: int) -> tuple[Dim, ...]:
    """Return the dimensions of images or of a filter; the operand is the value or its shape."""
    dims = n.value(index) or n.shape(index)
    return dims if dims is not None and len(dims) == rank else (None,) * rank


def _conv_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Count two operations for each element of the result and each of one filter."""
    return 2.0 * math.prod(outputs[0]) * math.prod(inputs[1][:-1])


def _conv_input_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Count as forward, with the incoming gradient as the result."""
    return 2.0 * math.prod(inputs[2]) * math.prod(inputs[1][:-1])


def _conv_filter_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Count as forward, with the incoming gradient as the result."""
    return 2.0 * math.prod(inputs[2]) * math.prod(outputs[0][:-1])


def _depthwise_work(attr: Attr, inputs: Numbers, outputs: Numbers) -> float:
    """Count two operations for each element of the result and each of the window."""
    return 2.0 * math.prod(outputs[0]) * math.prod(inputs[1][:2])


def convolution(rank: int, depthwise: bool = False) -> Rule:
    """Return the rule of a convolution; a depthwise one has separate filters for each channel."""

    def text(n: Op) -> str:
        """Images and output channels stay split; input channels are summed over."""
        x, filters, y = _terms(n, rank, depthwise)
        return f"{x}, {filters} -> {y} | {'c' if 'c' in x else ''}"

    work = _depthwise_work if depthwise else _conv_work
    return factors(text, linear=(0, 1), fragile="c o")._replace(work=work)


def input_gradient(rank: int, depthwise: bool = False, *, of_values: bool = False) -> Rule:
    """Return the rule of the gradient of the images.

    Args:
        of_values: the first operand is the input instead of its shape; only the shape matters.
    """

    def text(n: Op) -> str:
        """Images and input channels stay split; output channels are summed over."""
        x, filters, y = _terms(n, rank, depthwise)
        return f"{'' if of_values else '# '}{x}, {filters}, {y} -> {x} | {'o' if 'o' in y else ''}"

    rule = factors(text, linear=(1, 2), fragile="c o")
    return rule if depthwise else rule._replace(work=_conv_input_work, patches=input_patches)


def filter_gradient(rank: int, depthwise: bool = False, *, of_values: bool = False) -> Rule:
    """Return the rule of the gradient of the filter.

    Args:
        of_values: the second operand is the filter instead of its shape; only the shape matters.
    """

    def text(n: Op) -> str:
        """Channels stay split; images are summed over."""
        x, filters, y = _terms(n, rank, depthwise)
        return f"{x}, {'' if of_values else '# '}{filters}, {y} -> {filters} | n"

    rule = factors(text, linear=(0, 2), fragile="c o")
    return rule if depthwise else rule._replace(work=_conv_filter_work, patches=filter_patches)


FORWARD, INPUT, FILTERS = (X, FILTER), (X_SIZES, FILTER, Y), (X, FILTER_SIZES, Y)

RULES: dict[str, Rule] = {
    "Conv2D": windowed(convolution(4), FORWARD, Y),
    "Conv2DBackpropInput": windowed(input_gradient(4), INPUT, X),
    "Conv2DBackpropFilter": windowed(filter_gradient(4), FILTERS, FILTER),
    "DepthwiseConv2dNative": windowed(convolution(4, depthwise=True), FORWARD, Y),
    "DepthwiseConv2dNativeBackpropInput": windowed(input_gradient(4, depthwise=True), INPUT, X),
    "DepthwiseConv2dNativeBackpropFilter": windowed(filter_gradient(4, depthwise=True), FILTERS, FILTER),
    "Conv2DBackpropInputV2": input_gradient(4, of_values=True),
    "Conv2DBackpropFilterV2": filter_gradient(4, of_values=True),
    "Conv3D": convolution(5),
    "Conv3DBackpropInput": input_gradient(5, of_values=True),
    "Conv3DBackpropInputV2": input_gradient(5),
    "Conv3DBackpropFilter": filter_gradient(5, of_values=True),
    "Conv3DBackpropFilterV2": filter_gradient(5),
    **lines("""
n . . ., . . . -> n . . . : Dilation2D
n . . ., . . ., n . . . -> n . . . | n; linear 2 : Dilation2DBackpropInput
n . . ., . . ., n . . . -> . . . | n; linear 2 : Dilation2DBackpropFilter
"""),
}
