"""Describe a value of a rewritten graph: type, placement, conversions, devices.

    %dw: float32[3,4] partial(sum)[data] -> replicated by collective_reduce, 13.0 KiB, bucket 2; each on CPU:0, CPU:1

Text, table, JSON and pictures of a graph, and `why`, all use these descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autograph_rewrite.diagnostics.amounts import few, size
from autograph_rewrite.inspect.communication import bare
from autograph_rewrite.inspect.export import results
from autograph_rewrite.inspect.report_view import ShownEdge, edges_of, model_edges_of, plan_of
from autograph_rewrite.ir.format.annotations import Annotation, MisreadError, read_annotation
from autograph_rewrite.ir.format.printer import static_shape, type_text
from autograph_rewrite.ir.graph import PASS_ATTR, Node, Value
from autograph_rewrite.ir.mesh import ONCE, word
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.ir.types.placement import Placement
from autograph_rewrite.passes.emit.merge_instances import INSTANCE_SUFFIX
from autograph_rewrite.plan.parts.messages import SIZES
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph

DATA, MODEL = "data", "model"
CONVERTING = frozenset((b"insert-reshards", b"lower-reshards", b"merge-instances"))
"""The passes whose nodes only convert values of other nodes."""


def over(placement: Placement | str, axis: str = DATA) -> str:
    """Return a placement with its axis of the mesh, if it is split or partial: `split(0)[data]`."""
    text = str(placement) if isinstance(placement, str) else repr(placement)
    return f"{text}[{axis}]" if text.startswith(("split", "partial")) else text


def conversion(edge: ShownEdge) -> str:
    """Return the text of a conversion: `-> replicated by collective_reduce, 96 bytes, bucket 1`."""
    axis = _axis(edge)
    before = f"{over(edge.from_, axis)} " if edge.along_model else ""
    parts = [f"{before}-> {over(edge.to, axis)} by {edge.means}"]
    parts += [size(edge.bytes)] if edge.kind != "local" else []
    parts += [f"bucket {edge.bucket}"] if edge.bucket else []
    return ", ".join(parts)


def conversion_data(edge: ShownEdge) -> dict[str, Any]:
    """Return a conversion as plain data."""
    return {
        "from": edge.from_,
        "to": edge.to,
        "axis": _axis(edge),
        "by": edge.means,
        "bytes": edge.bytes,
        "bucket": edge.bucket,
        "owner": edge.owner,
        "where": edge.where,
        "reason": edge.reason,
    }


def _axis(edge: ShownEdge) -> str:
    return f"{MODEL} {edge.axis}" if edge.along_model else DATA


@dataclass(frozen=True)
class Described:
    """The description of one value.

    Attributes:
        name: of the original value, or of a value that a pass has made.
        type: element type and static shape.
        placement: its placement, and the one that its readers get; None if neither is known.
        span: how often its node runs: once, replica or each; empty if that is not known.
        devices: of all of its instances in this graph.
        conversions: the edges of the plan that start at it.
    """

    name: str
    type: str
    placement: Annotation | None
    span: str
    devices: tuple[str, ...]
    conversions: tuple[ShownEdge, ...] = ()

    def __str__(self) -> str:
        placement = over(self.placement.placement) if self.placement is not None else ""
        parts = [f"%{self.name}: {self.type} {placement}".rstrip(), *map(conversion, self.conversions)]
        if not self.conversions and self.placement is not None and self.placement.readers is not None:
            parts.append(f"-> {over(self.placement.readers)}")
        places = few([device_specs.short(device) for device in self.devices])
        where = " ".join(filter(None, (self.span, f"on {places}" if places else "")))
        return " ".join(parts) + (f"; {where}" if where else "")

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "value": self.name,
            "type": self.type,
            "placement": repr(self.placement.placement) if self.placement is not None else None,
            "readers": repr(self.placement.readers) if self.placement is not None and self.placement.readers else None,
            "span": self.span or None,
            "devices": list(self.devices),
            "conversions": [conversion_data(edge) for edge in self.conversions],
        }


class Values:
    """Describes the values of one graph; the plan of its rewrite is the given one, or that of the item."""

    def __init__(self, item: TrainingGraph, plan: Plan | None = None) -> None:
        self.item, self.plan = item, plan_of(item, plan)

    @cached_property
    def edges(self) -> Mapping[str, tuple[ShownEdge, ...]]:
        """The conversions of the plan, by the name of the original value."""
        known = () if self.plan is None else (*edges_of(self.item, self.plan), *model_edges_of(self.plan))
        # an edge to SIZES exchanges the sizes of a value's blocks, not the value
        found = grouped((edge.value, edge) for edge in known if edge.to != SIZES)
        return {name: tuple(edges) for name, edges in found.items()}

    def placement(self, value: Value) -> Annotation | None:
        """Return a value's placement from the rewrite, else from the plan if the plan converts it; None: not known."""
        stated = self.item.placements.get(value.name)
        if stated is not None or self.item.placements or converts(value.node):
            return stated
        for edge in self.edges.get(bare(value.name), ()):
            try:
                return read_annotation(f"{edge.from_} -> {edge.to}")[0]
            except MisreadError:  # "single" and the like describe variables
                continue
        return None

    def conversions(self, value: Value) -> tuple[ShownEdge, ...]:
        """Return the edges of the plan that start at a value, or at the original of an instance."""
        name = bare(value.name)
        edges = self.edges.get(name) or self.edges.get(name.removesuffix(INSTANCE_SUFFIX), ())
        if not edges or converts(value.node):
            return ()
        stated = self.item.placements.get(value.name)
        if stated is None:
            return edges
        return tuple(edge for edge in edges if edge.along_model or edge.from_ == repr(stated.placement))

    def described(self, value: Value, name: str | None = None, instances: tuple[Node, ...] = ()) -> Described:
        """Return the description of a value.

        Args:
            name: the name to show; None: the value's name.
            instances: the instances of its node; empty: only the node itself.
        """
        stated, node = self.placement(value), value.node
        span = stated.span if stated is not None else None
        often = word(span) if span is not None else word(node.span) if node.span != ONCE else ""
        devices = dict.fromkeys(one.device for one in instances or (node,))
        return Described(
            value.name if name is None else name,
            type_text(value.dtype, static_shape(value)),
            stated,
            often,
            tuple(filter(None, devices)),
            self.conversions(value),
        )

    def remarks(self) -> dict[str, str]:
        """Return the conversions of each node's results, as text by node name."""
        if not self.edges:
            return {}
        names = {name.partition(":")[0] for name in self.edges}
        names |= {f"{name}{INSTANCE_SUFFIX}" for name in names}
        nodes = (node for node in self.item.graph if bare(node.name) in names)
        found = ((node.name, "; ".join(_conversions(self, node))) for node in nodes)
        return {name: text for name, text in found if text}


def converts(node: Node) -> bool:
    """Return whether a pass made a node to convert a value of another node."""
    return node.attr(PASS_ATTR, b"") in CONVERTING


def types_text(node: Node) -> str:
    """Return element types and static shapes of the results of a node."""
    return ", ".join(type_text(value.dtype, static_shape(value)) for value in results(node))


def _conversions(values: Values, node: Node) -> Iterator[str]:
    for value in results(node):
        for edge in values.conversions(value):
            yield f":{value.index} {conversion(edge)}" if value.index else conversion(edge)
