"""Exchange what the members send of a value: add it up, or let all have it all, in one process and with collectives."""

from __future__ import annotations

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.keys import Keys, collective_attrs
from autograph_rewrite.passes.scope import Scope
from autograph_rewrite.plan.lowerings import HOST
from autograph_rewrite.plan.parts import EdgePlan

ROLE_ATTR = "_autograph_role"
"""Tells the merging nodes of one value apart, as the role of an edge does."""


def members(context: Context, edge: EdgePlan) -> int:
    """Return how many meet in an exchange: the replicas, or the processes."""
    return context.processes if edge.lowering in HOST else context.replicas


def contribution(context: Context, value: Value, fact: Fact, edge: EdgePlan) -> Value:
    """Return what one member adds to a sum, in the type of the sum: a replica's value, or that of a whole process."""
    name = value.node.name
    wide = combine.cast(context, value, combine.wire_type(fact.dtype, "sum"), f"{name}/widen")
    if edge.lowering not in HOST:
        return wide
    scope = Scope(context, wide, name, origin=value.node)
    return scope.gather("AddN", wide, what="add_n") if context.local > 1 else context.once(wide)


def add_up(scope: Scope, value: Value, edge: EdgePlan, keys: Keys, what: str = "") -> Value:
    """Return the sum of what the members hold, in its own type."""
    if edge.lowering == "add_n":
        role = {ROLE_ATTR: edge.role} if edge.role else {}
        return scope.gather("AddN", value, what=what + "add_n", **role)
    attrs = collective_attrs(scope.context, edge) | {"merge_op": "Add", "final_op": "Id"}
    operands = keys(scope.context, edge, value, changing=False)
    return scope.each("CollectiveReduceV2", value, *operands, what=what + "all_reduce", **attrs)


def gather_all(scope: Scope, vector: Value, edge: EdgePlan, keys: Keys) -> Value:
    """Return the members' vectors, equally long, one behind the other."""
    if edge.lowering == "concat":
        return scope.gather("ConcatV2", vector, scope.const(0, dtypes.INT32, "axis"), what="concat")
    operands = keys(scope.context, edge, vector, changing=False)
    attrs = collective_attrs(scope.context, edge)
    return scope.each("CollectiveGatherV2", vector, *operands, what="all_gather", **attrs)
