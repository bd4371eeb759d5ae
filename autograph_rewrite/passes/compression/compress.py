"""Make a gradient smaller on its way, as its edge says.

    before   %dw: partial(sum) ──► sum ──► update
    after    %dw ──► code ──► exchange ──► decode ──► update          (error feedback: residual := dw + residual - code)

A compressed value is a sum that belongs to a variable, dense and of a fixed shape (`compress_choice`). What travels
depends on the compressor, how it travels on the edge's lowering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autograph_rewrite.analysis.facts.placement import Fact
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.collectives.exchange import Exchange
from autograph_rewrite.passes.compression.cast16 import reduce_cast16
from autograph_rewrite.passes.compression.powersgd import reduce_powersgd
from autograph_rewrite.passes.compression.topk import reduce_topk
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.resolve import wire_types
from autograph_rewrite.resolve.compression import FACTOR, GATHERS, SIXTEEN_BIT, matrix, shape_of

REDUCERS: Mapping[str, Callable[[Exchange, Value, Fact], Value]] = {
    **dict.fromkeys(SIXTEEN_BIT, reduce_cast16),
    "topk": reduce_topk,
    "powersgd": reduce_powersgd,
}


def reduce(exchange: Exchange, value: Value, fact: Fact) -> Value:
    """Return the sum of a value's instances, of which each sends less than it holds.

    Args:
        exchange: the edge that is lowered, with its compressor and keys.
        value: the gradient of each replica.
        fact: of it.

    Raises:
        PassError: the plan asks for a compressor that cannot act on this value.
    """
    context, edge = exchange.context, exchange.planned
    _require_fit(value, fact, edge, shape_of(fact, context.owners.get(edge.owner)), context.plan)
    return REDUCERS[edge.compressor](exchange, value, fact)


def _require_fit(value: Value, fact: Fact, edge: EdgePlan, shape: tuple[int, ...], plan: Plan) -> None:
    problem = ""
    adds, gathers = ("add_n", *GATHERS), tuple(GATHERS.values())
    fitting = {"topk": ("concat", *gathers), "powersgd": adds}.get(edge.compressor, (*adds, *gathers))
    if wire_types.may_change(fact) or fact.placement.op != "sum" or fact.dtype not in dtypes.FLOATING:
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
