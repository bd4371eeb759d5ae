"""Quantised arithmetic: element by element if the range is given; otherwise the range depends on all elements.

The gradient of a range sums over the elements outside it, so that blocks give contributions. A range is for all
elements, or for each channel, the last dimension.
"""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import every


def _rounded(n: Op) -> str | None:
    """All dimensions stay split except `axis`, along which each slice has a range."""
    axis = n.attr("axis", -1)
    if not n.attr("range_given"):
        return None
    text = "..." if axis == -1 else " ".join([*(f"d{i}" for i in range(axis)), "-axis", "..."])
    return f"{text} -> {text}"


RULES = {
    **every(factors(_rounded), "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4"),
    **lines("""
... -> ... : FakeQuantWithMinMaxArgs
..., ... -> ...; linear 0 : FakeQuantWithMinMaxArgsGradient
..., (), () -> ... : FakeQuantWithMinMaxVars
..., ..., (), () -> ..., (), () | ...; linear 0 : FakeQuantWithMinMaxVarsGradient
... c, c, c -> ... c : FakeQuantWithMinMaxVarsPerChannel
... c, ... c, c, c -> ... c, c, c | ...; linear 0 : FakeQuantWithMinMaxVarsPerChannelGradient
whole : QuantizeV2 Dequantize QuantizeAndDequantize QuantizeAndDequantizeV4Grad Requantize RequantizationRange
"""),
}
