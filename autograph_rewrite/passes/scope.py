"""Scope: adds the folded nodes of one conversion under one name, beside the value that they serve.

The members of an exchange are the replicas, or the processes where each has added up what its replicas hold: then the
value runs once, and so does what is done with it before the exchange.
"""

from __future__ import annotations

from typing import Any

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.context import Context


class Scope:
    """Adds nodes for one value.

    Args:
        context: the rewrite.
        value: what they work on; those of members run as often.
        name: prefix of their names.
        origin: the original node that they serve, if it is not the value's.
    """

    def __init__(self, context: Context, value: Value, name: str, *, origin: Node | None = None) -> None:
        self.context = context
        self.value = value
        self.name = name
        self.origin = origin if origin is not None else value.node

    def each(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node that every member runs, as the value; return its first output."""
        return self._add(op, inputs, what, self.value.node.span, attrs)

    def common(self, op: str, *inputs: Value, what: str, **attrs: Any) -> Value:
        """Add a node that runs as often as replicated values are made; return its first output."""
        return self._add(op, inputs, what, self.context.common_span, attrs)

    def gather(self, op: str, value: Value, *others: Value, what: str, **attrs: Any) -> Value:
        """Add a node that runs once and reads `value` of all replicas; return its first output."""
        attrs = {"N": self.context.local, **attrs}
        return self._add(op, (value, *others), what, Span.ONCE, attrs, gather=(0,))

    def const(self, content: Any, dtype: int, what: str) -> Value:
        """Add a constant of a type that numpy knows."""
        near = self.value
        return self.context.const(content, dtypes.numpy_dtype(dtype), name=f"{self.name}/{what}", near=near)

    def _add(
        self,
        op: str,
        inputs: tuple[Value, ...],
        what: str,
        span: Span,
        attrs: dict[str, Any],
        gather: tuple[int, ...] = (),
    ) -> Value:
        node = self.context.add(
            op,
            inputs,
            name=f"{self.name}/{what}",
            span=span,
            origin=self.origin,
            attrs=attrs or None,
            gather=gather,
        )
        return node.output()
