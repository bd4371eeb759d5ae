"""Leave a size of MatrixDiag open that its diagonals imply.

    before   MatrixDiagV3(x[?, 6], k=0, num_rows=6, num_cols=6)
    after    MatrixDiagV3(x[?, 6], k=0, num_rows=-1, num_cols=6)

The result is the same. TensorFlow refuses to import the first one where it cannot infer the 6 of x, because the shape
function compares stated sizes with one that it does not know; a distributed graph computes more shapes in the run.
"""

from __future__ import annotations

import numpy as np

from autograph_rewrite.ir.graph import Graph, Node
from autograph_rewrite.ir.shapes.recorded import static_shape
from autograph_rewrite.ir.types import dtypes

_IMPLIED = -1


def leave_open(graph: Graph) -> None:
    """Replace a stated size by -1 wherever the other one is stated too and the diagonals imply it, in place."""
    for node in [node for node in graph if node.op in ("MatrixDiagV2", "MatrixDiagV3")]:
        index = _implied(node)
        if index is not None:
            old = node.inputs[index].node
            new = graph.add(
                "Const", name=f"{node.name}/open", origin=node, controls=old.controls,
                attrs={"value": np.array(_IMPLIED, np.int32), "dtype": dtypes.INT32},
            )  # fmt: skip
            node.set_input(index, new.output())


def _implied(node: Node) -> int | None:
    """Return the operand, rows or columns, that the length of the longest diagonal implies; None where none does."""
    shape, stated = static_shape(node.inputs[0]), [value.node.attr("value") for value in node.inputs[1:4]]
    if not shape or shape[-1] is None or any(not isinstance(entry, np.ndarray) for entry in stated):
        return None
    lower, upper, rows, cols = stated[0].min(), stated[0].max(), int(stated[1]), int(stated[2])
    if _IMPLIED in (rows, cols):
        return None
    return next(
        (i for i, size, least in ((2, rows, -min(upper, 0)), (3, cols, max(lower, 0))) if size == shape[-1] + least),
        None,
    )
