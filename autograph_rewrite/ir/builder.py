"""Adds nodes that support or replace one node, each in one line of code and with a name below that node's name.

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
        scope: prefix of their names.
        origin: the node that they support, or its name (provenance).
        device: of the nodes; empty where it is not decided yet.
        tied: constants wait for this node: having no inputs, they would run outside its loop or branch.
        place: their coordinates on axes along which they have no instances.
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
        """Return a builder of nodes that support `node`, with names below `node.name`, or `node.name/what`."""
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
            selects: which instances it reads, by input index.
            marks: encoded attributes that the op does not declare.
            recorded: shapes of its outputs.
            **attrs: those that cannot be inferred.
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
        """Add a constant; its type is `dtype` (TensorFlow's number), or else the numpy type of the content."""
        if dtype == dtypes.BFLOAT16:  # numpy lacks the type
            return self.cast(self.const(content, dtypes.FLOAT, f"{what}/wide", **how), dtype, what)
        array = np.asarray(content, dtypes.numpy_dtype(dtype) if dtype is not None else None)
        number = dtypes.from_numpy(array.dtype) if dtype is None else dtype
        controls = () if self.tied is None else (self.tied,)
        return self.op("Const", what=what, **{"controls": controls, **how}, value=array, dtype=number)

    def cast(self, value: Value, dtype: int, what: str = "") -> Value:
        """Return a value in an element type."""
        return value if value.dtype == dtype else self.op("Cast", value, what=what, DstT=dtype)
