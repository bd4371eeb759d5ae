"""Builder: adds the nodes that serve one node, a line each, under one name.

build = Builder.at(mean)
total = build.op("Sum", x, axes, what="sum")                 %mean/sum, made for %mean
share = build.op("Mul", total, build.const(0.5, what="half"), what="share")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.mesh import ANYWHERE, ONCE, Place, Select, Span
from autograph_rewrite.ir.recorded_shapes import record_shapes
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import Shape


@dataclass(frozen=True)
class Builder:
    """Adds nodes to a graph.

    Attributes:
        scope: what their names begin with.
        origin: the node that they serve, or its name (provenance).
        device: where; empty for nowhere yet.
        tied: constants wait for this one: without an input they would run outside of its loop or branch.
        place: where, on axes on which they have no instances.
    """

    graph: Graph
    scope: str
    origin: Node | str | None = None
    span: Span = ONCE
    device: str = ""
    tied: Node | None = None
    place: Place = field(default_factory=lambda: ANYWHERE, kw_only=True)

    @classmethod
    def at(
        cls, node: Node, what: str = "", *, span: Span = ONCE, device: str = "", tied: Node | None = None
    ) -> Builder:
        """Return a builder of what serves a node, under its name, or under another below that."""
        return cls(node.graph, f"{node.name}/{what}" if what else node.name, node, span, device, tied)

    def node(
        self,
        op: str,
        *inputs: Value,
        what: str = "",
        controls: Iterable[Node] = (),
        selects: Mapping[int, Select] | None = None,
        marks: Mapping[str, bytes] | None = None,
        recorded: Sequence[Shape | None] | None = None,
        **attrs: Any,
    ) -> Node:
        """Add a node.

        Args:
            what: its name below the scope; "": it has the scope's name.
            selects: which instances it reads, by the number of the input.
            marks: encoded attributes that the op does not declare.
            recorded: shapes of its outputs, where they are not to be inferred.
            **attrs: what the op and its inputs do not say already.
        """
        name = f"{self.scope}/{what}" if what else self.scope
        made = self.graph.add(
            op,
            inputs,
            name=name,
            attrs=attrs,
            device=self.device,
            controls=controls,
            span=self.span,
            place=self.place,
            selects=selects,
            origin=self.origin,
        )
        for mark, raw in (marks or {}).items():
            made.set_raw_attr(mark, raw)
        if recorded is not None:
            record_shapes(made, recorded)
        return made

    def op(self, op: str, *inputs: Value, what: str = "", **how: Any) -> Value:
        """Add a node as `node` does; return its first output."""
        return self.node(op, *inputs, what=what, **how).output()

    def const(self, content: Any, dtype: int | None = None, what: str = "", **how: Any) -> Value:
        """Add a constant: of a number of TensorFlow's types, or of the type that numpy gives the content."""
        if dtype == dtypes.BFLOAT16:  # which numpy does not know
            return self.cast(self.const(content, dtypes.FLOAT, f"{what}/wide", **how), dtype, what)
        array = np.asarray(content, dtypes.numpy_dtype(dtype) if dtype is not None else None)
        number = dtypes.from_numpy(array.dtype) if dtype is None else dtype
        controls = () if self.tied is None else (self.tied,)
        return self.op("Const", what=what, **{"controls": controls, **how}, value=array, dtype=number)

    def cast(self, value: Value, dtype: int, what: str = "") -> Value:
        """Return a value in an element type."""
        return value if value.dtype == dtype else self.op("Cast", value, what=what, DstT=dtype)
