"""Matches patterns of ops, for people who write passes.

Op("Mul", Op("Mul", "x", "a"), "b")         two scalings, one after the other
find(..., graph) ──► Found(%scaled_twice, {"x": %x, "a": %a, "b": %b})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autograph_rewrite.ir.graph import Graph, Value
from autograph_rewrite.ir.traversal import topological_order


class Op:
    """Output 0 of a node of some op type.

    Args:
        types: op types, with blanks between them.
        *inputs: a pattern for each operand, or a name for its value in the match; none: any operands.
        commutes: the two operands also match in the other order.
        sole: the value has no other reader, so its node is dead once the match is replaced.
    """

    def __init__(self, types: str, *inputs: Op | str, commutes: bool = False, sole: bool = False) -> None:
        self.types, self.inputs, self.commutes, self.sole = types.split(), inputs, commutes, sole


class Found(NamedTuple):
    """A place where a pattern matches.

    Attributes:
        value: of the outermost op.
        of: the values that the pattern names.
    """

    value: Value
    of: Mapping[str, Value]


def find(pattern: Op, graph: Graph) -> Iterator[Found]:
    """Yield where a pattern matches, consumers last; the caller may edit the graph up to the yielded match."""
    for node in topological_order(graph):
        if node.name in graph and node.op in pattern.types:
            found = match(pattern, node.output())
            if found is not None:
                yield Found(node.output(), found)


def match(pattern: Op | str, value: Value, known: Mapping[str, Value] | None = None) -> dict[str, Value] | None:
    """Return the values that a pattern names, or None where it does not match; equal names need equal values.

    Args:
        known: the values of names that are bound already.
    """
    names = dict(known or {})
    if isinstance(pattern, str):
        return names | {pattern: value} if names.get(pattern, value) is value else None
    node = value.node
    if node.op not in pattern.types or value.index:
        return None
    if not pattern.inputs:
        return names
    if len(node.inputs) != len(pattern.inputs):
        return None
    orders = [pattern.inputs, pattern.inputs[::-1]] if pattern.commutes else [pattern.inputs]
    for order in orders:
        found: dict[str, Value] | None = names
        for inner, read in zip(order, node.inputs, strict=True):
            if found is None or (isinstance(inner, Op) and inner.sole and len(read.uses) != 1):
                found = None
                break
            found = match(inner, read, found)
        if found is not None:
            return found
    return None
