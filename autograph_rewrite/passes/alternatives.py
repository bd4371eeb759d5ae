"""Suggest alternatives to a refused configuration of micro-batches or stages; each is tried on the graph first.

    'conv/bn/Sub' needs 'conv/bn/mean' of the whole batch, for which no stage of a pipeline can wait
      hint set semantics.batch_norm to local (...); or leave pipeline out: microbatches without stages can meet

A refused graph does not run, so there is time to try them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autograph_rewrite.errors import PlanError, RewriteError
from autograph_rewrite.passes.micro_batches.while_frame import UNROLL
from autograph_rewrite.plan.plan import Plan

LOCAL = "set semantics.batch_norm to local (each micro-batch is then normalised by its own statistics)"


def add_alternatives(error: RewriteError, plan: Plan, attempt: Callable[[Plan], object]) -> None:
    """Add the alternatives that are accepted to the hint of a refusal.

    Args:
        plan: the refused plan.
        attempt: repeats the rewrite with another plan, and raises if that is refused, too.
    """
    if plan.microbatches == 1 or (isinstance(error, PlanError) and not plan.looped and error.hint):
        return  # the hint already says how to correct the plan
    lifting = [text for text, other in _alternatives(plan) if _is_accepted(attempt, other)]
    # `_alternatives` tries the unrolled form itself.
    own = [error.hint] if error.hint and error.hint != UNROLL else []
    error.change_hint("; or ".join([*own, *lifting]) or None)


def _alternatives(plan: Plan) -> Iterator[tuple[str, Plan]]:
    request = replace(plan, edges=())
    micro = plan.micro
    if plan.semantics.batch_norm == "sync":
        yield LOCAL, replace(request, semantics=replace(plan.semantics, batch_norm="local"))
    if micro is not None and plan.looped:
        section = "accumulation" if plan.pipeline is None else "pipeline"
        yield f"set {section}.form to unrolled", replace(request, micro=replace(micro, loop=False))
    if plan.pipeline is not None and plan.mode == "mirrored":
        yield "set strategy.variables to shared", replace(request, mode="shared")
    if micro is not None and plan.pipeline is not None and not plan.is_driven:
        text = "leave pipeline out: microbatches without stages can meet"
        yield text, replace(request, pipeline=None, micro=replace(micro, loop=False))


def _is_accepted(attempt: Callable[[Plan], object], plan: Plan) -> bool:
    try:
        attempt(plan)
    except RewriteError:
        return False
    return True
