"""Views the graphs of all ranks as one: collectives, orders and conditions over all ranks, and labels for messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from autograph_rewrite.ir.control_flow import OPENS, Frame, Guards, frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.verify.collective_groups import Collective, collect, contracted_order

SHOWN = 4  # nodes, or steps of a chain, in one message
SAME_PLAN = "rewrite for all ranks again, from one graph with one plan and one version of this package"


class Root(NamedTuple):
    """A name that can be fetched: its label in messages, its nodes on the ranks, and whether each step runs it."""

    what: str
    nodes: tuple[Node, ...]
    in_step: bool = True


@dataclass(frozen=True)
class Job:
    """The graphs that run together.

    Attributes:
        graphs: one per rank, without cycles; or a single graph that stands for those of all processes.
        own_inputs: the placeholders that each rank feeds with different data.
        servers: devices that hold variables of all ranks.
    """

    graphs: tuple[Graph, ...]
    processes: int = 1
    roots: tuple[Root, ...] = ()
    own_inputs: frozenset[str] = frozenset()
    servers: frozenset[str] = frozenset()

    @property
    def each(self) -> int:
        """How many processes each graph stands for."""
        return max(1, self.processes // len(self.graphs))

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {id(graph): rank for rank, graph in enumerate(self.graphs)}

    def rank(self, node: Node) -> int:
        """Return the rank of the graph that has a node."""
        return self._ranks[id(node.graph)]

    def say(self, node: Node) -> str:
        """Return the label of a node in messages."""
        return f"'{node.name}' of rank {self.rank(node)}" if len(self.graphs) > 1 else f"'{node.name}'"

    @cached_property
    def collected(self) -> tuple[list[Collective], list[Node]]:
        """The collectives over all ranks, and the collective ops whose keys are unknown."""
        return collect(chain(*self.graphs))

    @cached_property
    def step(self) -> set[Node]:
        """The nodes that one step runs on all ranks."""
        return ancestors(chain.from_iterable(root.nodes for root in self.roots if root.in_step))

    @property
    def found(self) -> list[Collective]:
        """The collectives over all ranks."""
        return self.collected[0]

    @cached_property
    def ordered(self) -> tuple[list[Node], list[Node]]:
        """The nodes in an order that all ranks can follow, and the nodes that no order can contain."""
        return contracted_order(chain(*self.graphs), self.found)

    @cached_property
    def conditions(self) -> tuple[dict[Node, Frame], dict[Node, Guards]]:
        """The loops and the guards of each node; nodes without any are left out."""
        deciding = (graph for graph in self.graphs if any(node.op in OPENS for node in graph))
        order = list(chain.from_iterable(map(topological_order, deciding)))
        frames = frames_of(order)
        return frames, guards_of(order, frames)

    def sides(self, values: Mapping[Node, Hashable]) -> str:
        """Return a text that says which nodes have which value, the rarest value first."""
        counts = Counter(values.values())
        told = []
        for value in sorted(counts, key=lambda value: counts[value])[:SHOWN]:
            nodes = [node for node in values if values[node] == value]
            more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            told.append(f"{value} at {self.say(nodes[0])}{more}")
        return ", ".join(told)


def odd_one(values: Mapping[Node, Hashable]) -> Node:
    """Return the first node that has the rarest value; of equally rare values, the last one counts."""
    counts = Counter(values.values())
    rarest = min(reversed(counts), key=lambda value: counts[value])
    return next(node for node, value in values.items() if value == rarest)
