"""Defines Value, one output of a node, and Use, one reader of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.mesh import is_rarer

if TYPE_CHECKING:
    from autograph_rewrite.ir.graph import Node


class Use(NamedTuple):
    """One reader of a value: input `index` of `node`."""

    node: Node
    index: int  # type: ignore[assignment]  # it hides tuple.index, which no code calls here


class Value:
    """One output of a node."""

    __slots__ = ("_uses", "index", "node")

    def __init__(self, node: Node, index: int) -> None:
        self.node = node
        self.index = index
        self._uses: dict[tuple[Node, int], None] = {}

    @property
    def name(self) -> str:
        """The tensor's name in GraphDef syntax: `node` for output 0, else `node:1`."""
        return self.node.name if self.index == 0 else f"{self.node.name}:{self.index}"

    @property
    def uses(self) -> tuple[Use, ...]:
        """A snapshot of the readers: safe to rewire while iterating."""
        return tuple([Use(*use) for use in self._uses])

    @property
    def dtype(self) -> int:
        """The element type (TensorFlow's number)."""
        try:
            return self.node.output_dtypes[self.index]
        except IndexError:
            raise GraphError(f"'{self.node.name}' has no output {self.index}", node=self.node) from None

    def replace_all_uses_with(self, new: Value, *, keep: Collection[Node] = ()) -> None:
        """Point every reader of this value at `new`, except the nodes in `keep`; anchors are readers too.

        A reader keeps its selector where `new` has the instances of this value, or still several for it.
        """
        span = new.node.span
        for node, index in tuple(self._uses):
            if node not in keep:
                selects = span == self.node.span or is_rarer(node.span, span)
                node.set_input(index, new, node.selects.get(index) if selects else None)
        self.node.graph.move_anchors(self, new)

    def __repr__(self) -> str:
        return f"%{self.name}"
