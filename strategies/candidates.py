"""Candidates of a search: the plan of every builder, with shared and with mirrored variables where that is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.builder.protocol import StrategyBuilder

PLAIN = "AllReduce"
"""The builder of plans in which single variables are nowhere in particular."""


def with_settings(config: Config, **settings: Any) -> Config:
    """Return a configuration with other settings, which knows where it was read."""
    changed = config.model_copy(update=settings)
    changed._source = config._source
    return changed


def in_mode(config: Config, mode: str | None) -> Config:
    """Return a configuration with its variables in one mode, and nothing compressed."""
    section = config.strategy.model_copy(update={"variables": mode, "compressor": "none"})
    return with_settings(config, strategy=section)


def plans_of(
    item: GraphItem, config: Config, builders: Mapping[str, StrategyBuilder]
) -> tuple[dict[str, Plan], list[str]]:
    """Return the plans of all builders that have one for this item, and why the others have none.

    Args:
        item: it is only read.
        config: the configuration.
        builders: by name.

    Raises:
        RewriteError: none has one.
    """
    plans: dict[str, Plan] = {}
    errors: dict[str, RewriteError] = {}
    modes = modes_of(config)
    if config.model_size > 1 and config.workers == 1 and len(config.replicas) == 1:
        builders = {PLAIN: builders[PLAIN]}  # one replica has everything, whatever a builder says
    for mode in modes:
        chosen = in_mode(config, mode)
        for builder, made in builders.items():
            name = f"{builder} ({mode})" if len(modes) > 1 else builder
            try:
                plans[name] = made.build(item, chosen)
            except RewriteError as error:
                errors[name] = error
    if not plans:
        raise next(iter(errors.values()))
    return plans, [f"{name} has no plan: {error.problem}" for name, error in errors.items()]


def modes_of(config: Config) -> tuple[str | None, ...]:
    """Return where variables may live; mirrored ones need distinct devices of several replicas, and no stages."""
    known = config.strategy.variables
    if known or config.workers > 1:
        return (known,)
    devices = config.devices or ()
    if config.model_size > 1 and len(config.replicas) == 1:
        return ("shared",)
    apart = len(set(devices)) == len(devices) and config.pipeline is None
    return ("shared", "mirrored") if apart else ("shared",)
