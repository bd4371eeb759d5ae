"""Lists the factors of each op type for the certificate, as text that `factors` reads; from TensorFlow's documentation.

Each entry is a text, a colon, and the ops that have it. If the text depends on an attribute or on a rank, a function
returns it. Ops that move or reduce elements by integer operands (slices, pieces, reshapes, gathers, reductions) have no
entry: they are run on samples (`run_blocks`). All values of any other op must be whole.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping

from autograph_rewrite.certify.seen import Seen
from autograph_rewrite.ir.claims import Stated
from autograph_rewrite.ir.types import dtypes

TEXTS = """
@+->@ : Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0
    BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Ceil CheckNumerics CheckNumericsV2 ComplexAbs Cos Cosh Dawsn
    Digamma Elu Erf Erfc Erfinv Exp Expint Expm1 Floor FresnelCos FresnelSin Inv Invert IsFinite IsInf IsNan LeakyRelu
    Lgamma Log Log1p LogicalNot Ndtri OnesLike PopulationCount Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid
    Sign Sin Sinh Softplus Softsign Spence Sqrt Square Tan Tanh ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr
    BitwiseXor ClipByValue Complex Equal FloorDiv FloorMod Greater GreaterEqual Igamma IgammaGradA Igammac LeftShift
    Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod NextAfter NotEqual Polygamma Pow RightShift
    SquaredDifference StringJoin TruncateDiv TruncateMod Xlog1py Xlogy Zeta AsString StringToNumber
    StringToHashBucketFast StringLower StringUpper StringStrip StringLength RegexReplace RegexFullMatch
    StaticRegexReplace StaticRegexFullMatch StringToHashBucket StringToHashBucketStrong EncodeBase64 DecodeBase64
    UnicodeScript UnicodeTranscode DecodeCompressed Bucketize
@+->@ linear 0 : Neg Real Imag Conj MulNoNan RealDiv Div DivNoNan Xdivy ReluGrad Relu6Grad LeakyReluGrad EluGrad
    SeluGrad SoftplusGrad SoftsignGrad
