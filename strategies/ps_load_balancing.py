"""PSLoadBalancing: as PS, with the variables spread over all servers by their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from autograph_rewrite.item import GraphItem
from autograph_rewrite.plan.config import Config
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice


@dataclass(frozen=True)
class PSLoadBalancing:
    """Each variable on the server that holds least so far, the first of several."""

    def build(self, item: GraphItem, config: Config) -> Plan:
        """The request in which every trained variable lives on one of the servers."""
        return assemble(item, config, lambda trained: Choice("ps"), strategy="PSLoadBalancing")
