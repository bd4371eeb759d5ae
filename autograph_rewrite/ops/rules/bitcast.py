"""Bitcast reads the same bits as another type; only a change of width touches a dimension, the last one."""

from __future__ import annotations

from autograph_rewrite.ir.types.dtypes import base, numpy_dtype
from autograph_rewrite.ops.facts.placement import Shape
from autograph_rewrite.ops.rules.base import Op
from autograph_rewrite.ops.rules.factors import factors


def _widths(n: Op) -> tuple[int, int] | None:
    """Return the bytes of one element before and after."""
    source, target = numpy_dtype(base(n.inputs[0].dtype)), numpy_dtype(n.output_dtypes[0])
    return None if source is None or target is None else (source.itemsize, target.itemsize)


def _bitcast(n: Op) -> str | None:
    """All dimensions stay split; narrower elements add a last dimension, wider elements remove it."""
    before, after = _widths(n) or (0, 0)
    if not before:
        return None
    return "... -> ..." if before == after else "... -> ... ." if before > after else "... . -> ..."


def bitcast_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the same shape, or that with a last dimension added or removed."""
    shape, widths = n.shape(0), _widths(n)
    if shape is None or widths is None:
        return n.static
    before, after = widths
    if before == after:
        return (shape,)
    return ((*shape, before // after),) if before > after else (shape[:-1],)


RULES = {"Bitcast": factors(_bitcast)._replace(shape=bitcast_shape)}