@+->@ linear 0 1 : Mul
@+->@ linear 1 : TanhGrad SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad
@.->@. : Softmax LogSoftmax RGBToHSV HSVToRGB
@.->@.,@. : TopK
@.,*->@.,@. : TopKV2
@.,*->@ : NthElement
@..->@.. : Cholesky MatrixInverse MatrixExponential MatrixLogarithm MatrixSquareRoot
=..,=..->=.. : CholeskyGrad
@..->@ : MatrixDeterminant
@..->@,@ : LogMatrixDeterminant
=..,=.c->=.c linear 1 : MatrixSolve TridiagonalSolve
=..,=.c,*->=.c linear 1 : MatrixSolveLs
@..,@.c->@.c linear 1 : MatrixTriangularSolve BandedTriangularSolve
@..,*,*->@.. linear 0 : MatrixBandPart
@..->@..,@.. : Qr
@..->@..,@. : Lu
=.,=.->=. linear 0 1 : Cross
@.->@. linear 0 : FFT IFFT
@..->@.. linear 0 : FFT2D IFFT2D
@...->@... linear 0 : FFT3D IFFT3D
@.,*->@. linear 0 : RFFT IRFFT
@..,*->@.. linear 0 : RFFT2D IRFFT2D
@...,*->@... linear 0 : RFFT3D IRFFT3D
@.,*->@. : AdjustHue AdjustSaturation
@...,*->@... : AdjustContrastv2
@.,@.->@,@. : SoftmaxCrossEntropyWithLogits
n.,n->n,n. : SparseSoftmaxCrossEntropyWithLogits
n.,n->n : InTopK
n.,n,*->n : InTopKV2
n.,n.->n. : LowerBound UpperBound
n...,...->n... : Dilation2D
n...,...,n...->n... linear 2 : Dilation2DBackpropInput
n...,...,n...->...|n linear 2 : Dilation2DBackpropFilter
n...->n... linear 0 : ExtractImagePatches SpaceToDepth DepthToSpace
n....->n.... linear 0 : ExtractVolumePatches
n...,*,*->n... : MaxPoolV2
n...,n...,n...,*,*->n... : MaxPoolGradV2 MaxPoolGradGradV2
nhw.->nhw. : LRN
nhw.,nhw.,nhw.->nhw. linear 0 : LRNGrad
n...,*->n... linear 0 : ResizeBilinear ResizeBicubic ResizeArea ResizeNearestNeighbor ResizeNearestNeighborGrad
n...,n...->n... linear 0 : ResizeBilinearGrad ResizeBicubicGrad
n...,*,*,*->n... linear 0 : ScaleAndTranslate
n...,n...,*,*->n... linear 0 : ScaleAndTranslateGrad
n...,n..->n... : DrawBoundingBoxes
n...,n..,*->n... : DrawBoundingBoxesV2
n...,n..,*,*,*,*->n..,n.,n.,n : CombinedNonMaxSuppression
b.,b.,b.,*,*,*,*,*->b.,b.,b.,b.,b.,b.,b. : LSTMBlockCell
b.,b.,b.,*,*,*,*,*,b.,b.,b.,b.,b.,b.,b.,b.->b.,b.,.,.,.|b : LSTMBlockCellGrad
b.,b.,*,*,*,*->b.,b.,b.,b. : GRUBlockCell
b.,b.,*,*,*,*,b.,b.,b.,b.->b.,b.,b.,b. : GRUBlockCellGrad
*,.b.,b.,b.,*,*,*,*,*->.b.,.b.,.b.,.b.,.b.,.b.,.b. : BlockLSTM BlockLSTMV2
*,.b.,b.,b.,*,*,*,*,*,.b.,.b.,.b.,.b.,.b.,.b.,.b.,.b.,.b.->.b.,b.,b.,..,.,.,.,.|b : BlockLSTMGrad BlockLSTMGradV2
@->@ : FakeQuantWithMinMaxArgs
=,=->= linear 0 : FakeQuantWithMinMaxArgsGradient
@,*,*->@ : FakeQuantWithMinMaxVars
=,=,*,*->=,,|= linear 0 : FakeQuantWithMinMaxVarsGradient
@c,c,c->@c : FakeQuantWithMinMaxVarsPerChannel
=c,=c,c,c->=c,c,c|= linear 0 : FakeQuantWithMinMaxVarsPerChannelGradient
@,*->@. : DecodePaddedRaw
@+->@ added : Add AddV2 Sub AddN AccumulateNV2
@->@ moves zero : ZerosLike
@,#@->@ moves 0 : BroadcastTo
#@,*->@ zeros 1 : Fill
@->|@ : L2Loss
@,*,*->.|@ : HistogramFixedWidth
.@,*+->.@ linear 0 : SegmentSum SegmentMean SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN
    SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments
    SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad
.@,*+->.@ : SegmentMax SegmentMin SegmentProd
.@,?@->@ moves 0 : TensorListFromTensor
.@,*,?@,*+->@ moves 0 : TensorListScatter TensorListScatterV2
=,.=,*->= moves 0 1 : TensorListScatterIntoExistingList
.@->.@,* moves 0 counts 1 : TensorListConcat
.@,?.@,*->.@,* moves 0 counts 1 : TensorListConcatV2
.@,?.@,*->.@ moves 0 : TensorListSplit
=,=->= moves : TensorListConcatLists TensorListPushBack
=,*,=->= moves 0 2 : TensorListSetItem
@,*,?@->@ moves 0 : TensorListGetItem
@,?@->@,@ moves 0 : TensorListPopBack
@,?@->.@ moves 0 : TensorListStack
@,*,?@->.@ moves 0 : TensorListGather
"""

DRAWS = """
#@,*+->@ : RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal StatelessRandomUniform
    StatelessRandomUniformInt StatelessRandomUniformFullInt StatelessRandomNormal StatelessTruncatedNormal
    StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 StatelessRandomNormalV2
    StatelessTruncatedNormalV2
