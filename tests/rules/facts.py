"""Short ways to ask a rule what it says about a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import (
    ANY,
    LOCAL,
    PARTIAL,
    REPLICATED,
    UNKNOWN,
    Fact,
    Placement,
    Shape,
    split,
)
from autograph_rewrite.ops.facts.symbolic_dims import Dim, Sym
from autograph_rewrite.ops.rules.base import Op, Placed, Semantics
from autograph_rewrite.ops.rules.table import TABLE

B = Sym(1, ("b",))
WHOLE_BATCH = Sym(1, ("B",))
__all__ = [
    "ANY",
    "LOCAL",
    "PARTIAL",
    "REPLICATED",
    "UNKNOWN",
    "WHOLE_BATCH",
    "B",
    "fact",
    "node",
    "placed",
    "sizes",
    "split",
]


def fact(placement: Placement, *shape: Dim, zero: bool = False, cell: str = "", dtype: int = dtypes.FLOAT) -> Fact:
    """Return the fact of a tensor of data."""
    return Fact(placement, dtype, shape, zero=zero, cell=cell)


def sizes(*value: Dim, placement: Placement | None = None) -> Fact:
    """Return the fact of a shape vector."""
    local = any(isinstance(v, Sym) and v.factors[0] == "b" for v in value)
    return Fact(placement or (LOCAL if local else REPLICATED), dtypes.INT32, (len(value),), value)


def node(
    op: str,
    *inputs: Fact,
    outputs: int = 1,
    attrs: Mapping[str, Any] | None = None,
    static: Sequence[Shape | None] | None = None,
    semantics: Semantics | None = None,
    cells: Mapping[int, Fact] | None = None,
) -> Op:
    """Return a node as a rule sees it."""
    given = dict(attrs or {})
    return Op(
        op,
        lambda name, default=None: given.get(name, default),
        inputs,
        (dtypes.FLOAT,) * outputs,
        tuple(static or (None,) * outputs),
        semantics or Semantics(),
        dict(cells or {}),
    )


def placed(n: Op) -> Placed:
    """Return what the rule of an op answers."""
    answer = TABLE[n.op].place(n)
    assert answer is not None
    return answer
