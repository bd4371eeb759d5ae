"""The contract of each op type; an op without one must have replicated operands and results."""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.certify.contracts.factors import Factors
from autograph_rewrite.certify.contracts.families import draws, indexing, lists, moves, slices, stacks
from autograph_rewrite.certify.contracts.families.contractions import (
    batch_norm,
    batch_norm_grad,
    bias_add,
    bias_add_grad,
    einsum,
    images,
    matmul,
)
from autograph_rewrite.certify.contracts.patterns import Contract, factors_of, pattern
from autograph_rewrite.certify.contracts.seen import Seen

ELEMENTWISE = """
Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e
BesselK1 BesselK1e BesselY0 BesselY1 Ceil CheckNumerics CheckNumericsV2 ComplexAbs Cos Cosh Dawsn Digamma Elu Erf Erfc
Erfinv Exp Expint Expm1 Floor FresnelCos FresnelSin Inv Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p
LogicalNot Ndtri OnesLike PopulationCount Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus
Softsign Spence Sqrt Square Tan Tanh
ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex Equal FloorDiv FloorMod Greater
GreaterEqual Igamma IgammaGradA Igammac LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod NextAfter
NotEqual Polygamma Pow RightShift SquaredDifference StringJoin TruncateDiv TruncateMod Xlog1py Xlogy Zeta
AsString StringToNumber StringToHashBucketFast StringLower StringUpper StringStrip StringLength RegexReplace
RegexFullMatch StaticRegexReplace StaticRegexFullMatch StringToHashBucket StringToHashBucketStrong EncodeBase64
DecodeBase64 UnicodeScript UnicodeTranscode DecodeCompressed Bucketize
"""

LINEAR: Mapping[str, tuple[int, ...]] = {
    "Neg": (0,), "Real": (0,), "Imag": (0,), "Conj": (0,),
    "Mul": (0, 1), "MulNoNan": (0,), "RealDiv": (0,), "Div": (0,), "DivNoNan": (0,), "Xdivy": (0,),
    "ReluGrad": (0,), "Relu6Grad": (0,), "LeakyReluGrad": (0,), "EluGrad": (0,), "SeluGrad": (0,),
    "SoftplusGrad": (0,), "SoftsignGrad": (0,), "TanhGrad": (1,), "SigmoidGrad": (1,), "SqrtGrad": (1,),
    "RsqrtGrad": (1,), "ReciprocalGrad": (1,), "InvGrad": (1,),
}  # fmt: skip
"""Elementwise ops that are linear in each of some operands."""

