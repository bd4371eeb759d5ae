"""State in attributes the shapes that blocks have, where the graph states those of a batch of static size.

    before   TensorArrayV3  element_shape=[6, 3]               each, but a replica writes elements of its block
    after    TensorArrayV3  element_shape=[2, 3] | [2, 3] | [2, 3]

A tensor array refuses elements of another shape, and makes the zeros of an element that nobody wrote from it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Restate the element shapes of arrays that hold blocks."""
    for node in context.state.order:
        if node.span is not Span.EACH or node.op not in SHAPES_OF_ELEMENTS:
            continue
        name, left_out = SHAPES_OF_ELEMENTS[node.op]
        stated, dim = node.attr(name), _split_dimension(context, node)
        if stated is None or dim is None or not left_out <= dim < left_out + len(stated):
            continue
        shapes = shapes_of_blocks(stated, dim - left_out, context.state.semantics.batch, context.replicas)
        node.set_raw_attr(name, PerInstance(tuple(encode("shape", shape) for shape in shapes)))


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
        sizes = [(b - a) * (whole // batch) for a, b in zip(limits, limits[1:], strict=False)]
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
