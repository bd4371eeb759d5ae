"""The conversions between logical devices, kept by the node that makes each while axis after axis of the mesh is cut.

    axis 0    h = AddN(h/part_0, h/part_1)                            one exchange: h, on axis 0
    axis 1    h/part_j = AddN(h/part_0/part_j, h/part_1/part_j)       two, of half the bytes: among devices (., j)

An exchange that a further axis divides is one of each group of its devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from autograph_rewrite.analysis.facts.placement import Fact
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.parts.names import MODEL_AXIS_ATTR

ALL = Fraction(1)


@dataclass
class Exchanges:
    """What devices of one axis exchange.

    Attributes:
        axis: the one that is being cut.
    """

    axis: int = 0
    _made: dict[Node, list[tuple[EdgePlan, Node | None]]] = field(default_factory=dict)

    def add(self, made: Node, value: Value, edge: EdgePlan, fact: Fact | None, share: Fraction = ALL) -> None:
        """Keep a conversion; what each device hands over is counted where shapes are static.

        Args:
            made: what converts the value.
            value: what is converted.
            edge: its placements and lowering.
            fact: what is known of the whole value.
            share: of its elements, those that are handed over.
        """
        shape = fact.shape if fact is not None else None
        is_known = shape is not None and all(isinstance(dim, int) for dim in shape)
        elements = math.prod(dim for dim in shape or () if isinstance(dim, int)) if is_known else 0
        dtype = made.output_dtypes[0]
        size = int(elements * share) * dtypes.width(dtype)
        self.mark(made)
        told = replace(edge, axis=self.axis, dtype=dtypes.dtype_name(dtype), bytes=size, reason="devices of a replica")
        self._made.setdefault(made, []).append((replace(told, value=value.name), value.node))

    def mark(self, node: Node) -> None:
        """Say of a node that devices of this axis meet there."""
        node.set_raw_attr(MODEL_AXIS_ATTR, encode("int", self.axis))

    def divide(self, node: Node, copies: Sequence[Node], sizes: Sequence[int] = ()) -> None:
        """Let the devices of a further axis make a conversion, each group of them its own.

        Args:
            node: what made the conversion.
            copies: what makes it on each device.
            sizes: units of what each converts; empty: all convert as much as `node` did.
        """
        made = self._made.pop(node, [])
        for k, copy in enumerate(copies if made else ()):
            share = Fraction(sizes[k], sum(sizes)) if sizes else ALL
            self._made[copy] = [(replace(edge, value="", bytes=int(edge.bytes * share)), None) for edge, _ in made]

    def edges(self, graph: Graph, step: Collection[Node]) -> list[EdgePlan]:
        """Return the conversions of a step; those of initialisers happen once, and are not listed.

        Args:
            graph: as it is in the end.
            step: the nodes that one step runs.
        """
        found = []
        for node, made in self._made.items():
            if node not in step or graph.nodes.get(node.name) is not node:
                continue
            for edge, of in made:
                value = node.inputs[0] if edge.lowering == "slice" else node.output()
                is_named = edge.value and graph.nodes.get(edge.node) in (None, of)  # else its name is another's by now
                found.append(edge if is_named else replace(edge, value=value.name))
        return found
