"""Pipeline: the model in stages on different devices, through which micro-batches flow."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.config.config import Config
from autograph_rewrite.plan.parts.graph_digest import ItemLike
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.plan.request import request


@dataclass(frozen=True)
class Pipeline:
    """Stages and schedule as the section `pipeline` says; replicas of the whole, if there are several, are summed."""

    def build(self, item: ItemLike, config: Config) -> Plan:
        """The request in which the model is cut into stages; which node is in which follows from the graph."""
        return request(item, config, strategy="Pipeline")
