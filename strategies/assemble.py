"""Assemble a plan from choices per variable, for all builders.

    request of the configuration ──► a choice per trained variable ──► overrides ──► servers, sizes ──► Plan

Builders choose for trained variables only: optimizer state follows its variable, and all others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autograph_rewrite.analysis.variable_uses import obstacle, roles
from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Override, Partition
from autograph_rewrite.diagnostics.faults import FileFault, raise_if_any
from autograph_rewrite.errors import ConfigError
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.plan.parts import messages
from autograph_rewrite.plan.parts.notes import stays_whole
from autograph_rewrite.plan.parts.residence import OnServer, Sharded, placed
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import override_of, request
from autograph_rewrite.strategies import builder
from autograph_rewrite.training_graph import TrainingGraph, Variable


def assemble(
    item: TrainingGraph,
    config: Config,
    choose: Callable[[builder.TrainedVariable], builder.Choice],
    *,
    strategy: str,
    pool: Sequence[str] | None = None,
    notes: Iterable[str] = (),
) -> Plan:
    """Return the request in which `choose` decides for each trained variable, unless the configuration overrides it.

    Args:
        item: a graph item; it is only read.
        choose: makes the builder's choice for one variable.
        pool: the devices that hold variables which are not split; left out, all servers.

    Raises:
        ConfigError: with every setting that this item does not have, or that its variables cannot follow.
    """
    plan = request(item, config, strategy=strategy)
    trained, choices, whole = decide(item, config, plan, choose)
    notes = (*notes, *(stays_whole(one.name, one.obstacle) for one in whole))
    raise_if_any(misfits(config, trained, choices), error=ConfigError, title=config.where())
    all_servers = builder.servers(config)
    places = _Places(plan.devices, builder.Load(all_servers), tuple(pool or all_servers))
    requests = [
        _placed(asked, choices[asked.name], trained[asked.name], override_of(asked.name, config), places)
        if asked.name in choices
        else asked
        for asked in plan.variables
    ]
    return replace(plan, variables=tuple(requests), notes=(*plan.notes, *notes)).named()


class Decided(NamedTuple):
    """The choices for the trained variables.

    Attributes:
        trained: the variables, by name.
        choices: for each of them, overrides included.
        whole: those that the builder would have split, but that cannot be split.
    """

    trained: dict[str, builder.TrainedVariable]
    choices: dict[str, builder.Choice]
    whole: list[builder.TrainedVariable]


def decide(
    item: TrainingGraph, config: Config, plan: Plan, choose: Callable[[builder.TrainedVariable], builder.Choice]
) -> Decided:
    """Return the choice for each trained variable, from the builder, its obstacles and the configuration.

    Args:
        item: a graph item; it is only read.
        plan: the request, for its replicas.
        choose: makes the builder's choice for one variable.
    """
    trained = trained_variables(item, plan.graph_digest)
    chosen = {one.name: choose(one) for one in trained.values()}
    whole = [one for one in trained.values() if one.obstacle and chosen[one.name].parts is not None]
    chosen |= {one.name: replace(chosen[one.name], parts=None, stage=0, because=one.obstacle) for one in whole}
    choices = {
        name: overridden(chosen[name], one, override_of(name, config), plan.replicas) for name, one in trained.items()
    }
    return Decided(trained, choices, whole)


def trained_variables(item: TrainingGraph, digest: str = "") -> dict[str, builder.TrainedVariable]:
    """Return the trained variables of an item by name, in its order."""
    found = roles(item)
    return {
        name: builder.TrainedVariable(variable, role, digest, _obstacle(item, variable))
        for name, variable in item.variables.items()
        if (role := found[name]).trained
    }


def _obstacle(item: TrainingGraph, variable: Variable) -> str:
    """Return why a variable cannot be split; empty where it can."""
    if variable.shape is None or None in variable.shape:
        return "its shape is open"
    handle = item.graph.nodes.get(variable.handle)
    if handle is None:
        return ""
    found = obstacle(handle, rewritten=True)
    return found.reason if found is not None else ""


class _Places(NamedTuple):
    """Devices for variables and shards.

    Attributes:
        replicas: all of them.
        load: of the servers.
        whole: the servers that hold variables which are not split.
    """

    replicas: tuple[str, ...]
    load: builder.Load
    whole: tuple[str, ...]


def _placed(
    asked: messages.VariableRequest,
    choice: builder.Choice,
    trained: builder.TrainedVariable,
    override: Override | None,
    places: _Places,
) -> messages.VariableRequest:
    """Return the request of one variable with its placement, servers and sizes."""
    asked = replace(asked, options=replace(asked.options, synchronizer=choice.synchronizer))
    is_on_server = choice.synchronizer == "ps"
    if is_on_server:
        server = messages.Server(override.sync, override.staleness, override.proxy) if override else messages.Server()
        asked = replace(asked, server=server)
    size = trained.variable.nbytes
    if choice.parts is None:
        return placed(asked, OnServer(places.load.take(size, places.whole))) if is_on_server else asked
    axis, count = choice.parts.axis, choice.parts.count
    sizes = builder.shard_sizes(trained.shape[axis] or 0, count)
    devices: tuple[str, ...] = places.replicas if choice.stage else ()
    if is_on_server:
        devices = places.load.take_turns(count, size)
    return placed(asked, Sharded(axis, sizes, devices, choice.stage))


# Per-variable settings of a configuration: they override the builder, key by key, or are rejected at their line.


def overridden(
    choice: builder.Choice, trained: builder.TrainedVariable, override: Override | None, replicas: int
) -> builder.Choice:
    """Return the builder's choice with the changes of an override."""
    if override is None:
        return choice
    partition = override.partition
    if partition is not None and partition.over == "data":
        return builder.over_replicas(trained, replicas, stage=partition.stage or 3, axis=partition.axis)
    if override.synchronizer is not None:
        kept = choice.parts if not choice.stage else None
        choice = builder.Choice(override.synchronizer, kept)
    if partition is not None and partition.shards is not None:
        choice = replace(choice, parts=builder.Parts(partition.axis or 0, partition.shards), stage=0)
    return choice


def misfits(
    config: Config, trained: Mapping[str, builder.TrainedVariable], choices: Mapping[str, builder.Choice]
) -> Iterator[FileFault]:
    """Yield the settings that variables, or their synchronizers, cannot follow.

    Args:
        choices: for each variable, overrides included.
    """
    # by identity: equal overrides may occur twice
    of = grouped((id(override_of(one.name, config)), one) for one in trained.values())
    for i, override in enumerate(config.variables):
        meant = of.get(id(override), [])
        asks = override.partition is not None or override.synchronizer == "ps" or override.server_settings
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


def _problem(partition: Partition, trained: builder.TrainedVariable) -> str:
    """Return why a variable cannot be split by a partition; empty where it can."""
    shape, axis = trained.shape, partition.axis or 0
    if partition.axis is None and partition.over == "data":
        return (
            f"'{trained.name}' cannot be split: {trained.obstacle}" if trained.obstacle else ""
        )  # a variable that is too small for the replicas stays whole
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
