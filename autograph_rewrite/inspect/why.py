"""Provenance of a node: the pass that made it, its original node, and the reshard that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autograph_rewrite.inspect.communication import served
from autograph_rewrite.inspect.graph_source import Source, as_item
from autograph_rewrite.inspect.render.format import size
from autograph_rewrite.inspect.report_view import STEP, Edge, edges_of
from autograph_rewrite.ir.format.printer import line
from autograph_rewrite.ir.graph import PASS_ATTR
from autograph_rewrite.plan.plan import Plan


@dataclass(frozen=True)
class Reason:
    """What is known about the origin of a node.

    Attributes:
        node: its name.
        line: its printed form.
        made_by: the pass; empty for a node of the original graph.
        origin: the original node that it is, is a copy of, or serves.
        edges: the reshards of that node's values.
    """

    node: str
    line: str
    made_by: str
    origin: str
    edges: tuple[Edge, ...]

    def __str__(self) -> str:
        lines = [self.line]
        if not self.made_by:
            lines.append("It is a node of the original graph.")
        elif self.made_by == "expand":
            lines.append(f"It is a copy of '{self.origin}' for one replica, made by the pass 'expand'.")
        else:
            serves = f" for '{self.origin}'" if self.origin and self.origin != self.node else ""
            lines.append(f"The pass '{self.made_by}' made it{serves}.")
        for edge in self.edges:
            owner = "the step" if edge.owner == STEP else f"variable '{edge.owner}'"
            lines.append(
                f"{edge.where}: {edge.value} {edge.before} -> {edge.after} by {edge.means}, "
                f"for {owner}, {size(edge.bytes)}: {edge.reason}"
            )
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        edges = [
            {
                "where": edge.where,
                "value": edge.value,
                "from": edge.before,
                "to": edge.after,
                "owner": edge.owner,
                "lowering": edge.lowering,
                "compressor": edge.compressor,
                "bytes": edge.bytes,
                "reason": edge.reason,
            }
            for edge in self.edges
        ]
        return {"node": self.node, "line": self.line, "pass": self.made_by, "origin": self.origin, "edges": edges}


def why(source: Source, name: str, plan: Plan | None = None) -> Reason:
    """Return why a node is in a graph.

    Args:
        source: a rewritten item, or its file.
        name: the node.
        plan: the plan of the rewrite; a rewritten item in memory knows its own.

    Raises:
        GraphError: there is no such node; the hint names the closest.
    """
    item = as_item(source)
    node = item.graph.node(name.partition(":")[0].removeprefix("%"))
    made_by = node.attr(PASS_ATTR, b"").decode()
    origin = served(node) if made_by else ""
    found = tuple(edge for edge in edges_of(item, plan) if edge.node == (origin or node.name))
    return Reason(node.name, line(node), made_by, origin, found)
