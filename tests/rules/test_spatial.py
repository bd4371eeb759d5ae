"""Rows of images are split only where blocks of known sizes can be read with rows of their neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Extent, Fact, split
from autograph_rewrite.ops.facts.symbolic_dims import Sym
from autograph_rewrite.ops.rules.base import Op, Placed, Semantics, Slice, whole
from autograph_rewrite.ops.rules.table import TABLE

ROWS = Sym(4, ("b",))
IMAGES = Fact(split(1), dtypes.FLOAT, (2, ROWS, 8, 3))
FILTERS = Fact(REPLICATED, dtypes.FLOAT, (3, 3, 3, 5))
CONV = {"strides": (1, 1, 1, 1), "padding": b"SAME", "dilations": (1, 1, 1, 1)}


def asked(op: str, *inputs: Fact, halo: bool = True, **attrs: Any) -> tuple[Op, Placed | None]:
    known = CONV | attrs
    semantics = Semantics(extent=Extent(units=2, sizes=(1, 1) if halo else None))
    n = Op(op, lambda key, default=None: known.get(key, default), inputs, (dtypes.FLOAT,), (None,), semantics, {})
    return n, TABLE[op].place(n)


def test_the_batch_never_splits_rows() -> None:
    n, placed = asked("Conv2D", IMAGES, FILTERS, halo=False)
    assert placed == whole(n)


def test_a_convolution_reads_rows_of_neighbours() -> None:
    n, placed = asked("Conv2D", IMAGES, FILTERS)
    assert placed is not None
    assert placed.outputs == (split(1),)
    (want,) = placed.operand_reshards.values()
    assert isinstance(want, Slice)
    assert want.halo is not None
    assert [want.halo.span(units) for units in ((0, 1), (1, 2))] == [(0, 5), (3, 8)]
    shape = TABLE["Conv2D"].shape
    assert shape is not None
    assert shape(n)[0] == (2, ROWS, None, 5)


def test_channels_first_have_their_rows_elsewhere() -> None:
    images = Fact(split(2), dtypes.FLOAT, (2, 3, ROWS, 8))
    _, placed = asked("Conv2D", images, FILTERS, data_format=b"NCHW")
    assert placed is not None
    assert placed.outputs == (split(2),)
    channels = Fact(split(1), dtypes.FLOAT, (2, Sym(2, ("b",)), 8, 8))
    _, placed = asked("Conv2D", channels, FILTERS._replace(shape=(3, 3, 4, 5)), data_format=b"NCHW")
    assert placed is not None
    assert placed.outputs == (PARTIAL,)


@pytest.mark.parametrize(
    ("op", "attrs", "said"),
    [
        ("Conv2D", {"strides": (1, 3, 3, 1)}, "makes 3 rows of 8"),
        ("AvgPool", {"ksize": (1, 3, 3, 1)}, "pads its input"),
    ],
)
def test_what_cannot_be_cut_says_why(op: str, attrs: dict[str, Any], said: str) -> None:
    n, placed = asked(op, *((IMAGES,) if op == "AvgPool" else (IMAGES, FILTERS)), **attrs)
    assert placed is not None
    assert said in placed.note
    assert placed._replace(note="") == whole(n)