#@,*,@->@ : StatelessRandomGammaV2 StatelessRandomPoisson
#@,*,@,@->@ : StatelessRandomBinomial
#@,*,*,*,@->@ : StatelessRandomGammaV3
n.,*->n. : Multinomial
"""
"""Ops that draw once for all replicas, unless the configuration lets each replica draw its block."""


def _ranked(seen: Seen, operand: int = 0) -> str | None:
    """Return a letter for each dimension of an operand."""
    rank = seen.rank(operand)
    return None if rank is None else "abcdefghijkl"[:rank]


def _shut(letters: str, *dims: int) -> str:
    gone = {dim % len(letters) for dim in dims} if letters else set()
    return "".join("." if i in gone else letter for i, letter in enumerate(letters))


def matmul(seen: Seen) -> str:
    """Describe matrices, or stacks of them: rows m, columns n, and k which is summed over."""
    flips = ("transpose_a", "transpose_b") if seen.node.op == "MatMul" else ("adj_x", "adj_y")
    left, right = ("km" if seen.attr(flips[0], False) else "mk"), ("nk" if seen.attr(flips[1], False) else "kn")
    stack = "" if seen.node.op == "MatMul" else "@"
    return f"{stack}{left},{stack}{right}->{stack}mn|k linear 0 1"


def einsum(seen: Seen) -> str:
    """Return the equation as text; a name that an operand has twice cannot be split."""
    equation = seen.attr("equation").decode().replace(" ", "").replace("...", "@")
    left, _, right = equation.partition("->")
    folded = "".join(sorted({*left} - {*right} - {","}))
    each = " ".join(map(str, range(len(seen.operands))))
    return f"{equation}|{folded} linear {each}"


def _channels(seen: Seen) -> str | None:
    first = seen.node.op != "BiasAddV1" and seen.attr("data_format") == b"NCHW"
    return None if (seen.rank(0) or 0) < 2 else "nc@" if first else "@c"


def bias_add(seen: Seen) -> str | None:
    """Describe an op that adds a number to each channel."""
    names = _channels(seen)
    return names and f"{names},c->{names} added"


def bias_add_grad(seen: Seen) -> str | None:
    """Describe a sum over all dimensions but the channels."""
    names = _channels(seen)
    return names and f"{names}->c|{names.replace('c', '')} linear 0"


def _image(seen: Seen, channel: str) -> str:
    """Return the names of the dimensions of images, or of volumes."""
    pixels = "..." if "3D" in seen.node.op else ".."
    return f"n{channel}{pixels}" if seen.attr("data_format", b"NHWC").startswith(b"NC") else f"n{pixels}{channel}"


def convolution(seen: Seen) -> str:
    """Describe a convolution, which sums over input channels unless they are grouped.

    A depthwise convolution has separate filters for each channel; with one each, input and output channels are one.
    """
    op, filters = seen.node.op, seen.operands[1].value or seen.operands[1].shape or ()
    images, rank = seen.operands[0].value or seen.operands[0].shape or (), len(_image(seen, "c"))
    is_depthwise, is_of_filters = op.startswith("Depthwise"), "Filter" in op
    is_stated = not is_of_filters or seen.operands[1].kind == "local"  # else the kernel makes whole filters
    together = len(filters) == len(images) == rank and filters[-2] == images[_image(seen, "c").index("c")]
    if not (together and is_stated) or (is_depthwise and filters[-1] != 1):
        c = o = each = "."
    else:
        c, o, each = ("c", "c", ".") if is_depthwise else ("c", "o", "o")
    x, y, filters_of = _image(seen, c), _image(seen, o), f"{'.' * (rank - 2)}{c}{each}"
    if "Input" in op:
        return f"#{x},{filters_of},{y}->{x}|{each.strip('.')} linear 1 2"
    if is_of_filters:
        return f"{x},{f'#{filters_of}' if seen.operands[1].kind == 'local' else '*'},{y}->{filters_of}|n linear 0 2"
    return f"{x},{filters_of}->{y}|{'' if is_depthwise else c.strip('.')} linear 0 1"


def pool(seen: Seen) -> str:
    """Describe a pooling, whose channels can be split unless windows span several."""
    at = _image(seen, "c").index("c")
    image = _image(seen, "c" if seen.attr("ksize")[at] == seen.attr("strides")[at] == 1 else ".")
    average = seen.node.op.startswith("Avg")
    if average and "Grad" in seen.node.op:
        return f"#{image},{image}->{image} linear 1"
    return f"{','.join([image] * len(seen.operands))}->{image}{' linear 0' if average else ''}"


def batch_norm(seen: Seen) -> str | None:
    """Describe a batch normalisation: images can be split if the statistics are given, or channels."""
    rank, at = seen.rank(0), _image(seen, "c").index("c")
    if rank == 4 and any(claim.kind == "split" and claim.dim == at for claim in seen.operands[:2]):
        return _batch_norm_of_channels(seen)
    if seen.attr("is_training", True) or not rank:
        return None
    image = "n" + "." * (rank - 1)
    if "Grad" in seen.node.op:  # gradients of scale and offset are sums over the images
        return f"{image},{image},*+->{image},.,.,*,*|n"
    return f"{image},*+->{image},*+"


def _batch_norm_of_channels(seen: Seen) -> str:
    """Describe a split of channels; only the gradient reads the last result of the forward kernel."""
    image = _image(seen, "c")
    if "Grad" in seen.node.op:
        read = [("c" if claim.shape != (0,) else "*") for claim in seen.operands[2:5]]
        others = ",*" * (len(seen.operands) - 5)
        return f"{image},{image},{','.join(read)}{others}->{image},c,c,*,*"
    vectors = ["c" if claim.shape != (0,) else "*" for claim in seen.operands[1:]]
    kept = ",.|c" if len(seen.results) > 5 else ""
    return f"{image},{','.join(vectors)}->{image},c,c,c,c{kept}"


def transform(seen: Seen) -> str | None:
    """Describe one transformation for all images, or of one for each."""
    return None if seen.rank(1) is None else f"n...,{'.' if seen.stretches(1, 0) else 'n'}.,*+->n..."


def cast(seen: Seen) -> str:
    """Describe a cast: only widening is linear; zeros stay zeros."""
    old, new = seen.node.inputs[0].dtype % dtypes.REF_OFFSET, seen.node.output_dtypes[0]
    widens = WIDTH.get(old, 99) <= WIDTH.get(new, 0) and (old in COMPLEX) <= (new in COMPLEX)
    return "@->@ zeros 0" + widens * " linear 0"


COMPLEX = (8, 18)
WIDTH = {19: 11, 14: 8, 1: 24, 2: 53, 8: 24, 18: 53}
"""Bits of the significand, by element type."""


def select(seen: Seen) -> str:
    """Return a text that is linear in both arms together; a vector condition of the old op chooses rows."""
    rows = seen.node.op == "Select" and seen.rank(0) == 1 and (seen.rank(1) or 0) > 1
    return ("r,r@,r@->r@" if rows else "@,@,@->@") + " added 1 2"


def running(seen: Seen) -> str:
    """Describe a running sum, product or logarithm along one dimension."""
    letters, axes = _ranked(seen), seen.ints(1)
    linear = " linear 0" if seen.node.op == "Cumsum" else ""
    if letters is None or axes is None:
        return "-" + linear
    names = _shut(letters, *axes)
    return f"{names},*->{names}{linear}"


def rounded(seen: Seen) -> str | None:
    """Describe rounding to a given range; each slice along `axis` has a separate one."""
    letters, axis = _ranked(seen), seen.attr("axis", -1)
    if letters is None or not seen.attr("range_given", False):
        return None
    names = letters if axis == -1 else _shut(letters, axis)
    return f"{names},*+->{names}"


def pad(seen: Seen) -> str:
    """Return a text that can split dimensions without padding; only padding with zeros is linear."""
    pads, letters = seen.ints(1), _ranked(seen)
    linear = " linear 0" if seen.node.op == "Pad" else ""
    if pads is None or letters is None:
        return "-" + linear
    names = _shut(letters, *(i for i in range(len(letters)) if pads[2 * i : 2 * i + 2] != (0, 0)))
    return f"{names},*+->{names}{linear}"


def look_up(seen: Seen) -> str | None:
    """Describe a look-up of rows in a variable, or of keys in a table; both are whole."""
    keys, made = _ranked(seen, 1), seen.results[0].shape
    if keys is None or (seen.node.op == "ResourceGatherNd" and not keys):
        return None
    keys = _shut(keys, *range(seen.attr("batch_dims", 0)))
    names = keys[:-1] if seen.node.op == "ResourceGatherNd" else keys
    numbers = keys if names is keys else f"{names}."
    return f"*,{numbers},*+->{names}{'.' * (len(made or ()) - len(names))}"


def counts(seen: Seen) -> str | None:
    """Describe counts: a vector's blocks add up; DenseBincount counts each row of a matrix."""
    letters, rows = _ranked(seen), seen.node.op == "DenseBincount" and seen.rank(0) == 2
    if rows:
        return f"r.,*,{'r.' if seen.rank(2) == 2 else '*'}->r."
    fold = ":max" if seen.node.op == "DenseBincount" and seen.attr("binary_output", False) else ""
    return letters and f"{letters},*,{'*' if seen.operands[2].shape == (0,) else letters}->.|{letters}{fold}"


