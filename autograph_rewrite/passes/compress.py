"""Make a gradient smaller on its way, as its edge says.

    before   %dw: partial(sum) ──► sum ──► update
    after    %dw ──► code ──► exchange ──► decode ──► update          (error feedback: residual := dw + residual - code)

A compressed value is a sum that belongs to a variable, dense and of a fixed shape (`compress_choice`). What travels
depends on the compressor, how it travels on the edge's lowering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.passes import combine
from autograph_rewrite.passes.compress_choice import FACTOR, GATHERS, HALVES, matrix, shape_of
from autograph_rewrite.passes.compress_halves import reduce_halves
from autograph_rewrite.passes.compress_powersgd import reduce_factors
from autograph_rewrite.passes.compress_topk import reduce_largest
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.keys import Keys
from autograph_rewrite.plan.parts import EdgePlan
from autograph_rewrite.plan.plan import Plan

REDUCERS: Mapping[str, Callable[[Context, Value, Fact, EdgePlan, Keys], Value]] = {
    **dict.fromkeys(HALVES, reduce_halves),
    "topk": reduce_largest,
    "powersgd": reduce_factors,
}


def reduce(context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys) -> Value:
    """Return the sum of a value's instances, of which each sends less than it holds.

    Raises:
        PassError: the plan asks for a compressor that cannot act on this value.
    """
    _require_fit(value, fact, edge, shape_of(fact, context.owners.get(edge.owner)), context.plan)
    return REDUCERS[edge.compressor](context, value, fact, edge, keys)


def _require_fit(value: Value, fact: Fact, edge: EdgePlan, shape: tuple[int, ...], plan: Plan) -> None:
    problem = ""
    adds, gathers = ("add_n", *GATHERS), tuple(GATHERS.values())
    fitting = {"topk": ("concat", *gathers), "powersgd": adds}.get(edge.compressor, (*adds, *gathers))
    if combine.may_change(fact) or fact.placement.op != "sum" or fact.dtype not in dtypes.FLOATING:
        problem = "it is no sum of floats of a fixed shape"
    elif edge.compressor == "powersgd" and min(matrix(shape)) < 2:
        problem = "it is no matrix"
    elif edge.compressor == "topk" and not math.prod(shape):
        problem = "it has no elements"
    elif edge.lowering not in fitting:
        problem = f"{edge.lowering} cannot carry that"
    elif edge.compressor == "powersgd" and not any(_is_second(other, edge) for other in plan.edges):
        problem = f"there is no second edge, with role: {FACTOR}"
    if problem:
        raise PassError(
            f"the plan compresses '{edge.value}' by {edge.compressor}, but {problem}",
            node=value.node,
            hint="set its compressor to none, or delete the plan's edges to have them resolved anew",
        )


def _is_second(other: EdgePlan, edge: EdgePlan) -> bool:
    return (other.value, other.to, other.role) == (edge.value, edge.to, FACTOR)
