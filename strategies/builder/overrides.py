"""Per-variable settings of a configuration: they override the builder, key by key, or are rejected at their line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Override, Partition
from autograph_rewrite.diagnostics.faults import Fault
from autograph_rewrite.plan.request import override_of
from autograph_rewrite.strategies.builder.choice import Choice, Parts, TrainedVariable
from autograph_rewrite.strategies.builder.over_replicas import over_replicas


def overridden(choice: Choice, trained: TrainedVariable, override: Override | None, replicas: int) -> Choice:
    """Return the builder's choice with what an override changes.

    Args:
        choice: of the builder.
        trained: the variable.
        override: what the configuration says of it.
        replicas: how many there are.
    """
    if override is None:
        return choice
    partition = override.partition
    if partition is not None and partition.over == "data":
        return over_replicas(trained, replicas, stage=partition.stage or 3, axis=partition.axis)
    if override.synchronizer is not None:
        kept = choice.parts if not choice.stage else None
        choice = Choice(override.synchronizer, kept)
    if partition is not None and partition.shards is not None:
        choice = replace(choice, parts=Parts(partition.axis or 0, partition.shards), stage=0)
    return choice


def misfits(config: Config, trained: Mapping[str, TrainedVariable], choices: Mapping[str, Choice]) -> Iterator[Fault]:
    """Yield what is asked of variables that they, or their synchronizer, cannot do.

    Args:
        config: the configuration.
        trained: the trained variables by name.
        choices: what holds for each, overrides included.
    """
    of: dict[int, list[TrainedVariable]] = {}  # by identity: equal overrides may stand twice
    for one in trained.values():
        of.setdefault(id(override_of(one.name, config)), []).append(one)
    for i, override in enumerate(config.variables):
        meant = of.get(id(override), [])
        asks = [key for key, given in _placements(override).items() if given]
        if asks and trained and not meant:
            message = f"variables[{i}]: '{override.match}' is the first match of no variable that is trained"
            yield config.fault(("variables", i, "match"), message, "state of the optimizer follows its variable")
        for one in meant:
            for key in override.server_settings if choices[one.name].synchronizer != "ps" else ():
                message = f"variables[{i}].{key} belongs to parameter servers; '{one.name}' is all-reduced"
                yield config.fault(("variables", i, key), message, "set synchronizer to ps, or leave it out")
            if override.partition is not None:
                problem = _problem(override.partition, one)
                if problem:
                    message = f"variables[{i}].partition: {problem}"
                    yield config.fault(("variables", i, "partition"), message, "leave it whole, or narrow match")


def _placements(override: Override) -> dict[str, bool]:
    """Return which of the keys that say where a variable lives are given."""
    partition, ps = override.partition is not None, override.synchronizer == "ps"
    return {"partition": partition, "synchronizer": ps, **dict.fromkeys(override.server_settings, True)}


def _problem(partition: Partition, trained: TrainedVariable) -> str:
    """Return why a variable cannot be split so; empty where it can."""
    shape, axis = trained.shape, partition.axis or 0
    if trained.role.captured:
        return f"'{trained.name}' is used inside a branch or loop, so it stays whole"
    if partition.axis is None and partition.over == "data":
        return (
            f"'{trained.name}' cannot be split: {trained.obstacle}" if trained.obstacle else ""
        )  # what is too small for the replicas stays whole
    if not shape:
        return f"'{trained.name}' is a scalar, which has no axis to split"
    if axis >= len(shape):
        return f"'{trained.name}' has {len(shape)} axes, so no axis {axis}"
    size = shape[axis]
    if size is None:
        return f"the size of axis {axis} of '{trained.name}' is not known"
    if trained.obstacle:
        return f"'{trained.name}' cannot be split: {trained.obstacle}"
    if partition.shards is not None and size < partition.shards:
        return f"'{trained.name}' has {size} along axis {axis}, too few for {partition.shards} shards"
    return ""
