"""Variables have one value everywhere; every op that updates one reads the whole gradient.

The fact of a handle carries the variable's shape, so that whoever reads the variable knows it.
"""

from __future__ import annotations

from autograph_rewrite.analysis.dims import Dim
from autograph_rewrite.analysis.fact import Shape
from autograph_rewrite.analysis.rules.base import Op, Rule, whole


def _handle(n: Op) -> tuple[Shape | None]:
    """Shape of the variable, not of its handle."""
    return (n.attr("shape"),)


def _content(n: Op) -> tuple[Shape | None]:
    return (n.shape(0) if n.shape(0) is not None else n.static[0],)


def _shape_of_shape(n: Op) -> tuple[Shape | None]:
    rank = n.rank(0)
    return (n.static[0],) if rank is None else ((rank,),)


def _shape_value(n: Op) -> tuple[tuple[Dim, ...] | None]:
    return (n.shape(0),)


def _scalar(n: Op) -> tuple[Shape]:
    return ((),)


UPDATE = Rule(whole)

_DENSE = (
    "Adadelta Adagrad AdagradDA AdagradV2 AdaMax Adam AdamWithAmsgrad AddSign CenteredRMSProp Ftrl FtrlV2 "
    "GradientDescent KerasMomentum Momentum PowerSign ProximalAdagrad ProximalGradientDescent RMSProp"
)
_SPARSE = (
    "Adadelta Adagrad AdagradDA AdagradV2 CenteredRMSProp Ftrl FtrlV2 KerasMomentum Momentum ProximalAdagrad "
    "ProximalGradientDescent RMSProp"
)

RULES: dict[str, Rule] = {
    "VarHandleOp": Rule(whole, _handle),
    "ReadVariableOp": Rule(whole, _content),
    "VariableShape": Rule(whole, _shape_of_shape, _shape_value),
    "VarIsInitializedOp": Rule(whole, _scalar),
    "ResourceCountUpTo": Rule(whole, _scalar),
    **dict.fromkeys(
        ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "DestroyResourceOp"), UPDATE
    ),
    **dict.fromkeys((f"ResourceApply{name}" for name in _DENSE.split()), UPDATE),
    **dict.fromkeys((f"ResourceSparseApply{name}" for name in _SPARSE.split()), UPDATE),
    **dict.fromkeys((f"ResourceScatter{name}" for name in "Add Sub Mul Div Min Max Update".split()), UPDATE),
    **dict.fromkeys((f"ResourceScatterNd{name}" for name in "Add Sub Min Max Update".split()), UPDATE),
    "ResourceStridedSliceAssign": UPDATE,
}
