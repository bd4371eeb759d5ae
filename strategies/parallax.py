"""Parallax: dense gradients are all-reduced, sparse ones go to parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice, Trained


def _by_gradient(trained: Trained) -> Choice:
    return Choice("ps" if trained.role.sparse else "all_reduce")


@dataclass(frozen=True)
class Parallax:
    """Variables that are only looked up by row live on the servers, balanced by size; all others are replicated."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which the kind of its gradient decides about each trained variable."""
        return assemble(item, config, _by_gradient, strategy="Parallax")
