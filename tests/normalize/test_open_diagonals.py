"""Sizes of matrices of diagonals that follow from the diagonals are left open, whichever of the two it is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autograph_rewrite import GraphItem
from autograph_rewrite.normalize.normalize import normalise

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("k", "length", "rows", "cols", "left"),
    [
        (0, 3, 3, 3, [-1, 3]),
        (0, 3, 3, 5, [-1, 5]),
        (0, 3, 4, 3, [4, -1]),
        ((-1, 1), 3, 3, 3, [-1, 3]),
        (1, 3, 3, 4, [-1, 4]),
        (-1, 3, 4, 3, [-1, 3]),
        ((-2, -1), 2, 3, 2, [-1, 2]),
        (0, 3, -1, -1, [-1, -1]),
        (0, 3, -1, 5, [-1, 5]),
    ],
)
def test_a_size_that_the_diagonals_imply_is_left_open_and_the_matrix_is_the_same(
    k: int | tuple[int, int], length: int, rows: int, cols: int, left: list[int]
) -> None:
    band = [k[1] - k[0] + 1] if isinstance(k, tuple) else []
    x = np.random.RandomState(0).randn(2, *band, length)
    with tf.Graph().as_default() as graph:
        fed = v1.placeholder(tf.float64, [None, *band, length], name="x")
        made = tf.raw_ops.MatrixDiagV3(
            diagonal=fed, k=k, num_rows=rows, num_cols=cols, padding_value=np.float64(0), name="y"
        )
        with v1.Session() as session:
            expected = session.run(made, {fed: x})
    flat = normalise(GraphItem.from_graph(graph, outputs=["y"]))
    node = flat.graph.nodes["y"]
    found = [int(value.node.attr("value")) for value in node.inputs[2:4]]
    assert found == left
    got = tf.raw_ops.MatrixDiagV3(diagonal=x, k=k, num_rows=found[0], num_cols=found[1], padding_value=np.float64(0))
    np.testing.assert_array_equal(got, expected)
