"""What a strategy builder is: a pure function from a graph item and a configuration to a request."""

from __future__ import annotations

from typing import Protocol

from autograph_rewrite.config.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


class StrategyBuilder(Protocol):
    """Decides where variables live and how their gradients meet.

    The same item and configuration give the same plan in every process: workers build theirs independently.
    """

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """The request: devices, placements and options. Its edges follow from propagation, later.

        Raises:
            ConfigError: when the configuration asks for what this version or this item does not have.
        """
        ...
