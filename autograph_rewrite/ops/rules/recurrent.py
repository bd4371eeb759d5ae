"""Fused recurrent cells are independent per example (`b`); the gradients of their weights are partial sums."""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ops.rules.base import Rule, whole
from autograph_rewrite.ops.rules.factors import factors
from autograph_rewrite.ops.rules.signature import every

STATE, STEPS, READ = "b .", ". b .", "*"


def _cell(operands: Sequence[str], results: Sequence[str], *, summed: bool = False, fragile: str = "") -> Rule:
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return factors(f"{text} | b" if summed else text, fragile=fragile)


RULES: dict[str, Rule] = {
    "LSTMBlockCell": _cell([STATE] * 3 + [READ] * 5, [STATE] * 7, fragile="b"),
    "LSTMBlockCellGrad": _cell([STATE] * 3 + [READ] * 5 + [STATE] * 8, [STATE] * 2 + ["."] * 3, summed=True),
    "GRUBlockCell": _cell([STATE] * 2 + [READ] * 4, [STATE] * 4),
    "GRUBlockCellGrad": _cell([STATE] * 2 + [READ] * 4 + [STATE] * 4, [STATE] * 4),
    **every(_cell([READ, STEPS, STATE, STATE] + [READ] * 5, [STEPS] * 7), "BlockLSTM BlockLSTMV2"),
    **every(
        _cell(
            [READ, STEPS, STATE, STATE] + [READ] * 5 + [STEPS] * 9,
            [STEPS, STATE, STATE, ". ."] + ["."] * 4,
            summed=True,
        ),
        "BlockLSTMGrad BlockLSTMGradV2",
    ),
    # Their packed state exists on GPUs only, and some draw dropout inside.
    **every(
        Rule(whole, pinned=True),
        "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3",
        "CudnnRNNParamsSize CudnnRNNParamsToCanonical CudnnRNNCanonicalToParams",
    ),
}