def decomposition(seen: Seen) -> str:
    """Describe a decomposition into values, and vectors, which are empty unless requested."""
    vectors = seen.attr("compute_uv" if seen.node.op == "Svd" else "compute_v")
    return f"@..->@.,{'@..' if vectors else '*'}+"


def diagonal(seen: Seen) -> str | None:
    """Describe matrices from diagonals, or the reverse; several diagonals have one more dimension."""
    rank, made = seen.rank(0), seen.results[0].shape
    if rank is None or made is None:
        return None
    free = "abcdefghijkl"[: (rank if "Part" in seen.node.op else len(made)) - 2]
    linear = " linear 0" if seen.node.op in ("MatrixDiag", "MatrixDiagPart") else ""  # others pad with a number
    return f"{free}{'.' * (rank - len(free))},*+->{free}{'.' * (len(made) - len(free))}{linear}"


def set_diagonal(seen: Seen) -> str | None:
    """Describe matrices with replaced diagonals, which is linear in both together."""
    rank, diagonals = seen.rank(0), seen.rank(1)
    if rank is None or diagonals is None or diagonals < rank - 1:
        return None
    free = "abcdefghijkl"[: rank - 2]
    return f"{free}..,{free}{'.' * (diagonals - len(free))},*+->{free}.. added 0 1"


