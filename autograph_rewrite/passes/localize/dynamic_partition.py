"""Mark pairs of ops that partition the rows of a batch and stitch them again, so that each replica runs them locally.

    before   SparseToDense(SparseCross(a, b))                  dense a and b, of [rows, 1] each
    after    the same two, marked; the second reads [rows of a, 1] instead of a size that a block without rows has not

    before   RaggedTensorToTensor(f(words), row of each word) of StringSplitV2(texts), to a stated width
    after    the same, marked; f works on each word by itself

In between are numbers of rows, which count from the first of the block. So all readers must be known: where one is not,
or the width is that of the longest row of the batch, nothing is marked and the ops work on whole values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.rules.marked import IN_BLOCK, ROWS_APART, mark
from autograph_rewrite.ops.traits import has


def mark_dynamic_partitions(graph: Graph) -> None:
    """Mark both ends of each chain that is complete."""
    ends = (node for node in graph if has(node.op, "crosses") or node.op == "StringSplitV2")
    starts = [node for node in ends if IN_BLOCK not in node.attrs]
    looped = frames_of(topological_order(graph)) if starts else {}
    anchored = set(graph.anchors.values())
    for node in starts:
        # What is added to a loop would have to wait in each iteration for what enters it.
        if node in looped or any(node.output(i) in anchored for i in range(len(node.output_dtypes))):
            continue
        if has(node.op, "crosses"):
            _mark_cross(node)
        else:
            _mark_split(graph, node, anchored)


def _mark_cross(node: Node) -> None:
    """A cross of dense columns has as many features in each row as there are combinations."""
    parameters = {"SparseCrossV2": 1, "SparseCrossHashed": 3}.get(node.op, 0)
    columns = node.inputs[: len(node.inputs) - parameters]
    shapes = [_shape(value) for value in columns]
    if node.attr("N") or not columns or any(shape is None or len(shape) != 2 for shape in shapes):
        return
    widths = [shape[1] for shape in shapes if shape is not None]
    readers = {use.node for i in range(3) for use in node.output(i).uses}
    ends = [reader for reader in readers if reader.op == "SparseToDense"]
    outputs = [node.output(i) for i in (0, 2, 1)]
    if not ends or len(ends) < len(readers) or None in widths:
        return
    if any(list(end.inputs[:3]) != outputs for end in ends):
        return
    for end in ends:
        rows, width = _rows(end, columns[0]), Builder.at(end).const(_product(widths), dtypes.INT64, "size")
        shape = Builder.at(end).op("Pack", rows, width, what="shape", N=2)
        end.set_input(1, shape)
    mark((node, *ends), ROWS_APART)


def _product(widths: list[int | None]) -> int:
    return math.prod(width for width in widths if width is not None)


def _mark_split(graph: Graph, node: Node, anchored: set[Value]) -> None:
    """Words that end in rows of a stated width, each handled by itself on the way."""
    if _shape(node.inputs[0]) is None or len(_shape(node.inputs[0]) or ()) != 1:
        return
    ids = [use.node for use in node.output(0).uses]
    counts = [use.node for use in node.output(2).uses]
    if not all(_takes(reader, [0, 0], 2) for reader in ids) or not all(_takes(reader, [0], 1) for reader in counts):
        return
    ends = {use.node for reader in ids for use in reader.output().uses}
    words = _words(node.output(1), ends, anchored)
    known = {*(r.output() for r in ids)}, {*(r.output() for r in counts)}
    if words is None or not ends or any({reader.output() for reader in (*ids, *counts)} & anchored):
        return
    if not all(_is_end(end, words, *known) for end in ends):
        return
    if any(use.node not in ends for reader in counts for use in reader.output().uses):
        return
    for end in ends:
        end.set_input(3, _rows(end, node.inputs[0]))
    for reader in counts:
        if not reader.control_users:
            graph.erase(reader)
    mark((node, *ends), ROWS_APART)


def _words(first: Value, ends: set[Node], anchored: set[Value]) -> set[Value] | None:
    """Return the words and what becomes of each; None if somebody else reads them."""
    found, pending = {first}, [first]
    while pending:
        value = pending.pop()
        if value in anchored:
            return None
        for use in value.uses:
            node = use.node
            if node in ends:
                continue
            if not _is_of(node.output(), first):
                return None
            if node.output() not in found:
                found.add(node.output())
                pending.append(node.output())
    return found


def _is_of(value: Value, first: Value) -> bool:
    """Return whether a value is made of the words `first` alone."""
    if value is first:
        return True
    return has(value.node.op, "each_text") and all(_is_single(v) or _is_of(v, first) for v in value.node.inputs)


def _is_single(value: Value) -> bool:
    """Return whether a value is one constant for all words, or the handle of a table."""
    if dtypes.base(value.dtype) == dtypes.RESOURCE:
        return True
    return value.node.op == "Const" and _content(value) is not None and np.ndim(_content(value)) == 0


def _content(value: Value) -> Any:
    return value.node.attr("value") if value.node.op == "Const" else None


def _takes(node: Node, begin: list[int], rank: int) -> bool:
    """Return whether a slice takes the first column of a matrix, or the first entry of a vector."""
    if node.op != "StridedSlice" or node.attr("new_axis_mask") or node.attr("ellipsis_mask"):
        return False
    given, steps = _content(node.inputs[1]), _content(node.inputs[3])
    if given is None or steps is None or list(given) != begin or set(steps.tolist()) != {1}:
        return False
    if node.attr("shrink_axis_mask") != 1 << (rank - 1):
        return False
    return rank == 1 or bool(node.attr("begin_mask") & 1 and node.attr("end_mask") & 1)


def _is_end(node: Node, words: set[Value], ids: set[Value], counts: set[Value]) -> bool:
    """Return whether words are put into rows of a stated width."""
    if node.op != "RaggedTensorToTensor" or len(node.inputs) != 5:
        return False
    if [bytes(kind) for kind in node.attr("row_partition_types")] != [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]:
        return False
    shape, (values, default, count, rows) = _content(node.inputs[0]), node.inputs[1:]
    stated = shape is not None and np.shape(shape) == (2,) and shape[0] == -1 and shape[1] >= 0
    return bool(stated and values in words and _is_single(default) and count in counts and rows in ids)


def _shape(value: Value) -> Any:
    stated = value.node.attr("_output_shapes")
    return stated[value.index] if stated is not None and value.index < len(stated) else None


def _rows(end: Node, source: Value) -> Value:
    """Return how many rows a value has, as an int64."""
    build = Builder.at(end)
    shape = build.op("Shape", source, what="rows_of", out_type=dtypes.INT64)
    limits = [build.const([at], dtypes.INT32, "size") for at in (0, 1, 1)]
    return build.op("StridedSlice", shape, *limits, what="rows", shrink_axis_mask=1)
