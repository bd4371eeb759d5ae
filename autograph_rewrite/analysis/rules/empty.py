"""Kernels that do not work on a block without examples (a batch smaller than the number of replicas).

    garbage   the kernel returns early and leaves its output uninitialised, where a sum of nothing is zero
    error     the kernel refuses

Found by running every op of the table on empty blocks; TensorFlow 2.21, CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

GARBAGE, ERROR = "garbage", "error"

EMPTY_BLOCKS: Mapping[str, str] = {
    "DepthwiseConv2dNativeBackpropFilter": GARBAGE,
    "BlockLSTMGrad": GARBAGE,
    "BlockLSTMGradV2": GARBAGE,
    "LSTMBlockCell": ERROR,
    "MaxPool3DGradGrad": ERROR,
    "MaxPoolWithArgmax": ERROR,
}
"""What goes wrong, by op type; ops that are not listed are right for empty blocks."""
