"""Elementwise ops: blocks in, blocks out; contributions stay contributions only through linear ops.

Inputs broadcast as in numpy. A replicated input that has the split dimension is sliced to this replica's block.
"""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, are_rows, broadcast, is_whole_of, to_global
from autograph_rewrite.ops.rules.base import Op, Placed, Reshard, Rule, block_of, whole
from autograph_rewrite.ops.rules.kernels import SIZE_ARITHMETIC, by_kernel
from autograph_rewrite.ops.traits import ops_with

LINEAR_UNARY = ("Neg", "Real", "Imag", "Conj")
UNARY = (
    "Abs", "Acos", "Acosh", "Angle", "Asin", "Asinh", "Atan", "Atanh", "BesselI0", "BesselI0e", "BesselI1",
    "BesselI1e", "BesselJ0", "BesselJ1", "BesselK0", "BesselK0e", "BesselK1", "BesselK1e", "BesselY0", "BesselY1",
    "Ceil", "CheckNumerics", "CheckNumericsV2", "ComplexAbs", "Cos", "Cosh", "Dawsn", "Digamma", "Elu", "Erf", "Erfc",
    "Erfinv", "Exp", "Expint", "Expm1", "Floor", "FresnelCos", "FresnelSin", "Inv", "Invert", "IsFinite", "IsInf",
    "IsNan", "LeakyRelu", "Lgamma", "Log", "Log1p", "LogicalNot", "Ndtri", "OnesLike", "PopulationCount",
    "Reciprocal", "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign",
    "Sin", "Sinh", "Softplus", "Softsign", "Spence", "Sqrt", "Square", "Tan", "Tanh",
)  # fmt: skip

LINEAR_IN: dict[str, tuple[int, ...]] = {
    # op: the inputs in which it is linear while the others are fixed
    "Mul": (0, 1), "MulNoNan": (0,), "RealDiv": (0,), "Div": (0,), "DivNoNan": (0,), "Xdivy": (0,), "Complex": (),
    "ReluGrad": (0,), "Relu6Grad": (0,), "LeakyReluGrad": (0,), "EluGrad": (0,), "SeluGrad": (0,),
    "SoftplusGrad": (0,), "SoftsignGrad": (0,), "TanhGrad": (1,), "SigmoidGrad": (1,), "SqrtGrad": (1,),
    "RsqrtGrad": (1,), "ReciprocalGrad": (1,), "InvGrad": (1,),
}  # fmt: skip
NONLINEAR_BINARY = (
    "ApproximateEqual", "Atan2", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Igamma", "IgammaGradA", "Igammac", "LeftShift", "Less", "LessEqual", "LogicalAnd", "LogicalOr",
    "Maximum", "Minimum", "Mod", "NextAfter", "NotEqual", "Polygamma", "Pow", "RightShift", "SquaredDifference",
    "TruncateDiv", "TruncateMod", "Xlog1py", "Xlogy", "Zeta", "Betainc", "ClipByValue",
)  # fmt: skip
AFFINE = ("Add", "AddV2", "Sub", "AddN", "AccumulateNV2")


def _inexact(n: Op, index: int) -> bool:
    return dtypes.base(n.inputs[index].dtype) in dtypes.INEXACT


def place_keeper(n: Op) -> Placed:
    """Pass one value on unchanged."""
    return Placed((n.placement(0),), zero=(n.inputs[0].zero,))


def place_identity_n(n: Op) -> Placed:
    """Pass several values on unchanged."""
    return Placed(tuple(fact.placement for fact in n.inputs), zero=tuple(fact.zero for fact in n.inputs))


def place_unary(n: Op) -> Placed:
    """Keep a split; the op is not linear, so contributions become whole."""
    return Placed((n.placement(0),)) if n.placement(0).is_split else whole(n)


