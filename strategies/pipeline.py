"""Pipeline: the model is cut into stages on devices of their own, through which micro-batches go one after another."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.items import ItemLike
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import request


@dataclass(frozen=True)
class Pipeline:
    """Stages and schedule as the section `pipeline` says; replicas of the whole, if there are several, are summed."""

    def build(self, item: ItemLike, config: Config) -> Plan:
        """The request in which the model is cut into stages; which node is in which follows from the graph."""
        return request(item, config, strategy="Pipeline")
