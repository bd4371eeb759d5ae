"""Ops on a block without examples: a last batch may be smaller than the number of replicas.

Most kernels take it. One that refuses it has `fragile` labels in its signature, along which it runs whole unless the
batch is static (a static batch has at least one example for each replica). Those below return early and leave their
output uninitialised where a sum over nothing is zero, so the lowering has to put the zeros there. Those that refuse it
although a row more or less is all the same to the others get one (`passes.batch.pad_empty_blocks`).

Found by running every op of the table on empty blocks of recycled memory; TensorFlow 2.21, CPU.
"""

from __future__ import annotations

UNDEFINED_WHEN_EMPTY = frozenset(("BlockLSTMGrad", "BlockLSTMGradV2", "DepthwiseConv2dNativeBackpropFilter"))
"""Ops whose partial outputs are zero by meaning, but not by their kernel, when the block is empty."""
REFUSES_EMPTY = frozenset(("MirrorPad", "MirrorPadGrad"))
"""Ops of any type that get a row where a block has none, and whose outputs are cut to none again."""
