"""Define the builders that choose for each trained variable by itself, one row each, with `assemble` in common.

AllReduce               every variable replicated, as one copy or as one per device; each gradient all-reduced
PS                      all on the first parameter server, or on the first worker's CPU:0 where the cluster has none
PSLoadBalancing         each on the server that holds least so far
PartitionedPS           as many shards as the smallest divisor of the first axis, cyclically on the servers
UnevenPartitionedPS     as many as the smallest number that does not divide it: sizes differ by one row
PartitionedAR           shards as of PartitionedPS, each replicated, and its gradient all-reduced by itself
RandomAxisPartitionAR   ... along an axis that looks random and is the same in every process
Parallax                variables that are only looked up by row on servers, balanced by size; all others replicated
FSDP                    each replica holds one shard of a variable, of its gradient and of its slots (stage 3)

PS: Li et al., Scaling Distributed Machine Learning with the Parameter Server (2014). Parallax: Kim et al. (2019).
FSDP: Zhao et al., PyTorch FSDP (2023), the third stage of Rajbhandari et al., ZeRO (2020).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autograph_rewrite.config.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import job_devices, request
from autograph_rewrite.strategies import builder
from autograph_rewrite.strategies.assemble import assemble, decide
from autograph_rewrite.training_graph import TrainingGraph

# Into how many parts a variable can be split along an axis.


def why_whole(trained: builder.TrainedVariable, axis: int, count: Callable[[int], int]) -> str:
    """Return why a variable cannot be split along an axis; empty where it can.

    Args:
        count: the number of shards for a size.
    """
    if axis >= len(trained.shape):
        return "it is a scalar" if not trained.shape else f"it has {len(trained.shape)} axes, so no axis {axis}"
    size = trained.shape[axis]
    if size is None:
        return f"the size of axis {axis} is not known"
    shards = count(size)
    if shards < 2:
        return f"axis {axis} has size {size}, too short to be split"
    if shards > min(size, builder.MOST):
        return f"axis {axis} has size {size}, which makes {shards} shards; at most {min(size, builder.MOST)} are made"
    return ""


def in_parts(
    trained: builder.TrainedVariable, axis: int, count: Callable[[int], int], synchronizer: str = "all_reduce"
) -> builder.Choice:
    """Return the choice that splits a variable along an axis, or leaves it whole and says why."""
    because = why_whole(trained, axis, count)
    parts = None if because else builder.Parts(axis, count(trained.shape[axis] or 0))
    return builder.Choice(synchronizer, parts, because=because)


@dataclass(frozen=True)
class PerVariable:
    """A builder that chooses for each trained variable by itself.

    Attributes:
        choose: decides where a variable lives, for a number of replicas.
        pool: the devices of variables that are not split; None: all servers.
    """

    name: str
    choose: Callable[[builder.TrainedVariable, int], builder.Choice]
    pool: Callable[[Config], tuple[str, ...]] | None = None

    def build(self, item: TrainingGraph, config: Config) -> Plan:
        """Return the request in which every trained variable lives as `choose` decides.

        Raises:
            ConfigError: with every setting that this item does not have, or that its variables cannot follow.
        """
        replicas = len(job_devices(config))
        pool = self.pool(config) if self.pool is not None else None
        return assemble(item, config, lambda one: self.choose(one, replicas), strategy=self.name, pool=pool)

    def choices(self, item: TrainingGraph, config: Config) -> Mapping[str, builder.Choice]:
        """Return the choice for each trained variable, overrides included, with the reasons against splits."""
        plan = request(item, config, strategy=self.name)
        return decide(item, config, plan, lambda one: self.choose(one, plan.replicas)).choices


def _along_some_axis(trained: builder.TrainedVariable, replicas: int) -> builder.Choice:
    """Split along an axis drawn from the graph's digest and the variable's name; 0 where its gradient has rows only."""
    axes = [0] if trained.role.sparse else [axis for axis, size in enumerate(trained.shape) if (size or 0) > 1]
    if not axes:
        return builder.Choice(because="it has no axis of more than 1")
    drawn = int.from_bytes(hashlib.sha256(f"{trained.digest}/{trained.name}".encode()).digest()[:8], "big")
    return in_parts(trained, axes[drawn % len(axes)], builder.smallest_divisor)


WHOLE = "this strategy puts whole variables on servers"
DENSE = builder.Choice(because="it is read as a whole, and Parallax puts on servers what is only looked up by row")

BUILDERS: tuple[PerVariable, ...] = (
    PerVariable(
        "AllReduce", lambda one, replicas: builder.Choice(because="AllReduce keeps every variable with every replica")
    ),
    PerVariable("PS", lambda one, replicas: builder.Choice("ps", because=WHOLE), pool=builder.first_server),
    PerVariable("PSLoadBalancing", lambda one, replicas: builder.Choice("ps", because=WHOLE)),
    PerVariable("PartitionedPS", lambda one, replicas: in_parts(one, 0, builder.smallest_divisor, "ps")),
    PerVariable("UnevenPartitionedPS", lambda one, replicas: in_parts(one, 0, builder.smallest_non_divisor, "ps")),
    PerVariable("PartitionedAR", lambda one, replicas: in_parts(one, 0, builder.smallest_divisor)),
    PerVariable("RandomAxisPartitionAR", _along_some_axis),
    PerVariable("Parallax", lambda one, replicas: builder.Choice("ps", because=WHOLE) if one.role.sparse else DENSE),
    PerVariable("FSDP", lambda one, replicas: builder.over_replicas(one, replicas, stage=3)),
)
