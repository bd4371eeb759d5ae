"""Gathers and scatters: the indexed dimensions must be replicated, all others keep the split.

A gather from a whole table by split indices is split like the indices. Its gradient scatters split updates by
split indices into a whole table, so its result is partial. If the rows of a table are in shards, each replica looks
up the rows that it holds, and has zeros for the rest: this is partial, too (`passes.localize.rows_of_shards`).
"""

from __future__ import annotations

from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.placement import PARTIAL, REPLICATED, Shape, split
from autograph_rewrite.ops.facts.symbolic_dims import Dim, are_same, shards_of, to_global, unit
from autograph_rewrite.ops.rules.base import Op, Placed, Rule, Slice, made_whole, others_whole
from autograph_rewrite.ops.rules.kernels import by_kernel
from autograph_rewrite.ops.rules.signature import (
    Labels,
    Signature,
    axes,
    every,
    is_open,
    place,
    shapes,
    signed,
    without,
)
from autograph_rewrite.ops.rules.variables import variable_shape


def axis_of(n: Op, index: int, rank: int) -> int | None:
    """Return the non-negative dimension that a scalar input names, in a tensor of a rank; None where it is unknown."""
    value = n.ints(index)
    if value is None or len(value) != 1 or not -rank <= value[0] < rank:
        return None
    return value[0] % rank


def taken(rank: int, axis: int, index_rank: int, batch_dims: int) -> tuple[Labels, Labels, Labels]:
    """Return the labels of table, indices and result of a gather along `axis`.

    Args:
        axis: the dimension of the table that indices address.
        batch_dims: leading dimensions that table and indices share.
    """
    table = axes(rank, "table")
    indices = table[:batch_dims] + axes(index_rank - batch_dims, "index")
    result = table[:axis] + indices[batch_dims:] + table[axis + 1 :]
    return without(table, axis), indices, result


def _gather(n: Op) -> Signature | None:
    """A split index, or any table dimension but the indexed one, stays split."""
    rank, index_rank = n.rank(0), n.rank(1)
    if not rank or index_rank is None:
        return None
    axis = axis_of(n, 2, rank) if n.op == "GatherV2" else 0
    if axis is None:
        return None
    batch_dims = n.attr("batch_dims", 0) if n.op == "GatherV2" else 0
    if batch_dims < 0:
        batch_dims += index_rank
    table, indices, result = taken(rank, axis, index_rank, batch_dims)
    inputs: tuple[Labels | None, ...] = (table, indices, None)
    return Signature(inputs[: len(n.inputs)], (result,), linear=(0,))


def place_gather(n: Op) -> Placed:
    """Gather by the signature; if a split table is read whole, indices with an entry for each row are split like it.

    With a permutation of the batch, for example, each replica picks its examples from the whole batch.
    """
    table, indices = n.inputs[0], n.inputs[1]
    if _is_of_rows_in_shards(n) and n.op == "GatherV2" and n.ints(2) == (0,):
        return Placed((PARTIAL,), others_whole(n, 0))
    labels = _gather(n)
    placed = place(n, labels)
    if any(output.is_split for output in placed.outputs) or not table.placement.is_split or indices.placement.differs:
        return placed
    batch, shape = n.semantics.extent.units, indices.shape or ()
    everything, rows = to_global(table.split_size, batch), unit(table.split_size)
    dim = next((i for i, size in enumerate(shape) if are_same(size, everything)), None)
    if dim is None or rows is None or labels is None or labels.inputs[1] is None or not is_open(labels.inputs[1][dim]):
        return placed
    cut = indices._replace(placement=split(dim), shape=(*shape[:dim], table.split_size, *shape[dim + 1 :]), value=None)
    seen = place(n._replace(inputs=(table, cut, *n.inputs[2:])), labels)
    if not seen.outputs[0].is_split:
        return placed
    return seen._replace(operand_reshards={**seen.operand_reshards, 1: Slice(dim, rows)})


def _is_of_rows_in_shards(n: Op) -> bool:
    """Return whether whole rows are looked up in shards of a variable, by their numbers in the whole."""
    table, is_number = n.inputs[0], n.output_dtypes[0] in dtypes.INEXACT | dtypes.INTEGER
    in_shards = bool(shards_of(table.split_size)) or n.semantics.alike
    return is_number and table.placement == split(0) and in_shards and not n.attr("batch_dims", 0)


def _resource_gather(n: Op) -> Signature | None:
    """Split indices stay split; a variable cannot be sliced, so dimensions that it shares with them are not split."""
    index_rank, variable, static = n.rank(1), variable_shape(n), n.static[0]
    if index_rank is None or (variable is None and static is None):
        return None
    shared = n.attr("batch_dims", 0)
    indices = ("",) * shared + axes(index_rank - shared, "index")
    rank = len(indices) + len(variable) - 1 - shared if variable is not None else len(static or ())
    return Signature((None, indices), (indices + ("",) * (rank - len(indices)),))


def place_resource_gather(n: Op) -> Placed:
    """Look up rows: split columns give a part of every row, sharded rows a contribution."""
    held, indices = n.placement(0), n.inputs[1]
    if not held.is_split:
        return place(n, _resource_gather(n))
    if _is_of_rows_in_shards(n):
        return Placed((PARTIAL,), others_whole(n, 0))
    columns = held.dim > 0 and indices.rank is not None and not n.attr("batch_dims", 0)
    output = split((indices.rank or 0) + held.dim - 1) if columns else REPLICATED
    return Placed((output,), made_whole(n, 1))


