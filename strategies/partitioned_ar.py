"""PartitionedAR: as AllReduce, with every variable split along its first axis, each shard reduced by itself."""

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
    return Choice(parts=along(trained, 0, smallest_divisor))


@dataclass(frozen=True)
class PartitionedAR:
    """As many shards as the smallest divisor of the first axis says."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable is split and its shards are all-reduced."""
        return assemble(item, config, _split, strategy="PartitionedAR")
