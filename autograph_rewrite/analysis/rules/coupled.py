"""Ops whose result mixes the whole batch, or whose rows carry no dimension to split: deliberately whole.

Naming them says that somebody thought about them: they cause no note.
"""

from __future__ import annotations

from autograph_rewrite.analysis.rules.base import Rule, whole
from autograph_rewrite.analysis.rules.signature import every

WHOLE = Rule(whole, lambda n: n.static)

RULES: dict[str, Rule] = every(
    WHOLE,
    # The loss of a sequence names its examples by index, and its kernel rejects an empty batch.
    "CTCLoss CTCLossV2 CTCGreedyDecoder CTCBeamSearchDecoder",
    # Sparse tensors: row numbers count from the start of the batch.
    "SparseTensorDenseMatMul SparseMatMul SparseToDense SparseReorder SparseReshape SparseConcat",
    "SparseSplit SparseSlice SparseSliceGrad SparseAdd SparseAddGrad SparseTensorDenseAdd",
    "SparseDenseCwiseAdd SparseDenseCwiseMul SparseDenseCwiseDiv SparseReduceSum SparseReduceMax",
    "SparseReduceSumSparse SparseReduceMaxSparse SparseSoftmax SparseSparseMaximum",
    "SparseSparseMinimum SparseFillEmptyRows SparseFillEmptyRowsGrad SparseCross SparseCrossV2",
    "SparseCrossHashed SerializeSparse SerializeManySparse DeserializeSparse",
    "DeserializeManySparse AddSparseToTensorsMap AddManySparseToTensorsMap",
    "TakeManySparseFromTensorsMap",
    # Ragged tensors: row splits are running totals over the batch.
    "RaggedGather RaggedRange RaggedTensorToTensor RaggedTensorToSparse RaggedTensorToVariant",
    "RaggedTensorFromVariant RaggedTensorToVariantGradient RaggedCross RaggedFillEmptyRows",
    "RaggedFillEmptyRowsGrad RaggedCountSparseOutput DenseCountSparseOutput",
    "SparseCountSparseOutput",
    # Quantised arithmetic takes its range from all elements, unless it is given one.
    "FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannel",
    "FakeQuantWithMinMaxVarsPerChannelGradient QuantizeV2 Dequantize QuantizeAndDequantize",
    "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4",
    "QuantizeAndDequantizeV4Grad Requantize RequantizationRange",
)
