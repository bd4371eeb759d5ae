"""AllReduce: every replica holds every variable, and each gradient is summed over all replicas."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.items import ItemLike
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import request


@dataclass(frozen=True)
class AllReduce:
    """All variables replicated: as one copy (`variables: shared`) or as one per device (`mirrored`)."""

    def build(self, item: ItemLike, config: Config) -> Plan:
        """The request in which every variable's gradient is all-reduced."""
        return request(item, config, strategy="AllReduce")
