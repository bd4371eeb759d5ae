"""Quantised arithmetic: element by element where the range is given; otherwise it is taken from all elements.

The gradient of a range sums over the elements outside of it, so that blocks give contributions.
"""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.signature import Labels, Signature, axes, every, signed, without


def _fake(n: Op) -> Signature | None:
    """One range for all elements, or one for each channel, the last dimension; a gradient comes before the values."""
    rank, values = n.rank(0), 2 if n.op.endswith("Gradient") else 1
    if rank is None or (rank == 0 and "PerChannel" in n.op):
        return None
    labels = axes(rank)
    limits: Labels = labels[-1:] if "PerChannel" in n.op else ()
    given = (limits,) * (len(n.inputs) - values)
    if values == 1:
        return Signature((labels, *given), (labels,))
    made = (limits,) * (len(n.output_dtypes) - 1)
    return Signature((labels, labels, *given), (labels, *made), summed=frozenset(labels), linear=(0,))


def _rounded(n: Op) -> Signature | None:
    """The range of each slice along `axis`, or of all."""
    rank, axis = n.rank(0), n.attr("axis", -1)
    if rank is None or not n.attr("range_given"):
        return None
    labels = axes(rank) if axis == -1 else without(axes(rank), axis)
    return Signature((labels, *(None,) * (len(n.inputs) - 1)), (labels,))


RULES: dict[str, Rule] = {
    **every(
        signed(_fake),
        "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars",
        "FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannel FakeQuantWithMinMaxVarsPerChannelGradient",
    ),
    **every(signed(_rounded), "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4"),
    **every(
        Rule(whole, lambda n: n.static),
        "QuantizeV2 Dequantize QuantizeAndDequantize QuantizeAndDequantizeV4Grad Requantize RequantizationRange",
    ),
}
