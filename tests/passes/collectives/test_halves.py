"""Integers that ride among floating-point numbers come out of their sum to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import autograph_rewrite as ar
from autograph_rewrite.ir.format import serde
from autograph_rewrite.ir.graph import Graph
from autograph_rewrite.ir.mesh import ONCE
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.passes.base.builder import FoldedBuilder
from autograph_rewrite.passes.base.rewriting import Request, Rewrite
from autograph_rewrite.passes.collectives.block_bounds import join_rows, split_row
from tests.support.small_items import INT32, const, regression

ROWS = (
    [0, 1, -1, 2**31 - 1],
    [-(2**31), 2**24 + 1, 2**16 - 1, 2**16],
    [-(2**24) - 1, -(2**16), 0x7FFF_8001, 12_345_678],
)


def added_up(dtype: int, rows: tuple[list[int], ...] = ROWS) -> Any:
    """What all members find, where each puts its row at its place and a sum over members is taken."""
    graph = Graph()
    item = regression()
    plan = ar.build_plan(item, {"devices": ["CPU:0"]})
    rewrite = Rewrite(Request(item, plan), graph, plan, item, plan)
    placed = []
    for member, row in enumerate(rows):
        near = const(graph, f"row_{member}", row, INT32)
        build = FoldedBuilder.of(rewrite, near, f"member_{member}", span=ONCE)
        placed.append(split_row(build, near, dtype, (member, len(rows))))
    total = graph.add("AddN", placed, name="total").output()
    whole = join_rows(FoldedBuilder.of(rewrite, total, "whole", span=ONCE), total, (len(rows), len(rows[0])))
    with tf.Graph().as_default() as loaded:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(serde.to_bytes(graph)), name="")
    with tf.compat.v1.Session(graph=loaded) as session:
        return session.run(f"{whole.node.name}:{whole.index}")


@pytest.mark.parametrize("dtype", [dtypes.FLOAT, dtypes.DOUBLE])
def test_rows_of_all_members_are_found_in_the_sum_to_the_last_bit(dtype: int) -> None:
    found = added_up(dtype)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.array(ROWS, np.int32))


def test_one_member_finds_its_own_row() -> None:
    np.testing.assert_array_equal(added_up(dtypes.FLOAT, ROWS[1:2]), np.array(ROWS[1:2], np.int32))


def test_a_type_of_fewer_bits_than_a_half_would_lose_some_and_float32_as_a_whole_too() -> None:
    assert not np.array_equal(added_up(dtypes.BFLOAT16), np.array(ROWS, np.int32))
    assert not np.array_equal(np.array(ROWS, np.int32).astype(np.float32).astype(np.int64), np.array(ROWS))
