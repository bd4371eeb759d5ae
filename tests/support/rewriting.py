"""Rewrites without the driver around them: a flat item and a plan, and who looks on."""

from __future__ import annotations

from collections.abc import Sequence

from autograph_rewrite.ir.claims import Certifier
from autograph_rewrite.item import GraphItem
from autograph_rewrite.passes import pass_pipeline
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.passes.base.rewriting import Request
from autograph_rewrite.plan.plan import Plan


def run_pipeline(
    flat: GraphItem,
    plan: Plan,
    *,
    task: int = 0,
    observers: Sequence[Observer] = (),
    certificate: Certifier | None = None,
) -> GraphItem:
    """Return what one task of a plan runs."""
    return pass_pipeline.rewrite(Request(flat, plan, task, certificate=certificate), observers=observers)
