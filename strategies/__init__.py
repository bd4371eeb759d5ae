"""Strategy builders: each turns a graph and a configuration into a plan. They decide, and edit nothing.

builder_for(config).build(item, config)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.strategy_names import own_builder
from autograph_rewrite.config.user_code import blaming, load_module
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import request
from autograph_rewrite.strategies.auto import Auto
from autograph_rewrite.strategies.builder import StrategyBuilder
from autograph_rewrite.strategies.per_variable import BUILDERS
from autograph_rewrite.training_graph import TrainingGraph

# Pipeline: the model in stages on different devices, which micro-batches pass.


@dataclass(frozen=True)
class Pipeline:
    """Stages and schedule by the section `pipeline`; gradients of several replicas of the model are summed."""

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """The request in which the model is cut into stages; the stage of each node follows from the graph."""
        return request(item, config, strategy="Pipeline").named()


_SINGLE: Mapping[str, StrategyBuilder] = MappingProxyType({one.name: one for one in BUILDERS})
STRATEGIES: Mapping[str, StrategyBuilder] = MappingProxyType({**_SINGLE, "Pipeline": Pipeline(), "Auto": Auto(_SINGLE)})


class _Row:
    """A builder by the name of its class, for users who derive from ours: `AllReduce().build(item, config)`."""

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """Return the plan of the builder of this name.

        Raises:
            ConfigError: when the configuration asks for something that this version or this item does not have.
        """
        name = next(base.__name__ for base in type(self).__mro__ if base.__name__ in _SINGLE)
        return _SINGLE[name].build(item, config)


class AllReduce(_Row):
    """Every variable on every replica, gradients all-reduced."""


class PS(_Row):
    """All variables on one parameter server."""


class PSLoadBalancing(_Row):
    """Variables spread over the parameter servers by size."""


class PartitionedPS(_Row):
    """Shards of equal size on parameter servers."""


class UnevenPartitionedPS(_Row):
    """Shards whose sizes differ by one row on parameter servers."""


class PartitionedAR(_Row):
    """Shards whose gradients are all-reduced one by one."""


class RandomAxisPartitionAR(_Row):
    """As PartitionedAR, along an axis that looks random."""


class Parallax(_Row):
    """Sparse variables on servers, dense ones replicated."""


class FSDP(_Row):
    """A shard of every variable on each replica."""


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


def builder_for(config: Config, batch: int | None = None) -> StrategyBuilder:
    """The builder that `config` names.

    Args:
        config: with its devices.
        batch: examples of one step on all devices together, for which a search compares plans.

    Raises:
        ConfigError: when this version does not have it, or another feature that the configuration asks for.
    """
    config.require_usable()
    return named_builder(config, batch)


def named_builder(config: Config, batch: int | None = None) -> StrategyBuilder:
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
    builder = STRATEGIES[name]
    return replace(builder, batch=batch) if isinstance(builder, Auto) else builder


# User-defined builders: one file with a class that has `build(item, config)`, named in the configuration.
#
# strategy: {name: "my_builder.py:MyBuilder"}       # next to the configuration file, or below the working directory
#
# It runs only where the user has allowed that (`config.user_code`).


def load_own(file: str, name: str, config: Config) -> StrategyBuilder:
    """Return an object of the class `name` in a Python file.

    Args:
        file: path, as the configuration writes it.
        config: its folder is searched for the file, and messages name the line of the setting.

    Raises:
        ConfigError: there is no such file or class, running it is not allowed or fails, or the class builds nothing.
    """
    where = config.where("strategy", "name")
    path, module = load_module(file, where)
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not callable(getattr(kind, "build", None)):
        hint = "it needs the method build(self, item, config) that returns a Plan"
        raise ConfigError(f"{where}: '{path}' has no class '{name}' that builds plans", hint=hint)
    failed = f"{where}: the strategy '{name}' of your own has failed"
    with blaming(failed, ConfigError):
        return _Own(kind(), failed)


@dataclass(frozen=True)
class _Own:
    """A builder of the user, whose exceptions are reported as the user's mistakes."""

    builder: StrategyBuilder
    failed: str

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """The user's plan.

        Raises:
            ConfigError: it fails, or returns something else.
        """
        with blaming(self.failed, ConfigError):
            plan = self.builder.build(item, config)
        if not isinstance(plan, Plan):
            raise ConfigError(f"{self.failed}: its build returned {type(plan).__name__}", hint="it returns a Plan")
        return plan
