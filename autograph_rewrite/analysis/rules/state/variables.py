"""Variables are replicated; an op that updates one needs the reduced gradient.

The fact of a handle carries the variable's shape, so that whoever reads the variable knows it.
"""

from __future__ import annotations

from autograph_rewrite.analysis.facts.placement import Shape
from autograph_rewrite.analysis.facts.symbolic_dims import Dim
from autograph_rewrite.analysis.rules.base import Op, Rule, whole
from autograph_rewrite.analysis.rules.signature import every


def _handle(n: Op) -> tuple[Shape | None]:
    """Shape of the variable, not of its handle."""
    return (n.attr("shape"),)


def variable_shape(n: Op) -> Shape | None:
    """Return the shape of the variable behind the first input; a captured handle only says that it is a scalar."""
    return n.shape(0) or None


def _content(n: Op) -> tuple[Shape | None]:
    return (n.static[0] if n.static[0] is not None else variable_shape(n),)


def _shape_of_shape(n: Op) -> tuple[Shape | None]:
    shape = variable_shape(n)
    return (n.static[0] if shape is None else (len(shape),),)


def _shape_value(n: Op) -> tuple[tuple[Dim, ...] | None]:
    return (variable_shape(n),)


def _scalar(n: Op) -> tuple[Shape]:
    return ((),)


UPDATE = Rule(whole)

RULES: dict[str, Rule] = {
    "VarHandleOp": Rule(whole, _handle),
    "ReadVariableOp": Rule(whole, _content),
    "VariableShape": Rule(whole, _shape_of_shape, _shape_value),
    "VarIsInitializedOp": Rule(whole, _scalar),
    "ResourceCountUpTo": Rule(whole, _scalar),
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