def place_linear_unary(n: Op) -> Placed:
    """Keep a split, or contributions, whose sum commutes with the op."""
    if n.placement(0) == PARTIAL and _inexact(n, 0):
        return Placed((PARTIAL,), zero=(n.inputs[0].zero,))
    return place_unary(n)


def place_zeros_like(n: Op) -> Placed:
    """Keep the placement of the operand: zeros are replicated, split and partial at once."""
    placement = n.placement(0)
    stays = placement.is_split or placement == PARTIAL
    return (Placed((placement,)) if stays else whole(n))._replace(zero=(True,))


_MANTISSA = {dtypes.BFLOAT16: 8, dtypes.HALF: 11, dtypes.FLOAT: 24, dtypes.DOUBLE: 53}


def place_cast(n: Op) -> Placed:
    """Widening a floating type is linear; everything else rounds, so contributions are summed first."""
    placement = n.placement(0)
    source, target = dtypes.base(n.inputs[0].dtype), n.output_dtypes[0]
    widens = _MANTISSA.get(source, 99) <= _MANTISSA.get(target, 0)
    stays = placement.is_split or (placement == PARTIAL and widens)
    return (Placed((placement,)) if stays else whole(n))._replace(zero=(n.inputs[0].zero,))


def split_wants(n: Op, indices: Sequence[int], rank: int, dim: int, size: Dim) -> dict[int, Reshard] | None:
    """Return the conversions by which all inputs of a broadcasting op hold the same block of output dimension `dim`.

    None where that is not known to be sound: a size is unknown, or blocks cannot be computed.

    Args:
        indices: operands that are broadcast.
        size: of the block along `dim`.
    """
    operand_reshards: dict[int, Reshard] = {}
    for i in indices:
        fact = n.inputs[i]
        if fact.shape is None:
            return None
        mine = dim - (rank - len(fact.shape))
        placement = fact.placement
        if placement.is_split and placement.dim == mine and are_rows(fact.split_size, size):
            continue
        if mine < 0 or fact.shape[mine] == 1:
            if placement.differs:
                operand_reshards[i] = REPLICATED
            continue
        block, batch = block_of(mine, size), n.semantics.extent.units
        if block is None or not is_whole_of(to_global(fact.shape[mine], batch), size, batch):
            return None
        operand_reshards[i] = block
    return operand_reshards


def place_nonlinear(n: Op) -> Placed:
    """Place a broadcasting op that is linear in no operand."""
    cut = [fact for fact in n.inputs if fact.placement.is_split]
    ranks = [len(fact.shape) for fact in n.inputs if fact.shape is not None]
    if not cut or len(ranks) < len(n.inputs):
        return whole(n)
    widest = max(cut, key=lambda fact: fact.rank or 0)  # of several, the first
    dim = widest.placement.dim + max(ranks) - (widest.rank or 0)
    operand_reshards = split_wants(n, range(len(n.inputs)), max(ranks), dim, widest.split_size)
    return whole(n) if operand_reshards is None else Placed((split(dim),), operand_reshards)


def place_multilinear(n: Op) -> Placed:
    """Place an op that is linear in some inputs: one partial there, with all others replicated, stays partial."""
    partial = [i for i, fact in enumerate(n.inputs) if fact.placement.is_partial]
    others_whole = all(fact.placement == REPLICATED for i, fact in enumerate(n.inputs) if i not in partial)
    alone = len(partial) == 1 and others_whole and n.placement(partial[0]) == PARTIAL and _inexact(n, partial[0])
    if alone and partial[0] in LINEAR_IN[n.op]:
        return Placed((PARTIAL,), zero=(n.inputs[partial[0]].zero,))
    return place_nonlinear(n)


