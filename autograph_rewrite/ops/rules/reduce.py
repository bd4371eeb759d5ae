"""Reductions: over the split dimension they give a partial result, over others the result stays split."""

from __future__ import annotations

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, Axes, Placement, Shape, split
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, scalar, whole
from autograph_rewrite.ops.rules.kernels import by_kernel
from autograph_rewrite.ops.traits import has, ops_with


def axes(n: Op) -> frozenset[int] | None:
    """Return the reduced dimensions, None when they or the rank are unknown."""
    wanted, rank = n.ints(1), n.rank(0)
    if wanted is None or rank is None:
        return None
    return frozenset(axis % rank for axis in wanted) if rank else frozenset()


def _axes(n: Op) -> Axes | None:
    """Return bounds on the reduced dimensions; None where nothing is known about them."""
    reduced = axes(n)
    if reduced is None:
        return n.inputs[1].axes if n.rank(0) is not None else None
    return Axes(reduced, reduced)


def place_reduction(n: Op) -> Placed:
    """Place Sum, Mean, Max, Min, Prod, All, Any."""
    placement = n.placement(0)
    if placement == PARTIAL and n.op in ("Sum", "Mean") and dtypes.base(n.inputs[0].dtype) in dtypes.INEXACT:
        return Placed((PARTIAL,), zero=(n.inputs[0].zero,))
    reduced = _axes(n)
    if not placement.is_split or reduced is None or (placement.dim in reduced.possible - reduced.sure):
        return whole(n)
    if reduced.sure != reduced.possible and not n.attr("keep_dims"):
        # The rank of the result is open: `passes.canonicalize.decompose` rewrites the op with `keep_dims`.
        return whole(n)._replace(decompose=n.op == "Sum")
    if placement.dim not in reduced.sure:
        kept = placement.dim if n.attr("keep_dims") else placement.dim - sum(a < placement.dim for a in reduced.sure)
        return Placed((split(kept),))
    if n.op == "Mean":
        return Placed((PARTIAL,), decompose=True)
    return Placed((Placement("partial", op=n.op.lower()),)) if has(n.op, "combines") else whole(n)


def place_norm(n: Op) -> Placed:
    """Place EuclideanNorm: split on other dimensions, whole over the split one."""
    reduced, placement = axes(n), n.placement(0)
    if placement.is_split and reduced is not None and placement.dim not in reduced:
        return place_reduction(n)
    return whole(n)


def place_l2_loss(n: Op) -> Placed:
    """Half the sum of squares: blocks give contributions."""
    return Placed((PARTIAL,)) if n.placement(0).is_split else whole(n)


def shape_reduction(n: Op) -> tuple[Shape | None, ...]:
    """Drop the reduced dimensions, or keep them as 1."""
    reduced, shape = _axes(n), n.shape(0)
    if reduced is None or shape is None:
        return (None,)
    left = [1 if i in reduced.sure else None if i in reduced.possible else dim for i, dim in enumerate(shape)]
    if n.attr("keep_dims"):
        return (tuple(left),)
    if reduced.sure != reduced.possible:
        return (None,)
    return (tuple(dim for i, dim in enumerate(left) if i not in reduced.sure),)


RULES = {op: Rule(place_reduction, shape_reduction, by_kernel) for op in ops_with("reduces")} | {
    "EuclideanNorm": Rule(place_norm, shape_reduction),
    "L2Loss": Rule(place_l2_loss, scalar),
}
