"""Turn uses of a variable that will be cut into uses of its whole value, which can be gathered from its shards.

    before   w (handle) ──► Enter ──► ReadVariableOp ──► MatMul          a loop only reads it
    after    w (handle) ──► ReadVariableOp ──► Enter ──► Identity ──► MatMul

    before   ResourceStridedSliceAssign(w, 2:4, v)                       an op writes a part of it
    after    AssignVariableOp(w, TensorStridedSliceUpdate(read w, 2:4, v))

The read waits for all that the loop waits for, and for every write of the variable that the loop's reads wait for. So
the blocks are gathered once, and not in each iteration. A loop that writes the variable reads its handle, and then the
variable cannot be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from autograph_rewrite.analysis.variable_uses import WRITE_ELEMENTS, ReadInLoop, reads_in_loops
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import Frame, frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import Shape, record_shapes
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.opdefs import get_op
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, written
from autograph_rewrite.ops.traits import has
from autograph_rewrite.training_graph import TrainingGraph, Variable

GATHERED = "'{}' is gathered for the loop '{}', which reads it whole"


def use_whole(graph: Graph, item: TrainingGraph, names: Collection[str]) -> list[str]:
    """Let the uses of variables that cannot work on pieces work on whole values; return notes on what is gathered."""
    read = read_before_loops(graph, item, names)
    write_whole_values(graph, item, names)
    read_whole_for_elements(graph, item, names)
    return [GATHERED.format(*one) for one in read]


def read_before_loops(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> list[tuple[str, str]]:
    """Read variables before the loops that capture them; return their names, each with that of a loop.

    Args:
        graph: edited; a flat graph.
        names: of the variables that will be cut.
    """
    handles = {name: graph.nodes.get(item.variables[name].handle) for name in names if name in item.variables}
    captured = {name: list(reads_in_loops(node)) for name, node in handles.items() if node is not None}
    found = []
    frames = frames_of(topological_order(graph)) if any(captured.values()) else {}
    for name, loops in captured.items():
        variable = item.variables[name]
        for loop in loops:
            _read_before(loop, frames, variable.shape, dtypes.NUMBERS[variable.dtype])
            found.append((name, frames[loop.enter][0]))
    return found


def _read_before(loop: ReadInLoop, frames: dict[Node, Frame], shape: Shape | None, dtype: int) -> None:
    enter = loop.enter
    earlier = _writes_before(loop, frames)
    awaited = [*enter.controls, *(node for node in earlier if node not in enter.controls)]
    build = Builder.at(enter)
    read = build.op("ReadVariableOp", enter.inputs[0], what="read", controls=awaited, recorded=[shape], dtype=dtype)
    enter.set_input(0, read)
    for carrier in loop.carriers:
        become(carrier, carrier.op, carrier.inputs, {"T": dtype})
        record_shapes(carrier, [shape] * len(carrier.output_dtypes))
    for node in loop.reads:
        become(node, "Identity", node.inputs, {"T": dtype})
    for node in loop.shapes:
        become(node, "Shape", node.inputs, {"T": dtype, "out_type": node.output_dtypes[0]})
    for node in loop.lookups:
        first = _in_loop(enter, np.int32(0))
        attrs = {"Tparams": dtype, "Taxis": dtypes.INT32, "batch_dims": node.attr("batch_dims", 0)}
        become(node, "GatherV2", [*node.inputs, first], attrs)


def _writes_before(loop: ReadInLoop, frames: dict[Node, Frame]) -> list[Node]:
    """Return the writes of the variable, outside of loops, that its reads in the loop wait for."""
    handle = handle_node(loop.enter.inputs[0])
    before = ancestors((*loop.reads, *loop.lookups))
    writes = {use.node for use in handle_uses(handle) if use.node in before and use.node not in frames}
    return sorted((node for node in writes if handle in written(node)), key=lambda node: node.name)


def _in_loop(enter: Node, number: np.int32) -> Value:
    """Return a constant in the loop."""
    build = Builder.at(enter, "axis")
    attrs = {key: enter.attr(key) for key in ("frame_name", "parallel_iterations")}
    return build.op("Enter", build.const(number), what="enter", is_constant=True, **attrs)


def write_whole_values(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> None:
    """Let ops that write some elements of a variable write all of it, with the other elements unchanged.

    Args:
        graph: edited; a flat graph.
        names: of the variables that will be cut.
    """
    for node, variable in _users(graph, item, names):
        if node.op in WRITE_ELEMENTS:
            _write_whole(node, variable.shape, dtypes.NUMBERS[variable.dtype])


def _users(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> Iterator[tuple[Node, Variable]]:
    """Yield the users of variables' handles, each with its variable; the caller may edit them meanwhile."""
    for name in names:
        variable = item.variables[name]
        handle = graph.nodes.get(variable.handle)
        for use in list(handle_uses(handle)) if handle is not None else ():
            yield use.node, variable


def _write_whole(node: Node, shape: Shape | None, dtype: int) -> None:
    handle, *others = node.inputs
    op = WRITE_ELEMENTS[node.op]
    build = Builder.at(node, device=node.device)
    before = build.op("ReadVariableOp", handle, what="before", controls=node.controls, recorded=[shape], dtype=dtype)
    declared = get_op(op).attrs
    alike = {key: node.attr(key) for key in node.attrs if key in declared and declared[key].kind != "type"}
    becomes = build.op(op, before, *others, what="elements", recorded=[shape], **alike)
    become(node, "AssignVariableOp", [handle, becomes], {"dtype": dtype})


def read_whole_for_elements(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> None:
    """Let lookups of anything but numeric rows by their indices read all of a variable.

    Args:
        graph: edited; a flat graph.
        names: of the variables that will be cut.
    """
    for node, variable in _users(graph, item, names):
        if has(node.op, "reads_rows") and not _takes_rows(node):
            _read_whole(node, variable.shape)


def _takes_rows(node: Node) -> bool:
    is_number = node.output_dtypes[0] in dtypes.INEXACT | dtypes.INTEGER
    return is_number and node.op == "ResourceGather" and not node.attr("batch_dims", 0)


def _read_whole(node: Node, shape: Shape | None) -> None:
    handle, ids = node.inputs
    build, dtype = Builder.at(node, device=node.device), node.output_dtypes[0]
    whole = build.op("ReadVariableOp", handle, what="read", controls=node.controls, recorded=[shape], dtype=dtype)
    if node.op == "ResourceGatherNd":
        become(node, "GatherNd", [whole, ids], {"Tparams": dtype})
        return
    first, batch_dims = build.const(np.int32(0)), node.attr("batch_dims", 0)
    become(node, "GatherV2", [whole, ids, first], {"Tparams": dtype, "Taxis": dtypes.INT32, "batch_dims": batch_dims})
