"""PartitionedPS: as PSLoadBalancing, with every variable split along its first axis into equal shards."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice, Trained
from autograph_rewrite.strategies.shards import smallest_divisor
from autograph_rewrite.strategies.splitting import along


def _split(trained: Trained) -> Choice:
    return Choice("ps", along(trained, 0, smallest_divisor))


@dataclass(frozen=True)
class PartitionedPS:
    """As many shards as the smallest divisor of the first axis says; they take turns on the servers."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable is split over the servers."""
        return assemble(item, config, _split, strategy="PartitionedPS")
