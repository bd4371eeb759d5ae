"""Why a value is in a graph, and placed as it is: provenance, the chain from the batch, the conversions in the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.diagnostics.amounts import size
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.communication import bare, origin_of
from autograph_rewrite.inspect.graph_source import Source, as_item
from autograph_rewrite.inspect.reasons.chain import Chains, Step, lines
from autograph_rewrite.inspect.report_view import STEP, Edge, edges_of
from autograph_rewrite.inspect.values import Described, Values, conversion_data, results
from autograph_rewrite.ir.attr_inference import closest
from autograph_rewrite.ir.format.printer import line
from autograph_rewrite.ir.gc_pause import no_garbage_collection
from autograph_rewrite.ir.graph import PASS_ATTR, Graph, Node
from autograph_rewrite.plan.plan import Plan

FIRST = ("replica_0/", "replica_0/micro_0/")
UNPLACED = (
    "Its placement is not known: a .pb has no place for placements. Give the .ar that `rewrite -o` wrote, or the "
    "original graph with --config."
)
INDEPENDENT = "Nothing of the batch reaches it, so every replica has the same."


@dataclass(frozen=True)
class Reason:
    """What is known about the origin of a node, and about one of its results.

    Attributes:
        node: its name.
        line: its printed form.
        made_by: the pass; empty for a node of the original graph.
        origin: the original node that it is, is a copy of, or serves.
        edges: the reshards of that node's values.
        value: what is known of the result that was asked for; None of a node without results.
        chain: from a batch input to it.
    """

    node: str
    line: str
    made_by: str
    origin: str
    edges: tuple[Edge, ...]
    value: Described | None = None
    chain: tuple[Step, ...] = ()

    def __str__(self) -> str:
        text = [self.line]
        if not self.made_by:
            text.append("It is a node of the original graph.")
        elif self.made_by == "expand":
            text.append(f"It is a copy of '{self.origin}' for one replica, made by the pass 'expand'.")
        else:
            serves = f" for '{self.origin}'" if self.origin and self.origin != self.node else ""
            text.append(f"The pass '{self.made_by}' made it{serves}.")
        text += self._placed()
        for edge in self.edges:
            owner = "the step" if edge.owner == STEP else f"variable '{edge.owner}'"
            text.append(
                f"{edge.where}: {edge.value} {edge.before} -> {edge.after} by {edge.means}, "
                f"for {owner}, {size(edge.bytes)}: {edge.reason}"
            )
        return "\n".join(text) + "\n"

    def _placed(self) -> Iterator[str]:
        """Yield what is known of its placement, and why it is so."""
        if self.value is not None and (self.value.placement is not None or self.made_by):
            yield str(self.value)
        if self.chain:
            yield "From the batch on:"
            yield from lines(self.chain)
        elif self.value is not None and self.value.placement is not None:
            yield INDEPENDENT
        elif self.made_by == "expand":
            yield UNPLACED

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        edges = [
            {**conversion_data(edge), "value": edge.value, "lowering": edge.lowering, "compressor": edge.compressor}
            for edge in self.edges
        ]
        return {
            "node": self.node,
            "line": self.line,
            "pass": self.made_by,
            "origin": self.origin,
            "value": self.value.data() if self.value is not None else None,
            "chain": [step.data() for step in self.chain],
            "edges": edges,
        }


def why(source: Source, name: str, plan: Plan | None = None) -> Reason:
    """Return why a node is in a graph, and why one of its results is placed as it is.

    Args:
        source: a rewritten item, or its file.
        name: the node, or a value of it (`name:1`); of the original graph, or of the rewritten one.
        plan: the plan of the rewrite; a rewritten item knows its own, also from an archive.

    Raises:
        GraphError: there is no such node or value; the hint names the closest.
    """
    item = as_item(source)
    asked, _, index = name.removeprefix("%").partition(":")
    with no_garbage_collection():
        node = find(item.graph, asked)
        values = Values.of(item, plan)
        made = results(node)
        at = item.graph.value(f"{node.name}:{index}").index if index else 0
        is_original = asked != node.name
        made_by = node.attr(PASS_ATTR, b"").decode()
        origin = origin_of(node) if made_by else ""
        alike = tuple(one for one in item.graph if bare(one.name) == asked) if is_original else ()
        shown_as = f"{asked}:{at}" if is_original and at else asked if is_original else None
        described = values.described(made[at], shown_as, alike) if made else None
        found = tuple(edge for edge in edges_of(item, values.plan) if edge.node == (origin or node.name))
        chain = Chains(values).of(node, at) if item.placements or values.plan is not None else ()
    return Reason(node.name, line(node), made_by, origin, found, described, chain)


def find(graph: Graph, name: str) -> Node:
    """Return a node by its name, or the first instance of the original node of that name.

    Raises:
        GraphError: there is neither; the hint names the closest.
    """
    for one in (name, *(f"{prefix}{name}" for prefix in FIRST)):
        if one in graph:
            return graph.nodes[one]
    names = dict.fromkeys((*graph.nodes, *map(bare, graph.nodes)))
    raise GraphError(f"the graph has no node '{name}'", hint=closest(name, names))
