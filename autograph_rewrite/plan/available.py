"""What a configuration may say and this version cannot do yet: refused at its line, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autograph_rewrite.plan.builder_names import own_builder
from autograph_rewrite.plan.located import KeyPath

if TYPE_CHECKING:
    from autograph_rewrite.plan.config import Config


# Builders whose plans can be carried out; one of the user's own is judged by its plan.
STRATEGIES = frozenset(
    (
        "AllReduce", "PS", "PSLoadBalancing", "PartitionedPS", "UnevenPartitionedPS", "PartitionedAR",
        "RandomAxisPartitionAR", "Parallax", "FSDP", "Pipeline",
    )
)  # fmt: skip


def unavailable(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Each setting of `config` that asks for a feature to come, with the words for it."""
    name = config.strategy.name
    if name not in STRATEGIES and name != "Auto" and own_builder(name) is None:  # Auto chooses among those
        yield ("strategy", "name"), f"strategy.name {config.strategy.name}"
    if config.remat.policy.startswith("budget"):
        yield ("remat", "policy"), f"remat.policy {config.remat.policy}"
    if config.remat.policy != "none" and config.pipeline is not None:
        yield ("remat", "policy"), "remat with pipeline"
    if config.mesh is not None and config.mesh.model > 1:
        yield ("mesh", "model"), "mesh.model above 1"
    if config.sharding:
        yield ("sharding",), "sharding"
    if config.steps_per_run > 1:
        yield ("steps_per_run",), "steps_per_run above 1"
