"""UnevenPartitionedPS: as PartitionedPS, with shards whose sizes differ by one row."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice, Trained
from autograph_rewrite.strategies.shards import smallest_non_divisor
from autograph_rewrite.strategies.splitting import along


def _split(trained: Trained) -> Choice:
    return Choice("ps", along(trained, 0, smallest_non_divisor))


@dataclass(frozen=True)
class UnevenPartitionedPS:
    """As many shards as the smallest number that does not divide the first axis says."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable is split unevenly over the servers."""
        return assemble(item, config, _split, strategy="UnevenPartitionedPS")
