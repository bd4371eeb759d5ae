"""Reads and updates of variables: a read has the placement of the variable, and an update needs the gradient in it.

    replicated    a read is replicated      an update takes the reduced gradient
    split(d)      a read is split(d)        an update takes each device's block of the gradient

The fact of a handle has the variable's shape and placement, so that the rules of its readers know them.
"""

from __future__ import annotations

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import dense_arguments, rows_argument
from autograph_rewrite.ops.facts.placement import REPLICATED, Placement, Shape
from autograph_rewrite.ops.facts.symbolic_dims import are_same
from autograph_rewrite.ops.rules.base import Op, Placed, Reshard, Rule, block_of, made_whole, scalar, whole
from autograph_rewrite.ops.rules.signature import every


def variable_shape(n: Op) -> Shape | None:
    """Return the shape of the variable of the first input; None for a captured handle, which only states a scalar."""
    return n.shape(0) or None


def _content(n: Op) -> tuple[Shape | None]:
    if n.static[0] is not None and not n.placement(0).is_split:
        return (n.static[0],)
    return (variable_shape(n),)


def _shape_of_shape(n: Op) -> tuple[Shape | None]:
    shape = variable_shape(n)
    return (n.static[0] if shape is None else (len(shape),),)


def _place_read(n: Op) -> Placed:
    """Return the block of the variable that each device holds."""
    return Placed((n.placement(0),)) if n.placement(0).is_split else whole(n)


ALL_HAVE_A_VALUE = Placement("partial", op="all")


def _place_question(n: Op) -> Placed:
    """Ask for each device's block: all blocks must have a value."""
    return Placed((ALL_HAVE_A_VALUE,)) if n.placement(0).is_split else whole(n)


def _place_update(n: Op) -> Placed:
    """Update each device's block; operands with the variable's shape are split like it, all others are whole."""
    held = n.inputs[0]
    block = block_of(held.placement.dim, held.split_size)
    if not held.placement.is_split or block is None:
        return whole(n)
    dense = set(dense_arguments(n.op))
    wanted: dict[int, Reshard] = {}
    rows = rows_argument(n.op) if held.placement.dim else None  # a shard of columns has a part of every row
    for i, fact in enumerate(n.inputs):
        if dtypes.base(fact.dtype) == dtypes.RESOURCE:
            continue
        if i == rows and fact.rank:
            wanted[i] = block._replace(dim=fact.rank + held.placement.dim - len(held.shape or ()))
        elif i not in dense:
            wanted |= made_whole(n, i)
        elif fact.placement != held.placement or not are_same(fact.split_size, held.split_size):
            wanted[i] = block
    return Placed((REPLICATED,) * len(n.output_dtypes), wanted)


UPDATE = Rule(_place_update)

RULES: dict[str, Rule] = {
    "VarHandleOp": Rule(whole, lambda n: (n.attr("shape"),)),  # the shape of the variable, not of its handle
    "ReadVariableOp": Rule(_place_read, _content),
    "VariableShape": Rule(whole, _shape_of_shape, lambda n: (variable_shape(n),)),
    "VarIsInitializedOp": Rule(_place_question, scalar),
    "ResourceCountUpTo": Rule(whole, scalar),
    **every(
        UPDATE,
        "AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceStridedSliceAssign",
        "DestroyResourceOp",
        "ResourceApplyAdadelta ResourceApplyAdagrad ResourceApplyAdagradDA ResourceApplyAdagradV2",
        "ResourceApplyAdaMax ResourceApplyAdam ResourceApplyAdamWithAmsgrad ResourceApplyAddSign",
        "ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2 ResourceApplyMomentum",
        "ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyPowerSign",
        "ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent ResourceApplyRMSProp",
        "ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad ResourceSparseApplyAdagradDA",
        "ResourceSparseApplyAdagradV2 ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl",
        "ResourceSparseApplyFtrlV2 ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum",
        "ResourceSparseApplyProximalAdagrad ResourceSparseApplyProximalGradientDescent",
        "ResourceSparseApplyRMSProp",
        "ResourceScatterAdd ResourceScatterSub ResourceScatterMul ResourceScatterDiv",
        "ResourceScatterMin ResourceScatterMax ResourceScatterUpdate",
        "ResourceScatterNdAdd ResourceScatterNdSub ResourceScatterNdMin ResourceScatterNdMax",
        "ResourceScatterNdUpdate",
    ),
}