PATTERNS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    # along the last dimension, or the last ones; every other one is free
    "Softmax": ("@.->@.", ()),
    "LogSoftmax": ("@.->@.", ()),
    "TopK": ("@.->@.,@.", ()),
    "TopKV2": ("@.,*->@.,@.", ()),
    "NthElement": ("@.,*->@", ()),
    "Cholesky": ("@..->@..", ()),
    "CholeskyGrad": ("=..,=..->=..", ()),
    "MatrixInverse": ("@..->@..", ()),
    "MatrixExponential": ("@..->@..", ()),
    "MatrixLogarithm": ("@..->@..", ()),
    "MatrixSquareRoot": ("@..->@..", ()),
    "MatrixDeterminant": ("@..->@", ()),
    "LogMatrixDeterminant": ("@..->@,@", ()),
    "MatrixSolve": ("=..,=.c->=.c", (1,)),
    "MatrixSolveLs": ("=..,=.c,*->=.c", (1,)),
    "MatrixTriangularSolve": ("@..,@.c->@.c", (1,)),
    "BandedTriangularSolve": ("@..,@.c->@.c", (1,)),
    "TridiagonalSolve": ("=..,=.c->=.c", (1,)),
    "MatrixBandPart": ("@..,*,*->@..", (0,)),
    "Qr": ("@..->@..,@..", ()),
    "Lu": ("@..->@..,@.", ()),
    "Cross": ("=.,=.->=.", (0, 1)),
    **dict.fromkeys(("FFT", "IFFT"), ("@.->@.", (0,))),
    **dict.fromkeys(("FFT2D", "IFFT2D"), ("@..->@..", (0,))),
    **dict.fromkeys(("FFT3D", "IFFT3D"), ("@...->@...", (0,))),
    **dict.fromkeys(("RFFT", "IRFFT"), ("@.,*->@.", (0,))),
    **dict.fromkeys(("RFFT2D", "IRFFT2D"), ("@..,*->@..", (0,))),
    **dict.fromkeys(("RFFT3D", "IRFFT3D"), ("@...,*->@...", (0,))),
    **dict.fromkeys(("RGBToHSV", "HSVToRGB"), ("@.->@.", ())),
    **dict.fromkeys(("AdjustHue", "AdjustSaturation"), ("@.,*->@.", ())),
    "AdjustContrastv2": ("@...,*->@...", ()),
    # losses and scores: n examples
    "SoftmaxCrossEntropyWithLogits": ("@.,@.->@,@.", ()),
    "SparseSoftmaxCrossEntropyWithLogits": ("n.,n->n,n.", ()),
    "InTopK": ("n.,n->n", ()),
    "InTopKV2": ("n.,n,*->n", ()),
    "LowerBound": ("n.,n.->n.", ()),
    "UpperBound": ("n.,n.->n.", ()),
    # n images
    **dict.fromkeys(("Conv2D", "DepthwiseConv2dNative"), ("n...,....->n...", (0, 1))),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput"), ("#n...,....,n...->n...", (1, 2))
    ),
    **dict.fromkeys(
        ("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter"), ("n...,*,n...->....|n", (0, 2))
    ),
    "Conv3D": ("n....,.....->n....", (0, 1)),
    "Conv3DBackpropInputV2": ("#n....,.....,n....->n....", (1, 2)),
    "Conv3DBackpropFilterV2": ("n....,*,n....->.....|n", (0, 2)),
    "Dilation2D": ("n...,...->n...", ()),
    "Dilation2DBackpropInput": ("n...,...,n...->n...", (2,)),
    "Dilation2DBackpropFilter": ("n...,...,n...->...|n", (2,)),
    "AvgPool": ("n...->n...", (0,)),
    "AvgPoolGrad": ("#n...,n...->n...", (1,)),
    "AvgPool3D": ("n....->n....", (0,)),
    "AvgPool3DGrad": ("#n....,n....->n....", (1,)),
    "MaxPool": ("n...->n...", ()),
    "MaxPoolV2": ("n...,*,*->n...", ()),
    "MaxPool3D": ("n....->n....", ()),
    **dict.fromkeys(("MaxPoolGrad", "MaxPoolGradGrad"), ("n...,n...,n...->n...", ())),
    **dict.fromkeys(("MaxPoolGradV2", "MaxPoolGradGradV2"), ("n...,n...,n...,*,*->n...", ())),
    **dict.fromkeys(("MaxPool3DGrad", "MaxPool3DGradGrad"), ("n....,n....,n....->n....", ())),
    "LRN": ("nhw.->nhw.", ()),
    "LRNGrad": ("nhw.,nhw.,nhw.->nhw.", (0,)),
    **dict.fromkeys(
        ("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad"),
        ("n...,*->n...", (0,)),
    ),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad"), ("n...,n...->n...", (0,))),
    "ScaleAndTranslate": ("n...,*,*,*->n...", (0,)),
    "ScaleAndTranslateGrad": ("n...,n...,*,*->n...", (0,)),
    **dict.fromkeys(("ExtractImagePatches", "SpaceToDepth", "DepthToSpace"), ("n...->n...", (0,))),
    "ExtractVolumePatches": ("n....->n....", (0,)),
    "DrawBoundingBoxes": ("n...,n..->n...", ()),
    "DrawBoundingBoxesV2": ("n...,n..,*->n...", ()),
    "CombinedNonMaxSuppression": ("n...,n..,*,*,*,*->n..,n.,n.,n", ()),
    # b examples in a recurrent cell
    "LSTMBlockCell": ("b.,b.,b.,*,*,*,*,*->b.,b.,b.,b.,b.,b.,b.", ()),
    "LSTMBlockCellGrad": ("b.,b.,b.,*,*,*,*,*,b.,b.,b.,b.,b.,b.,b.,b.->b.,b.,.,.,.|b", ()),
    "GRUBlockCell": ("b.,b.,*,*,*,*->b.,b.,b.,b.", ()),
    "GRUBlockCellGrad": ("b.,b.,*,*,*,*,b.,b.,b.,b.->b.,b.,b.,b.", ()),
    **dict.fromkeys(
        ("BlockLSTM", "BlockLSTMV2"), ("*,.b.,b.,b.,*,*,*,*,*->.b.,.b.,.b.,.b.,.b.,.b.,.b.", ())
    ),
    **dict.fromkeys(
        ("BlockLSTMGrad", "BlockLSTMGradV2"),
        ("*,.b.,b.,b.,*,*,*,*,*,.b.,.b.,.b.,.b.,.b.,.b.,.b.,.b.,.b.->.b.,b.,b.,..,.,.,.,.|b", ()),
    ),
    # values rounded to steps of a given range, and how much of a gradient falls outside of it
    "FakeQuantWithMinMaxArgs": ("@->@", ()),
    "FakeQuantWithMinMaxArgsGradient": ("=,=->=", (0,)),
    "FakeQuantWithMinMaxVars": ("@,*,*->@", ()),
    "FakeQuantWithMinMaxVarsGradient": ("=,=,*,*->=,,|=", (0,)),
    "FakeQuantWithMinMaxVarsPerChannel": ("@c,c,c->@c", ()),
    "FakeQuantWithMinMaxVarsPerChannelGradient": ("=c,=c,c,c->=c,c,c|=", (0,)),
    # what texts say
    "DecodePaddedRaw": ("@,*->@.", ()),
}  # fmt: skip
"""Factors as text, and the operands in each of which the op is linear."""

