"""State in attributes the shapes that blocks have, where the graph states those of a batch of static size.

    before   TensorArrayV3  element_shape=[6, 3]               each, but a replica writes elements of its block
    after    TensorArrayV3  element_shape=[2, 3] | [2, 3] | [2, 3]

A tensor array refuses elements of another shape, and makes the zeros of an element that nobody wrote from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.attrs import Shape, encode
from autograph_rewrite.ir.graph import Node, PerInstance, Span
from autograph_rewrite.passes.blocks import bounds
from autograph_rewrite.passes.context import Context

SHAPES_OF_ELEMENTS = {
    "TensorArrayV3": ("element_shape", 0),
    "TensorArrayGatherV3": ("element_shape", 0),
    "TensorArrayConcatV3": ("element_shape_except0", 1),
}
"""The attribute, and how many leading dimensions of an element it leaves out."""


def state_block_shapes(context: Context) -> None:
    """Restate the element shapes of arrays and lists that hold blocks."""
    for node in context.state.order:
        if node.op in ("EmptyTensorList", "TensorListReserve") and node.output() in context.future_splits:
            _state_list_shape(context, node)
        if node.span is not Span.EACH or node.op not in SHAPES_OF_ELEMENTS:
            continue
        name, left_out = SHAPES_OF_ELEMENTS[node.op]
        stated, dim = node.attr(name), _split_dimension(context, node)
        if stated is None or dim is None or not left_out <= dim < left_out + len(stated):
            continue
        shapes = shapes_of_blocks(stated, dim - left_out, context.state.semantics.batch, context.replicas)
        node.set_raw_attr(name, PerInstance(tuple(encode("shape", shape) for shape in shapes)))


def _state_list_shape(context: Context, node: Node) -> None:
    """Give each replica's list the shape of its blocks, where the graph states one."""
    operand = node.inputs[0]
    stated, dim = context.state.facts[operand].value, context.future_splits[node.output()]
    if stated is None or context.state.facts[operand].shape == () or not all(isinstance(d, int) for d in stated):
        return
    shape = [d if isinstance(d, int) and d >= 0 else None for d in stated]
    if dim >= len(shape):
        return
    blocks = shapes_of_blocks(shape, dim, context.state.semantics.batch, context.replicas)
    contents = [[-1 if size is None else size for size in block] for block in blocks]
    dtype = dtypes.numpy_dtype(operand.dtype)
    node.set_input(0, context.const_each(contents, dtype, name=f"{node.name}/block_shape", near=operand))


def _split_dimension(context: Context, node: Node) -> int | None:
    """Return the dimension along which the elements of an array are cut."""
    handle = node.output() if node.op == "TensorArrayV3" else node.inputs[0]
    content = context.state.cells.get(context.state.facts[handle].cell)
    return content.placement.dim if content is not None and content.placement.is_split else None


def shapes_of_blocks(shape: Sequence[int | None], dim: int, batch: int | None, replicas: int) -> list[Shape]:
    """Return the shape of each replica's block of something of shape `shape`.

    Args:
        shape: the whole, as the graph states it.
        dim: the dimension that is cut.
        batch: number of examples, where it is static.
        replicas: how many blocks there are.
    """
    whole = shape[dim]
    sizes: Sequence[int | None] = [None] * replicas
    if whole is not None and batch and whole % batch == 0:
        limits = bounds(batch, replicas)
        sizes = [(b - a) * (whole // batch) for a, b in pairwise(limits)]
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
