"""A variable that a loop only reads is read once, before it: its blocks are gathered there, not in each iteration.

    before   w (handle) ──► Enter ──► ReadVariableOp ──► MatMul          in the loop
    after    w (handle) ──► ReadVariableOp ──► Enter ──► Identity ──► MatMul

What the loop waits for, the read waits for, and every write of the variable that the loop's reads wait for; what waits
for them waits for their identities. A loop that writes the variable reads its handle, and that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from autograph_rewrite.ir.control_flow import Frame, frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.shapes.recorded import Shape, record_shapes
from autograph_rewrite.ir.traversal import ancestors, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.variable_ops import handle_node, handle_uses, written
from autograph_rewrite.ops.traits import ENTERS, SWITCHES
from autograph_rewrite.training_graph import TrainingGraph

_KINDS = ("ReadVariableOp", "ResourceGather", "VariableShape")
_CARRIERS = ENTERS | SWITCHES | {"Identity"}
GATHERED = "model axis: '{}' is gathered for the loop '{}', which reads it whole"


class Captured(NamedTuple):
    """How a loop reads a variable.

    Attributes:
        enter: where its handle enters.
        carriers: what hands it on in the loop.
        reads: of all of it.
        lookups: of rows of it.
        shapes: what asks for its shape.
    """

    enter: Node
    carriers: tuple[Node, ...]
    reads: tuple[Node, ...]
    lookups: tuple[Node, ...]
    shapes: tuple[Node, ...]


def read_before_loops(graph: Graph, item: TrainingGraph, names: Iterable[str]) -> list[str]:
    """Read variables before the loops that capture them; return a note for each loop.

    Args:
        graph: edited; a flat graph.
        item: whose variables are meant.
        names: of the variables that will be cut.
    """
    handles = {name: graph.nodes.get(item.variables[name].handle) for name in names if name in item.variables}
    captured = {name: list(_captured(node)) for name, node in handles.items() if node is not None}
    notes = []
    frames = frames_of(topological_order(graph)) if any(captured.values()) else {}
    for name, loops in captured.items():
        variable = item.variables[name]
        for loop in loops:
            if loop.enter not in frames or any(len(frames[one]) > 1 for one in loop.lookups):
                continue
            _read_before(graph, loop, frames, variable.shape, dtypes.NUMBERS[variable.dtype])
            notes.append(GATHERED.format(name, frames[loop.enter][0]))
    return notes


def _captured(handle: Node) -> Iterator[Captured]:
    """Yield the outermost entrances of a handle behind which it is only read."""
    for use in list(handle_uses(handle)):
        enter = use.node
        if enter.op not in ENTERS or handle_before(enter) is not handle:
            continue
        carriers = [enter]
        found: dict[str, list[Node]] = {op: [] for op in (*_KINDS, "")}
        for carrier in carriers:
            for value in carrier.read_outputs:
                for node, _ in value.uses:
                    if node.op in _CARRIERS:
                        carriers += [node] * (node not in carriers)
                    else:
                        found[node.op if node.op in _KINDS else ""].append(node)
        if not found[""]:
            yield Captured(enter, tuple(carriers), *(tuple(found[op]) for op in _KINDS))


def handle_before(enter: Node) -> Node | None:
    """Return the node that gives a handle where it enters its outermost loop; None where that is in another loop."""
    node = enter.inputs[0].node
    while node.op == "Identity" and node.inputs:
        node = node.inputs[0].node
    return node if node is handle_node(enter.inputs[0]) else None


def _read_before(graph: Graph, loop: Captured, frames: dict[Node, Frame], shape: Shape | None, dtype: int) -> None:
    enter = loop.enter
    earlier = _writes_before(loop, frames)
    read = graph.add(
        "ReadVariableOp",
        [enter.inputs[0]],
        name=f"{enter.name}/read",
        attrs={"dtype": dtype},
        controls=[*enter.controls, *(node for node in earlier if node not in enter.controls)],
        origin=enter,
    )
    record_shapes(read, [shape])
    enter.set_input(0, read.output())
    for carrier in loop.carriers:
        become(carrier, carrier.op, carrier.inputs, {"T": dtype})
        record_shapes(carrier, [shape] * len(carrier.output_dtypes))
    for node in loop.reads:
        become(node, "Identity", node.inputs, {"T": dtype})
    for node in loop.shapes:
        become(node, "Shape", node.inputs, {"T": dtype, "out_type": node.output_dtypes[0]})
    for node in loop.lookups:
        first = _in_loop(graph, enter, np.int32(0))
        attrs = {"Tparams": dtype, "Taxis": dtypes.INT32, "batch_dims": node.attr("batch_dims", 0)}
        become(node, "GatherV2", [*node.inputs, first], attrs)


def _writes_before(loop: Captured, frames: dict[Node, Frame]) -> list[Node]:
    """Return the writes of the variable, outside of loops, that its reads in the loop wait for."""
    handle = handle_node(loop.enter.inputs[0])
    before = ancestors((*loop.reads, *loop.lookups))
    writes = {use.node for use in handle_uses(handle) if use.node in before and use.node not in frames}
    return sorted((node for node in writes if handle in written(node)), key=lambda node: node.name)


def _in_loop(graph: Graph, enter: Node, number: np.int32) -> Value:
    """Return a constant of the loop."""
    made = graph.add(
        "Const", [], name=f"{enter.name}/axis", attrs={"value": np.asarray(number), "dtype": dtypes.INT32}, origin=enter
    )
    attrs = {key: enter.attr(key) for key in ("frame_name", "parallel_iterations")}
    attrs |= {"T": dtypes.INT32, "is_constant": True}
    return graph.add("Enter", [made.output()], name=f"{enter.name}/axis/enter", attrs=attrs, origin=enter).output()
