"""Exchange what replicas send of a value: add it up, or let all have it all, in one process and with collectives."""

from __future__ import annotations

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.keys import collective_attrs
from autograph_rewrite.passes.scope import Scope
from autograph_rewrite.plan.parts import EdgePlan

ROLE_ATTR = "_autograph_role"
"""Tells the merging nodes of one value apart, as the role of an edge does."""


def add_up(scope: Scope, value: Value, edge: EdgePlan, keys: combine.Keys, what: str = "") -> Value:
    """Return the sum of a value's instances, in its own type."""
    context = scope.context
    if edge.lowering in ("add_n", "host_reduce"):
        total = scope.gather("AddN", value, what=what + "add_n", **_role(edge))
        if edge.lowering == "add_n":
            return total
        return combine.reduce_members(context, total, "sum", edge, keys, changing=False)
    attrs = collective_attrs(context, edge) | {"merge_op": "Add", "final_op": "Id"}
    operands = keys(context, edge, value, changing=False)
    return scope.each("CollectiveReduceV2", value, *operands, what=what + "all_reduce", **attrs)


def _role(edge: EdgePlan) -> dict[str, str]:
    return {ROLE_ATTR: edge.role} if edge.role else {}


def gather_all(scope: Scope, vector: Value, edge: EdgePlan, keys: combine.Keys) -> Value:
    """Return the replicas' vectors, equally long, one behind the other."""
    context = scope.context
    if edge.lowering in ("concat", "host_gather"):
        joined = scope.gather("ConcatV2", vector, scope.const(0, dtypes.INT32, "axis"), what="concat")
        if edge.lowering == "concat":
            return joined
        operands = keys(context, edge, joined, changing=False)
        return scope.once("CollectiveGatherV2", joined, *operands, what="all_gather", **collective_attrs(context, edge))
    operands = keys(context, edge, vector, changing=False)
    return scope.each("CollectiveGatherV2", vector, *operands, what="all_gather", **collective_attrs(context, edge))
