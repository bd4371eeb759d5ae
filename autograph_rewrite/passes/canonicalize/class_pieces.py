"""The pieces of what works along a dimension of classes: reductions along it, and the number of each class.

    numbers      [[0, 1, ..., C - 1]]      each device has those of its block
    only(m, z)   z where m is set, else 0

What stands along the classes of a block is made for that block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.types import dtypes


class Axis(NamedTuple):
    """The dimension of the classes.

    Attributes:
        dim: which of the operand it is.
        rank: of the operand.
        classes: how many there are.
        blocks: how many blocks can be told apart, and how many classes each has.
        asked: how many classes a node is to find, where an operand says it.
    """

    dim: int
    rank: int
    classes: int
    blocks: tuple[int, int]
    asked: int | None = None


@dataclass(frozen=True)
class ClassPieces(Builder):
    """Adds pieces that work along classes.

    Attributes:
        dim: which dimension of the operand that of the classes is.
        rank: of the operand.
        classes: how many there are.
        blocks: how many blocks can be told apart, and how many classes each has.
        count: how many classes the node is asked for, where an operand says it.
        numbered: the numbers of classes that were made, with the dimension along which they stand.
    """

    dim: int = 0
    rank: int = 0
    classes: int = 0
    blocks: tuple[int, int] = (1, 1)
    count: int | None = None
    numbered: dict[Value, int] = field(default_factory=dict)

    def reduce(self, op: str, value: Value, name: str, *, keep: bool = True) -> Value:
        """Reduce along the classes.

        Args:
            op: Sum, Max or Min.
            value: what is reduced.
            name: of the result.
            keep: whether the dimension stays, as 1.
        """
        axis = self.const([self.dim], dtypes.INT32, f"{name}/axis")
        return self.op(op, value, axis, what=name, keep_dims=keep)

    def numbers(self, dtype: int) -> Value:
        """Return the number of each class, along their dimension."""
        shape = [self.classes if dim == self.dim else 1 for dim in range(self.rank)]
        made = self.const(np.arange(self.classes).reshape(shape), dtype, "classes")
        self.numbered[made] = self.dim
        return made

    def exponentials(self, logits: Value) -> tuple[Value, Value, Value]:
        """Return logits less their maximum, the exponentials of that, and the sum of these."""
        shifted = self.op("Sub", logits, self.reduce("Max", logits, "max"), what="shifted")
        powers = self.op("Exp", shifted, what="exp")
        return shifted, powers, self.reduce("Sum", powers, "sum")

    def only(self, mask: Value, value: Value, name: str) -> Value:
        """Return a value where a mask is set, else zero.

        Args:
            mask: of the value's shape.
            value: of numbers.
            name: of the result.
        """
        return self.op("SelectV2", mask, value, self.const(0, value.dtype, f"{name}/zero"), what=name)


def is_read(node: Node, index: int) -> bool:
    """Return whether somebody reads an output, or asks for it by its name.

    Args:
        node: what makes it.
        index: its number.
    """
    value = node.output(index)
    return bool(value.uses) or value in value.node.graph.anchors.values()
