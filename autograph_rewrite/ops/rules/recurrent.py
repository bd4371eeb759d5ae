"""Fused recurrent cells are independent per example (`b`); the gradients of their weights are partial sums."""

from __future__ import annotations

from autograph_rewrite.ops.rules.base import Rule, whole
from autograph_rewrite.ops.rules.signature import Signature, every, fixed

STATE = ("b", "")
STEPS = ("", "b", "")
PEEPHOLE = ("",)
MATRIX = ("", "")
OVER_BATCH = frozenset("b")

LSTM_CELL = Signature((STATE,) * 3 + (None,) * 5, (STATE,) * 7, fragile=OVER_BATCH)
LSTM_CELL_GRAD = Signature((STATE,) * 3 + (None,) * 5 + (STATE,) * 8, (STATE,) * 2 + (PEEPHOLE,) * 3, OVER_BATCH)
GRU_CELL = Signature((STATE,) * 2 + (None,) * 4, (STATE,) * 4)
GRU_CELL_GRAD = Signature((STATE,) * 2 + (None,) * 4 + (STATE,) * 4, (STATE,) * 4)
BLOCK_LSTM = Signature((None, STEPS, STATE, STATE) + (None,) * 5, (STEPS,) * 7)
BLOCK_LSTM_GRAD = Signature(
    (None, STEPS, STATE, STATE) + (None,) * 5 + (STEPS,) * 9,
    (STEPS, STATE, STATE, MATRIX) + (PEEPHOLE,) * 4,
    OVER_BATCH,
)

RULES: dict[str, Rule] = {
    "LSTMBlockCell": fixed(LSTM_CELL),
    "LSTMBlockCellGrad": fixed(LSTM_CELL_GRAD),
    "GRUBlockCell": fixed(GRU_CELL),
    "GRUBlockCellGrad": fixed(GRU_CELL_GRAD),
    **every(fixed(BLOCK_LSTM), "BlockLSTM BlockLSTMV2"),
    **every(fixed(BLOCK_LSTM_GRAD), "BlockLSTMGrad BlockLSTMGradV2"),
    # Their packed state exists on GPUs only, and some draw dropout inside.
    **every(
        Rule(whole, pinned=True),
        "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3",
        "CudnnRNNParamsSize CudnnRNNParamsToCanonical CudnnRNNCanonicalToParams",
    ),
}