def pool_with_places(seen: Seen) -> str | None:
    """Describe a pooling with positions; None if these count from the start of the batch."""
    return None if seen.attr("include_batch_in_index", False) else ",".join(["n..."] * len(seen.operands)) + "->n...+"


def make_list(seen: Seen) -> str:
    """Describe an empty list, or one of zeros; its elements are blocks if its element shape is."""
    names = "abcdefghijkl"[: len(seen.value(0) or ())]
    zero = " zero" if seen.node.op == "TensorListReserve" else ""
    return f"{'#' + names if seen.operands[0].kind == 'local' else '*'},*->{names}{zero}"


def resize_list(seen: Seen) -> str:
    """Describe a list with another length; new elements are zeros."""
    return "@,*->@ " + ("moves 0" if seen.operands[0].op == "sum" else "added 0")


def draw_by_parameters(seen: Seen) -> str | None:
    """Describe several draws for each parameter; the parameters are the last dimensions."""
    samples = seen.operands[0].shape
    return f"*,@->{'.' * samples[0]}@" if samples and isinstance(samples[0], int) else None


Entry = str | Callable[[Seen], str | None]

FUNCTIONS: Mapping[Callable[[Seen], str | None], str] = {
    matmul: "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    einsum: "Einsum",
    convolution: """Conv2D Conv2DBackpropInput Conv2DBackpropFilter DepthwiseConv2dNative
        DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter
        Conv3D Conv3DBackpropInputV2 Conv3DBackpropFilterV2""",
    pool: """AvgPool AvgPoolGrad MaxPool MaxPoolGrad MaxPoolGradGrad
        AvgPool3D AvgPool3DGrad MaxPool3D MaxPool3DGrad MaxPool3DGradGrad""",
    bias_add: "BiasAdd BiasAddV1",
    bias_add_grad: "BiasAddGrad",
    batch_norm: """FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3
        FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3""",
    transform: "ImageProjectiveTransformV2 ImageProjectiveTransformV3",
    cast: "Cast",
    select: "Select SelectV2",
    running: "Cumsum Cumprod CumulativeLogsumexp",
    rounded: "QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4",
    pad: "Pad PadV2 MirrorPad MirrorPadGrad",
    look_up: "ResourceGather ResourceGatherNd LookupTableFind LookupTableFindV2",
    counts: "Bincount DenseBincount",
    decomposition: "Svd SelfAdjointEigV2 Eig",
    diagonal: "MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3",
    set_diagonal: "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3",
    pool_with_places: "MaxPoolWithArgmax MaxPoolGradWithArgmax MaxPoolGradGradWithArgmax",
    make_list: "EmptyTensorList TensorListReserve",
    resize_list: "TensorListResize",
    draw_by_parameters: "RandomGamma RandomPoissonV2",
}


