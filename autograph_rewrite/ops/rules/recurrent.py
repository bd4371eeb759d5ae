"""Fused recurrent cells are independent per example (`b`); the gradients of their weights are partial sums."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Rule
from autograph_rewrite.ops.rules.factors import factors, lines
from autograph_rewrite.ops.rules.signature import every

STATE, STEPS, READ = ["b ."], [". b ."], ["*"]


def _cell(operands: list[str], results: list[str], *, summed: bool = False, fragile: str = "") -> Rule:
    return factors(f"{', '.join(operands)} -> {', '.join(results)}{' | b' if summed else ''}", fragile=fragile)


_BLOCK = READ + STEPS + STATE * 2 + READ * 5
_BLOCK_GRADIENTS = STEPS + STATE * 2 + [". ."] + ["."] * 4

RULES = {
    "LSTMBlockCell": _cell(STATE * 3 + READ * 5, STATE * 7, fragile="b"),
    "LSTMBlockCellGrad": _cell(STATE * 3 + READ * 5 + STATE * 8, STATE * 2 + ["."] * 3, summed=True),
    "GRUBlockCell": _cell(STATE * 2 + READ * 4, STATE * 4),
    "GRUBlockCellGrad": _cell(STATE * 2 + READ * 4 + STATE * 4, STATE * 4),
    **every(_cell(_BLOCK, STEPS * 7), "BlockLSTM BlockLSTMV2"),
    **every(_cell(_BLOCK + STEPS * 9, _BLOCK_GRADIENTS, summed=True), "BlockLSTMGrad BlockLSTMGradV2"),
    # Their packed state exists on GPUs only, and some draw dropout inside.
    **lines("""
once : CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNParamsSize
    CudnnRNNParamsToCanonical CudnnRNNCanonicalToParams
"""),
}
