"""Ops that mix all examples of the batch, or keep no dimension of it: they read whole values on purpose.

An op without a rule causes a note; ops that are listed here do not.
"""

from __future__ import annotations

from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.rules.base import Op, Rule, whole
from autograph_rewrite.ops.rules.contraction import matmul_work
from autograph_rewrite.ops.rules.factors import lines


def _rows_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the stated shape, with the number of rows from the first row partition where that is known."""
    static, count = n.static[0], n.value(3) if len(n.inputs) > 3 else None
    counts = list(n.attr("row_partition_types") or ())[:1] == [b"FIRST_DIM_SIZE"]
    return ((count[0], *static[1:]),) if static and count and len(count) == 1 and counts else n.static


RULES: dict[str, Rule] = {
    "SparseToDense": Rule(whole, lambda n: n.static if n.value(1) is None else (n.value(1),)),
    "RaggedTensorToTensor": Rule(whole, _rows_shape),
    "SparseMatMul": Rule(whole, work=matmul_work),
    **lines("""
# The loss of a sequence names its examples by index, and its kernel rejects an empty batch.
whole : CTCLoss CTCLossV2 CTCGreedyDecoder CTCBeamSearchDecoder
# Sparse tensors: row numbers count from the start of the batch.
whole : SparseTensorDenseMatMul SparseReorder SparseReshape SparseConcat SparseSplit SparseSlice SparseSliceGrad
    SparseAdd SparseAddGrad SparseTensorDenseAdd SparseDenseCwiseAdd SparseDenseCwiseMul SparseDenseCwiseDiv
    SparseReduceSum SparseReduceMax SparseReduceSumSparse SparseReduceMaxSparse SparseSoftmax SparseSparseMaximum
    SparseSparseMinimum SparseFillEmptyRows SparseFillEmptyRowsGrad SparseCross SparseCrossV2 SparseCrossHashed
    SerializeSparse SerializeManySparse DeserializeSparse DeserializeManySparse AddSparseToTensorsMap
    AddManySparseToTensorsMap TakeManySparseFromTensorsMap
# Ragged tensors: row splits are running totals over the batch.
whole : RaggedGather RaggedRange RaggedTensorToSparse RaggedTensorToVariant RaggedTensorFromVariant
    RaggedTensorToVariantGradient RaggedCross RaggedFillEmptyRows RaggedFillEmptyRowsGrad RaggedCountSparseOutput
    DenseCountSparseOutput SparseCountSparseOutput
"""),
}
