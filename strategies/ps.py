"""PS: one server holds all variables; replicas push gradients to it and read values from it."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice
from autograph_rewrite.strategies.servers import first_server


@dataclass(frozen=True)
class PS:
    """All variables on the first parameter server, or on the first worker's CPU:0 where the cluster has none."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable lives on one device."""
        pool = first_server(config)
        return assemble(item, config, lambda trained: Choice("ps"), strategy="PS", pool=pool)
