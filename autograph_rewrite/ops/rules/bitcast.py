"""Bitcast reads the same bits as another type; only a change of width touches a dimension, the last one."""

from __future__ import annotations

from autograph_rewrite.ir.types.dtypes import base, numpy_dtype
from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.rules.base import Op, Rule
from autograph_rewrite.ops.rules.signature import Placer, Signature, axes


def _widths(n: Op) -> tuple[int, int] | None:
    """Return the bytes of one element before and after."""
    source, target = numpy_dtype(base(n.inputs[0].dtype)), numpy_dtype(n.output_dtypes[0])
    return None if source is None or target is None else (source.itemsize, target.itemsize)


def _bitcast(n: Op) -> Signature | None:
    """All dimensions stay split; narrower elements add a last one, wider elements use it up."""
    rank, widths = n.rank(0), _widths(n)
    if rank is None or widths is None:
        return None
    labels, (before, after) = axes(rank), widths
    if before == after:
        return Signature((labels,), (labels,))
    if before > after:
        return Signature((labels,), ((*labels, ""),))
    return Signature(((*labels[:-1], ""),), (labels[:-1],)) if rank else None


def bitcast_shape(n: Op) -> tuple[Shape | None, ...]:
    """The same, or with as many narrow elements for each wide one as a last dimension."""
    shape, widths = n.shape(0), _widths(n)
    if shape is None or widths is None:
        return n.static
    before, after = widths
    if before == after:
        return (shape,)
    return ((*shape, before // after),) if before > after else (shape[:-1],)


RULES: dict[str, Rule] = {"Bitcast": Rule(Placer(_bitcast), bitcast_shape)}