def _entries(texts: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in texts.strip().replace("\n    ", " ").splitlines():
        text, _, ops = entry.partition(" : ")
        found |= dict.fromkeys(ops.split(), text)
    return found


DRAWN = frozenset(_entries(DRAWS)) | frozenset(FUNCTIONS[draw_by_parameters].split())
TABLE: Mapping[str, Entry] = {
    **_entries(TEXTS),
    **_entries(DRAWS),
    **{op: function for function, ops in FUNCTIONS.items() for op in ops.split()},
}
"""By op."""


def text_of(seen: Seen) -> str | None:
    """Describe a node's op; None where all its values must be whole."""
    if seen.node.op in DRAWN and not any(text.startswith("random") for text in seen.inexact):
        return None
    entry = TABLE.get(seen.node.op)
    if entry is None and seen.stated is not None:
        return _text_of_user(seen.stated)
    return entry(seen) if callable(entry) else entry


def _text_of_user(said: Stated) -> str:
    """Return a user's factors in the notation of this table: `n ... d, d -> n ... d` becomes `n=b,b->n=b`."""
    letters: dict[str, str] = {}
    spare = iter(string.ascii_letters)

    def letter(word: re.Match[str]) -> str:
        if word[0] == "..." or word[0] == "." or word[0].startswith("-"):
            return "=" if word[0] == "..." else "."
        return letters.setdefault(word[0], next(spare, "."))

    text = re.sub(r"\s", "", re.sub(r"\.\.\.|-?\b[A-Za-z_]\w*|\.", letter, said.factors.replace("()", "")))
    terms = text.partition("->")[0].split(",")
    added = [i for i, term in enumerate(terms) if term != "*" and not term.startswith("#")] if said.additive else []
    traits = (("linear", said.linear), ("added", added))
    return " ".join([text, *(f"{word} {' '.join(map(str, operands))}" for word, operands in traits if operands)])
