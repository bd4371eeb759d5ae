"""One configured setting: which variables, edges and nodes of the resolved plan it applies to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.config.sections import Override
from autograph_rewrite.diagnostics.located_yaml import KeyPath
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import ancestors
from autograph_rewrite.passes.base.report import Report
from autograph_rewrite.plan.parts.messages import STEP, EdgePlan, VariableRequest
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


@dataclass(frozen=True)
class Setting:
    """A key that the configuration sets to something else than its default.

    Attributes:
        config: the configuration.
        plan: what was resolved from it.
        item: what is rewritten, normalised; only its ops are looked at.
        path: of the key.
        value: of the key.
        overrides: which one counts for each variable of the plan.
        report: of the rewrite; None where there is only a plan.
    """

    config: Config
    plan: Plan
    item: TrainingGraph
    path: KeyPath
    value: Any
    overrides: Mapping[str, Override | None]
    report: Report | None = None

    @property
    def key(self) -> str:
        """The path without the places in lists: `variables.hint`."""
        return ".".join(part for part in self.path if isinstance(part, str))

    @cached_property
    def owners(self) -> frozenset[str]:
        """The owners of edges for which the setting counts: variables, for the strategy's also the step."""
        section = self.path[0]
        if section != "variables":
            key = str(self.path[-1])
            own = {name for name, one in self.overrides.items() if one is None or getattr(one, key) is None}
            return frozenset({*own, STEP})
        override = self.config.variables[int(self.path[1])]
        return frozenset(name for name, one in self.overrides.items() if one is override)

    @cached_property
    def step(self) -> Collection[Node]:
        """The nodes that a training step runs."""
        nodes = self.item.graph.nodes
        return ancestors(nodes[name] for name in self.item.targets if name in nodes)

    @cached_property
    def requests(self) -> tuple[VariableRequest, ...]:
        """The requests of the variables for which an override counts."""
        return tuple(request for request in self.plan.variables if request.name in self.owners)

    @cached_property
    def edges(self) -> tuple[EdgePlan, ...]:
        """The edges for which the setting counts."""
        return tuple(edge for edge in self.plan.edges if not self.owners.isdisjoint(_with_wholes(edge.owner)))

    @property
    def is_shadowed(self) -> bool:
        """Whether it belongs to an override that counts for no variable."""
        return self.path[0] == "variables" and len(self.path) > 2 and not self.owners


def _with_wholes(owner: str) -> Iterator[str]:
    """Yield a variable, and what it is a shard of: a variable, or a shard of one."""
    while owner:
        yield owner
        owner = owner.rpartition("/part_")[0]
