"""Replace shapes of a static batch in attributes by the shapes of blocks.

    before   TensorArrayV3  element_shape=[6, 3]               each, but a replica writes elements of its block
    after    TensorArrayV3  element_shape=[2, 3] | [2, 3] | [2, 3]

A tensor array refuses elements of another shape, and returns zeros of this shape for an element that was not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autograph_rewrite.analysis.list_elements import SHAPES_OF_ELEMENTS, split_dimension
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.mesh import EACH
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import Shape, encode
from autograph_rewrite.ops.rules.marked import PINNED, kind_of
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Homes, Rewrite
from autograph_rewrite.plan.parts.batch_split import limits


def _localize_shapes(rewrite: Rewrite) -> None:
    """State the shapes of blocks in the attributes of tensor arrays and lists."""
    if rewrite.processes > 1 and rewrite.state.semantics.extent.units is not None:
        _state_part_shapes(rewrite)
    for node in rewrite.state.order:
        if node.op in ("EmptyTensorList", "TensorListReserve") and node.output() in rewrite.future_splits:
            _state_list_shape(rewrite, node)
        if node.span != EACH or node.op not in SHAPES_OF_ELEMENTS:
            continue
        name, left_out = SHAPES_OF_ELEMENTS[node.op]
        stated, dim = node.attr(name), split_dimension(rewrite.state, node)
        if stated is None or dim is None or not left_out <= dim < left_out + len(stated):
            continue
        batch, parts = rewrite.state.semantics.extent.units, (rewrite.replicas, rewrite.processes)
        shapes = shapes_of_blocks(stated, dim - left_out, batch, *parts)
        node.set_raw_attr(name, rewrite.each([encode("shape", shape) for shape in rewrite.own(shapes)]))


def _state_part_shapes(rewrite: Rewrite) -> None:
    """State the size of this process's part, instead of the whole batch, in the shapes of batch inputs.

    Raises:
        PassError: the input is no placeholder, so it cannot be fed a part.
    """
    batch = rewrite.state.semantics.extent.units
    assert batch is not None
    ends = limits(batch, rewrite.processes, 1)
    own = ends[rewrite.task + 1] - ends[rewrite.task]
    for value, axis in rewrite.state.whole_inputs.items():
        node = value.node
        if kind_of(node) == PINNED:  # `slice-batch-inputs` has cut it to this process's rows
            continue
        if node.op != "Placeholder":
            raise PassError(
                f"'{node.name}' gives batches of {batch} examples, of which every process would need a part",
                node=node,
                hint="leave the size of its batches open (drop_remainder=False), so that each process's is its part",
            )
        stated = node.attr("shape", None)
        if stated is not None and len(stated) > axis:
            node.set_attr("shape", (*stated[:axis], own, *stated[axis + 1 :]))


def _state_list_shape(rewrite: Rewrite, node: Node) -> None:
    """State the shape of its blocks for each replica's list, if the graph states a shape."""
    operand = node.inputs[0]
    stated, dim = rewrite.state.facts[operand].value, rewrite.future_splits[node.output()]
    if stated is None or rewrite.state.facts[operand].shape == () or not all(isinstance(d, int) for d in stated):
        return
    shape = [d if isinstance(d, int) and d >= 0 else None for d in stated]
    if dim >= len(shape):
        return
    blocks = shapes_of_blocks(shape, dim, rewrite.state.semantics.extent.units, rewrite.replicas, rewrite.processes)
    contents = [[-1 if size is None else size for size in block] for block in blocks]
    dtype = dtypes.numpy_dtype(operand.dtype)
    node.set_input(0, rewrite.const_each(contents, dtype, name=f"{node.name}/block_shape", near=operand))


def shapes_of_blocks(
    shape: Sequence[int | None], dim: int, batch: int | None, replicas: int, processes: int = 1
) -> list[Shape]:
    """Return the shape of each replica's block of a value of shape `shape`.

    Args:
        shape: of the whole value, as the graph states it.
        dim: the dimension that is cut.
        batch: number of examples; None if it is not static.
        processes: the batch is divided among them first, then among the replicas of each.
    """
    whole = shape[dim]
    sizes: Sequence[int | None] = [None] * replicas
    if whole is not None and batch and whole % batch == 0:
        ends = limits(batch, processes, replicas // processes)
        sizes = [(b - a) * (whole // batch) for a, b in pairwise(ends)]
    return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]


LOCALIZE_SHAPES = Pass("localize-shapes", _localize_shapes, needs=(Homes,))
