"""RandomAxisPartitionAR: as PartitionedAR, along an axis that looks random and is the same in every process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice, Trained
from autograph_rewrite.strategies.shards import smallest_divisor
from autograph_rewrite.strategies.splitting import along


def _split(trained: Trained) -> Choice:
    axes = [0] if trained.role.sparse else [axis for axis, size in enumerate(trained.shape) if (size or 0) > 1]
    if not axes:
        return Choice()
    drawn = int.from_bytes(hashlib.sha256(f"{trained.digest}/{trained.name}".encode()).digest()[:8], "big")
    return Choice(parts=along(trained, axes[drawn % len(axes)], smallest_divisor))


@dataclass(frozen=True)
class RandomAxisPartitionAR:
    """An axis drawn from the graph's digest and the variable's name; axis 0 where the gradient consists of rows."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable is split along some axis and its shards are all-reduced."""
        return assemble(item, config, _split, strategy="RandomAxisPartitionAR")
