"""topk: each member sends its largest elements, and keeps the others for later steps.

    dw + residual ──► k values, k positions ──gather──► zeros with all of them added          residual := the others

Values travel as their bits beside the positions, in one exchange; a bit is a bit, so NaN and infinity arrive as such.
Elements that are not finite count as largest.

After Lin et al., Deep Gradient Compression (2018), without its momentum correction and warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autograph_rewrite.codecs.codec import Array, Code, Codec, Gradient, Nodes, Price, Shape
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.value import Value


def kept(count: int) -> int:
    """Return how many of `count` elements topk sends."""
    return max(1, -(-count // 100))


class TopK(Codec):
    """Sends the largest hundredth of the elements with their positions."""

    price = Price(memory=1.25, ops=25, sorts=True)

    def codes(self, shape: Shape, dtype: int) -> tuple[Code, ...]:
        """Return values and positions."""
        k = kept(math.prod(shape))
        return Code(dtype, (k,)), Code(dtypes.INT32, (k,))

    def encode(self, build: Nodes, gradient: Gradient) -> tuple[Value, ...]:
        """Choose the largest."""
        flat = build.op("Reshape", gradient.value, build.numbers([-1], "line"), what="flat")
        finite = build.op("IsFinite", flat, what="is_finite")
        infinity = build.const(math.inf, gradient.dtype, "infinity")
        size = build.op("SelectV2", finite, build.op("Abs", flat, what="size"), infinity, what="rank_by")
        largest = build.op("TopKV2", size, build.numbers(kept(gradient.count), "k"), what="largest")
        places = largest.node.output(1)
        return build.op("GatherV2", flat, places, build.numbers(0, "first"), what="chosen"), places

    def decode_sum(self, build: Nodes, gradient: Gradient, codes: Sequence[Value]) -> Value:
        """Add the values of all senders at their positions.

        Args:
            gradient: of one member.
            codes: values and positions, [members, k].
        """
        line = build.numbers([-1], "line")
        values = build.op("Reshape", codes[0], line, what="values")
        places = build.op("Reshape", codes[1], line, what="places")
        return build.op("UnsortedSegmentSum", values, places, build.numbers(gradient.count, "elements"), what="sum")

    def obstacle(self, shape: Shape) -> str:
        """Nothing has no largest element."""
        return "" if math.prod(shape) else "it has no elements"

    def most_kept(self, total: Array, members: int) -> float:
        """As if all elements were equally large."""
        return super().most_kept(total, members) * math.sqrt(1 - kept(total.size) / total.size)