def resource_gather_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the dimensions of the indices, then those of the variable without the first."""
    variable, indices = variable_shape(n), n.shape(1)
    if variable is None or indices is None:
        return shapes(n, _resource_gather(n))
    return ((*indices, *variable[1 + n.attr("batch_dims", 0) :]),)


def _depth(n: Op, index: int) -> int | None:
    """Return how many leading dimensions of the table one index row addresses."""
    shape = n.shape(index)
    depth: Dim = shape[-1] if shape else None
    return depth if isinstance(depth, int) else None


def nd_labels(n: Op, table_rank: int, indices: int) -> tuple[Labels, Labels, Labels] | None:
    """Return the labels of table, indices and elements where index rows address the first dimensions.

    Args:
        indices: position of the operand of shape [..., depth].
    """
    depth, index_rank = _depth(n, indices), n.rank(indices)
    if depth is None or index_rank is None or depth > table_rank:
        return None
    rows, rest = axes(index_rank - 1, "index"), axes(table_rank - depth, "table")
    return ("",) * depth + rest, (*rows, ""), rows + rest


def _gather_nd(n: Op) -> Signature | None:
    """Split index rows stay split, and so do table dimensions that no index addresses."""
    rank = n.rank(0)
    labels = None if rank is None else nd_labels(n, rank, 1)
    if labels is None:
        return None
    return Signature(labels[:2], labels[2:], linear=(0,), fragile=frozenset(labels[0]))


def _resource_gather_nd(n: Op) -> Signature | None:
    """Split index rows stay split; the variable is whole."""
    variable, depth, index_rank, static = variable_shape(n), _depth(n, 1), n.rank(1), n.static[0]
    if index_rank is None or (static is None and (variable is None or depth is None)):
        return None
    rows = axes(index_rank - 1, "index")
    rank = len(static) if static is not None else len(rows) + len(variable or ()) - (depth or 0)
    return Signature((None, (*rows, "")), (rows + ("",) * (rank - len(rows)),))


def resource_gather_nd_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the dimensions of the index rows, then those of the variable that no index addresses."""
    variable, indices, depth = variable_shape(n), n.shape(1), _depth(n, 1)
    if variable is None or indices is None or depth is None:
        return shapes(n, _resource_gather_nd(n))
    return ((*indices[:-1], *variable[depth:]),)


def _one_hot(n: Op) -> Signature | None:
    """The indices stay split, wherever the new dimension is inserted."""
    rank = n.rank(0)
    if rank is None:
        return None
    labels, axis = axes(rank), n.attr("axis")
    at = rank if axis == -1 else axis
    return Signature((labels, None, None, None), ((*labels[:at], "", *labels[at:]),))


def one_hot_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the shape of the indices with the depth inserted."""
    indices, depth = n.shape(0), n.value(1)
    if indices is None:
        return n.static
    at = len(indices) if n.attr("axis") == -1 else n.attr("axis")
    return ((*indices[:at], depth[0] if depth else None, *indices[at:]),)


def _result_rank(n: Op, shape_operand: int) -> int | None:
    shape, value = n.shape(shape_operand), n.value(shape_operand)
    if value is not None:
        return len(value)
    length = shape[0] if shape is not None and len(shape) == 1 else None
    if isinstance(length, int):
        return length
    return None if n.static[0] is None else len(n.static[0])


def _scatter_nd(n: Op) -> Signature | None:
    """Rows of updates with equal indices are summed, so indices and updates may be split together."""
    rank = _result_rank(n, 2)
    labels = None if rank is None else nd_labels(n, rank, 0)
    if labels is None:
        return None
    table, indices, updates = labels
    summed = frozenset(indices) - {""}
    return Signature(
        (indices, updates, table), (table,), summed, linear=(1,), sizes=frozenset({2}), fragile=frozenset(table)
    )


def scatter_nd_shape(n: Op) -> tuple[Shape | None, ...]:
    """Return the last operand, which is the shape."""
    value = n.value(2)
    return shapes(n, _scatter_nd(n)) if value is None else (value,)


def _tensor_scatter(n: Op) -> Signature | None:
    """Every index may address every row, so only the dimensions after the indexed ones stay split."""
    rank = n.rank(0)
    labels = None if rank is None else nd_labels(n, rank, 1)
    if labels is None:
        return None
    table, indices, updates = labels
    closed = ("",) * len(indices)
    opened = ("",) * (len(indices) - 1) + updates[len(indices) - 1 :]
    return Signature((table, closed, opened), (table,), fragile=frozenset(table))


RULES: dict[str, Rule] = {
    **every(Rule(place_gather, signed(_gather).shape, by_kernel), "GatherV2 Gather"),
    "GatherNd": signed(_gather_nd),
    "ResourceGather": Rule(place_resource_gather, resource_gather_shape),
    "ResourceGatherNd": Rule(signed(_resource_gather_nd).place, resource_gather_nd_shape),
    "OneHot": Rule(signed(_one_hot).place, one_hot_shape),
    "ScatterNd": Rule(signed(_scatter_nd).place, scatter_nd_shape),
    **every(
        signed(_tensor_scatter),
        "TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMin TensorScatterMax",
    ),
}