def place_affine(n: Op) -> Placed:
    """Add: partial terms stay partial; a replicated term must not be counted once per replica."""
    facts = n.inputs
    zero = (all(fact.zero for fact in facts),)
    sums = [i for i, fact in enumerate(facts) if fact.placement == PARTIAL]
    if not sums or any(fact.placement.is_split for fact in facts):
        return place_nonlinear(n)._replace(zero=zero)
    rest = [i for i, fact in enumerate(facts) if i not in sums and not fact.zero]
    if not rest:
        return Placed((PARTIAL,), zero=zero)
    if len(sums) > 1 and all(facts[i].placement == REPLICATED for i in rest):
        return Placed((PARTIAL,), {i: PARTIAL for i in rest})  # one reduction of the sum instead of one per term
    return whole(n)


def place_select(n: Op) -> Placed:
    """Choose between two values: linear in both while the condition is replicated."""
    condition, arms = n.inputs[0], n.inputs[1:]
    sums = [fact for fact in arms if fact.placement == PARTIAL]
    others_are_zero = all(f in sums or (f.zero and not f.placement.is_split) for f in arms)
    if condition.placement == REPLICATED and sums and others_are_zero:
        return Placed((PARTIAL,))
    old_vector_form = n.op == "Select" and condition.rank == 1 and (arms[0].rank or 0) > 1
    if not old_vector_form:
        return place_nonlinear(n)
    # The vector condition of the old Select chooses rows: it aligns with dimension 0, not with the last dimension.
    rows = next((f.split_size for f in (condition, *arms) if f.placement == split(0)), None)
    block = block_of(0, rows)
    if block is None:
        return whole(n)
    operand_reshards: dict[int, Reshard] = {
        i: block for i, f in enumerate(n.inputs) if not (f.placement == split(0) and f.split_size == rows)
    }
    return Placed((split(0),), operand_reshards)


def shape_same(n: Op) -> tuple[Shape | None, ...]:
    """Return for each output the shape of the input at the same position."""
    return tuple(n.shape(min(i, len(n.inputs) - 1)) for i in range(len(n.output_dtypes)))


def shape_broadcast(n: Op) -> tuple[Shape | None, ...]:
    """Return the broadcast shape of all inputs."""
    return (broadcast([fact.shape for fact in n.inputs]),)


def shape_select(n: Op) -> tuple[Shape | None, ...]:
    """Return the broadcast shape of the arms (and of the condition, for SelectV2)."""
    return (broadcast([fact.shape for fact in (n.inputs if n.op == "SelectV2" else n.inputs[1:])]),)


def value_same(n: Op) -> tuple[tuple[Dim, ...] | None, ...]:
    """Return the contents of each input unchanged."""
    return tuple(fact.value for fact in n.inputs)


def value_cast(n: Op) -> tuple[tuple[Dim, ...] | None, ...] | None:
    """Keep sizes in a cast between integers; a cast to another type needs global sizes."""
    is_size = n.output_dtypes[0] in (dtypes.INT32, dtypes.INT64) and dtypes.base(n.inputs[0].dtype) in dtypes.INTEGER
    return (n.value(0),) if is_size else None


def _rules() -> dict[str, Rule]:
    rules = {op: Rule(place_unary, shape_same) for op in UNARY}
    rules |= {op: Rule(place_linear_unary, shape_same) for op in LINEAR_UNARY}
    rules |= {op: Rule(place_keeper, shape_same, value_same) for op in ops_with("forwards") - {"RefIdentity"}}
    rules["IdentityN"] = Rule(place_identity_n, shape_same, value_same)
    rules["ZerosLike"] = Rule(place_zeros_like, shape_same)
    rules["Cast"] = Rule(place_cast, shape_same, value_cast)
    rules |= {op: Rule(place_multilinear, shape_broadcast) for op in LINEAR_IN}
    rules |= {op: Rule(place_nonlinear, shape_broadcast) for op in NONLINEAR_BINARY}
    rules |= {op: Rule(place_affine, shape_broadcast) for op in AFFINE}
    rules |= {op: Rule(place_select, shape_select) for op in ("Select", "SelectV2")}
    for op in SIZE_ARITHMETIC:
        rules[op] = rules[op]._replace(value=by_kernel)
    return rules


RULES = _rules()
