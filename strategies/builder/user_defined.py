"""User-defined builders: one file with a class that has `build(item, config)`, named in the configuration.

strategy: {name: "my_builder.py:MyBuilder"}       # beside the configuration file, or below the working directory

It is run only where the user has allowed that (`config.user_code`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.user_code import blaming, find_file, load_module, require_allowed
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.builder.protocol import StrategyBuilder
from autograph_rewrite.training_graph import TrainingGraph


def load_own(file: str, name: str, config: Config) -> StrategyBuilder:
    """Return an object of the class `name` in a Python file.

    Args:
        file: path, as the configuration writes it.
        name: of the class.
        config: which has to allow that the file is run.

    Raises:
        ConfigError: there is no such file or class, running it is not allowed or fails, or the class builds nothing.
    """
    where = config.where("strategy", "name")
    path = find_file(file, where)
    require_allowed(path, where)
    module = load_module(path, where)
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not callable(getattr(kind, "build", None)):
        hint = "it needs the method build(self, item, config) that returns a Plan"
        raise ConfigError(f"{where}: '{path}' has no class '{name}' that builds plans", hint=hint)
    failed = f"{where}: the strategy '{name}' of your own has failed"
    with blaming(failed, ConfigError):
        return _Own(kind(), failed)


@dataclass(frozen=True)
class _Own:
    """A builder of the user's, whose mistakes are told as the user's."""

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
