"""Strategy builders: each turns a graph and a configuration into a plan. They decide, and edit nothing.

builder_for(config).build(item, config)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autograph_rewrite.plan.config import Config
from autograph_rewrite.strategies.all_reduce import AllReduce
from autograph_rewrite.strategies.base import StrategyBuilder

STRATEGIES: Mapping[str, StrategyBuilder] = MappingProxyType({"AllReduce": AllReduce()})

__all__ = ["STRATEGIES", "AllReduce", "StrategyBuilder", "builder_for"]


def builder_for(config: Config) -> StrategyBuilder:
    """The builder that `config` names.

    Raises:
        ConfigError: when this version does not have it, or what else the configuration asks for.
    """
    config.require_usable()
    return STRATEGIES[config.strategy.name]
