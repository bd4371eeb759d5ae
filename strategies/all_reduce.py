"""AllReduce: every replica holds every variable, and each gradient is summed over all replicas."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice


@dataclass(frozen=True)
class AllReduce:
    """All variables replicated: as one copy (`variables: shared`) or as one per device (`mirrored`)."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every variable's gradient is all-reduced."""
        return assemble(item, config, lambda trained: Choice(), strategy="AllReduce")