DRAWS = """
RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal StatelessRandomUniform StatelessRandomUniformInt
StatelessRandomUniformFullInt StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformV2
StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2
"""


def _linear(op: str) -> Contract:
    def contract(seen: Seen) -> Factors | None:
        operands = ",".join("@" for _ in seen.operands)
        return factors_of(seen, f"{operands}->@", linear=LINEAR[op])

    return contract


def pool_with_places(seen: Seen) -> Factors | None:
    """Places count from the start of an image, or from that of the batch."""
    if seen.node.attr("include_batch_in_index", False):
        return None
    operands = ",".join("n..." for _ in seen.operands)
    return factors_of(seen, f"{operands}->" + ",".join("n..." for _ in seen.results))


FUNCTIONS: Mapping[Contract, str] = {
    moves.addition: "Add AddV2 Sub AddN AccumulateNV2",
    moves.cast: "Cast",
    moves.select: "Select SelectV2",
    moves.zeros_like: "ZerosLike",
    moves.reduction: "Sum Mean Max Min Prod All Any EuclideanNorm",
    moves.extreme: "ArgMax ArgMin",
    moves.running: "Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll",
    moves.reverse_sequence: "ReverseSequence",
    moves.rounded: "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4",
    moves.reshape: "Reshape",
    moves.transpose: "Transpose ConjugateTranspose",
    moves.expand_dims: "ExpandDims",
    moves.squeeze: "Squeeze",
    moves.broadcast_to: "BroadcastTo",
    moves.tile: "Tile",
    moves.fill: "Fill",
    moves.pack: "Pack",
    moves.unpack: "Unpack",
    moves.concat: "Concat ConcatV2",
    moves.cut: "Split SplitV",
    moves.pad: "Pad PadV2 MirrorPad MirrorPadGrad",
    slices.slice_: "Slice",
    slices.strided_slice: "StridedSlice",
    slices.strided_slice_grad: "StridedSliceGrad",
    indexing.gather: "Gather GatherV2",
    indexing.gather_nd: "GatherNd",
    indexing.resource_gather: "ResourceGather",
    indexing.resource_gather_nd: "ResourceGatherNd",
    indexing.scatter_nd: "ScatterNd",
    indexing.tensor_scatter: "TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMin TensorScatterMax",
    indexing.one_hot: "OneHot",
    indexing.segment_sum: "UnsortedSegmentSum",
    indexing.segment_other: "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
    indexing.sorted_segments: """SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd SparseSegmentSum
        SparseSegmentMean SparseSegmentSqrtN SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments
        SparseSegmentSqrtNWithNumSegments SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad""",
    indexing.counts: "Bincount DenseBincount",
    indexing.table_lookup: "LookupTableFind LookupTableFindV2",
    moves.ensure_shape: "EnsureShape",
    pattern("@,*,*->.|@"): "HistogramFixedWidth",
    draws.spread: " ".join(draws.PARAMETERS),
    matmul: "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    einsum: "Einsum",
    bias_add: "BiasAdd BiasAddV1",
    bias_add_grad: "BiasAddGrad",
    batch_norm: "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    batch_norm_grad: "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
    images: "ImageProjectiveTransformV2 ImageProjectiveTransformV3",
    pattern("@->|@"): "L2Loss",
    lists.from_tensor: "TensorListFromTensor",
    lists.scatter: "TensorListScatter TensorListScatterV2",
    lists.scatter_into: "TensorListScatterIntoExistingList",
    lists.concat: "TensorListConcat TensorListConcatV2",
    lists.cut: "TensorListSplit",
    lists.join: "TensorListConcatLists",
    stacks.decomposition: "Svd SelfAdjointEigV2 Eig",
    stacks.diagonal: "MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3",
    stacks.set_diagonal: "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3",
    stacks.bitcast: "Bitcast",
    pool_with_places: "MaxPoolWithArgmax MaxPoolGradWithArgmax MaxPoolGradGradWithArgmax",
    lists.push: "TensorListPushBack",
    lists.set_item: "TensorListSetItem",
    lists.take: "TensorListGetItem TensorListPopBack TensorListStack TensorListGather",
    lists.make: "EmptyTensorList TensorListReserve",
    lists.keep: "TensorListResize",
    moves.elementwise: ELEMENTWISE,
    draws.by_shape: DRAWS,
    draws.by_parameters: "RandomGamma RandomPoissonV2",
    draws.by_rows: "Multinomial",
}

CONTRACTS: Mapping[str, Contract] = {
    **{op: _linear(op) for op in LINEAR},
    **{op: pattern(text, linear=linear) for op, (text, linear) in PATTERNS.items()},
    **{op: contract for contract, names in FUNCTIONS.items() for op in names.split()},
}
"""By op."""
