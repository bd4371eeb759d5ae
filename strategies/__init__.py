"""Strategy builders: each turns a graph and a configuration into a plan. They decide, and edit nothing.

builder_for(config).build(item, config)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.builder_names import own_builder
from autograph_rewrite.plan.config import Config
from autograph_rewrite.strategies.all_reduce import AllReduce
from autograph_rewrite.strategies.auto import Auto
from autograph_rewrite.strategies.base import StrategyBuilder
from autograph_rewrite.strategies.fsdp import FSDP
from autograph_rewrite.strategies.own import load_own
from autograph_rewrite.strategies.parallax import Parallax
from autograph_rewrite.strategies.partitioned_ar import PartitionedAR
from autograph_rewrite.strategies.partitioned_ps import PartitionedPS
from autograph_rewrite.strategies.pipeline import Pipeline
from autograph_rewrite.strategies.ps import PS
from autograph_rewrite.strategies.ps_load_balancing import PSLoadBalancing
from autograph_rewrite.strategies.random_axis_partition_ar import RandomAxisPartitionAR
from autograph_rewrite.strategies.uneven_partitioned_ps import UnevenPartitionedPS

_SINGLE: Mapping[str, StrategyBuilder] = MappingProxyType(
    {
        "AllReduce": AllReduce(),
        "PS": PS(),
        "PSLoadBalancing": PSLoadBalancing(),
        "PartitionedPS": PartitionedPS(),
        "UnevenPartitionedPS": UnevenPartitionedPS(),
        "PartitionedAR": PartitionedAR(),
        "RandomAxisPartitionAR": RandomAxisPartitionAR(),
        "Parallax": Parallax(),
        "FSDP": FSDP(),
    }
)
STRATEGIES: Mapping[str, StrategyBuilder] = MappingProxyType({**_SINGLE, "Pipeline": Pipeline(), "Auto": Auto(_SINGLE)})

__all__ = [
    "FSDP",
    "PS",
    "STRATEGIES",
    "AllReduce",
    "Auto",
    "PSLoadBalancing",
    "Parallax",
    "PartitionedAR",
    "PartitionedPS",
    "Pipeline",
    "RandomAxisPartitionAR",
    "StrategyBuilder",
    "UnevenPartitionedPS",
    "builder_for",
    "named_builder",
]


def builder_for(config: Config) -> StrategyBuilder:
    """The builder that `config` names.

    Raises:
        ConfigError: when this version does not have it, or what else the configuration asks for.
    """
    config.require_usable()
    return named_builder(config)


def named_builder(config: Config) -> StrategyBuilder:
    """The builder that `config` names, whether or not its plans can be carried out.

    Raises:
        ConfigError: there is none.
    """
    name = config.strategy.name
    own = own_builder(name)
    if own is not None:
        return load_own(*own, config)
    if name not in STRATEGIES:
        raise ConfigError(f"{config.where('strategy', 'name')}: there is no builder {name} in this version")
    return STRATEGIES[name]
