"""FSDP: each replica holds one shard of every variable and of its optimizer's state, and gathers the whole to use."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import job_devices
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.over_replicas import over_replicas


@dataclass(frozen=True)
class FSDP:
    """Every variable split over the replicas, also its gradient and its state (stage 3); small ones stay whole."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable is split over the replicas."""
        replicas = len(job_devices(config))
        return assemble(item, config, lambda trained: over_replicas(trained, replicas, stage=3), strategy="FSDP")
