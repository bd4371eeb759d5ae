"""Make the candidates of a search: every builder's plan, with shared and with mirrored variables where that is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autograph_rewrite.config.config import Config
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.plan.parts.notes import CHOSEN, SHOWN, RankedPlan
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.builder import StrategyBuilder
from autograph_rewrite.training_graph import TrainingGraph

if TYPE_CHECKING:
    from autograph_rewrite.cost.tasks.result import Simulation


class Compared(NamedTuple):
    """A plan that was simulated.

    Attributes:
        name: for people.
        found: its simulation.
        fits: whether it fits the memory limit; None without a limit.
    """

    name: str
    found: Simulation
    fits: bool | None = None


def rows(compared: Sequence[Compared], chosen: str) -> list[str]:
    """Return plans as rows of a table, in their order, each with the verdict.

    Args:
        compared: the best first.
        chosen: the name of the chosen plan.
    """
    best = next(one.found.step_seconds for one in compared if one.name == chosen)
    return [
        str(
            RankedPlan(
                rank,
                one.found.step_seconds * 1e3,
                one.found.peak_bytes / 2**20,
                one.found.moved_bytes / 2**20,
                one.fits,
                _verdict(one, best, chosen),
                one.name,
            )
        )
        for rank, one in enumerate(compared[:SHOWN], start=1)
    ]


def _verdict(one: Compared, best: float, chosen: str) -> str:
    if one.name == chosen:
        return CHOSEN
    if one.fits is False:
        return "too large"
    if one.found.step_seconds < best:
        return "cannot be built"
    slower = one.found.step_seconds / best - 1 if best else 0.0  # a graph without work takes no time
    return f"{slower:.1%} slower" if slower >= 0.0005 else "no faster"


PLAIN = "AllReduce"
"""The builder that places no single variable."""


def with_settings(config: Config, **settings: Any) -> Config:
    """Return a configuration with other settings and the same source."""
    changed = config.model_copy(update=settings)
    changed._source = config._source
    return changed


def in_mode(config: Config, mode: str | None) -> Config:
    """Return a configuration with its variables in one mode, and nothing compressed."""
    section = config.strategy.model_copy(update={"variables": mode, "compressor": "none"})
    return with_settings(config, strategy=section)


def plans_of(
    item: TrainingGraph, config: Config, builders: Mapping[str, StrategyBuilder]
) -> tuple[dict[str, Plan], list[str]]:
    """Return the plans of all builders that have one for this item, and why the others have none.

    Args:
        item: it is only read.

    Raises:
        RewriteError: none has one.
    """
    plans: dict[str, Plan] = {}
    errors: dict[str, RewriteError] = {}
    modes = modes_of(config)
    if config.model_size > 1 and config.workers == 1 and len(config.replicas) == 1:
        builders = {PLAIN: builders[PLAIN]}  # one replica has everything, so builders do not differ
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
