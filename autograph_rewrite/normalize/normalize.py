"""Bring a graph into the normal form for analysis and passes: flat, resource variables, folded shape constants.

    clone ─► flatten (calls, branches, loops) ─► sequential draws ─► XLA's annotations as identities
          ─► no IdentityN ─► barriers of recompute_grad as control edges ─► resource variables
          ─► one handle per variable ─► recomputed copies as segments ─► constants ─► sizes of diagonals left open

Names of outputs, targets and variables stay valid.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autograph_rewrite.diagnostics.progress_line import stage
from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.attr_inference import PASS_ATTR
from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.control_flow import OPENS, frames_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.recorded_shapes import static_shape
from autograph_rewrite.ir.replace_op import become, take_name
from autograph_rewrite.ir.traversal import descendants, topological_order
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.load.inputs import default_axis, describe, is_drawn
from autograph_rewrite.load.sharding_marks import OPEN_DIMS, XLA_SHARDING, read_op_sharding
from autograph_rewrite.load.variables import merge_handles
from autograph_rewrite.normalize.inline import flatten
from autograph_rewrite.normalize.recompute_copies import merge_copies, wait_by_control_edges
from autograph_rewrite.normalize.reference_variables import convert
from autograph_rewrite.ops.rules.marked import OF_EACH, kind_of
from autograph_rewrite.ops.rules.table import TABLE
from autograph_rewrite.ops.traits import ENTERS, has
from autograph_rewrite.training_graph import TensorInfo, TrainingGraph

PASS = "normalise"


def _starts(item: TrainingGraph, graph: Graph) -> list[Node]:
    """Return the nodes that give variables their first values."""
    names = [item.init_op, *(variable.initializer for variable in item.variables.values())]
    return [graph.nodes[name] for name in names if name is not None and name in graph.nodes]


def normalise(item: TrainingGraph) -> TrainingGraph:
    """Return the item in normal form, on a copy of its graph.

    Raises:
        GraphError: a function is missing or recursive, or an op on a reference variable has no resource form.
    """
    stage("normalise (%s nodes)", f"{len(item.graph):,}")
    graph = item.graph.clone()
    graph.current_pass = PASS
    read_outside = {info.tensor.partition(":")[0] for info in item.outputs.values()}
    fetched = read_outside if item.targets or read_outside else graph.nodes
    has_batch = any(info.batch_axis is not None for info in item.inputs.values())
    flatten(graph, roots(item, graph), fetched, starts=_starts(item, graph), loops_over_data=not has_batch)
    run_in_turn(graph)
    forward_annotated(graph)
    named = {*item.targets, *read_outside, *(info.tensor.partition(":")[0] for info in item.inputs.values())}
    separate_identities(graph, named if item.targets or read_outside else graph.nodes)
    declared = [*item.targets, *read_outside]
    barriers = wait_by_control_edges(graph)
    converted = convert(graph, read_outside, declared)
    merge_handles(graph)
    merge_copies(graph, barriers)
    fold(graph, [graph.value(info.tensor) for info in item.inputs.values() if info.batch_axis is not None])
    leave_open(graph)
    graph.current_pass = ""
    variables = {
        name: replace(
            variable,
            handle=converted.handles.get(variable.handle, variable.handle),
            aliases=converted.aliases.get(variable.handle, variable.aliases),
            initializer=converted.updates.get(variable.initializer or "", variable.initializer),
        )
        for name, variable in item.variables.items()
    }
    inputs = {**item.inputs, **_revealed(item, graph)}
    return replace(item, source=graph, variables=variables, inputs=inputs, notes=(*item.notes, *converted.notes))


def normalise_original(item: TrainingGraph) -> TrainingGraph:
    """Return an item in normal form that a rewrite can start from.

    Raises:
        GraphError: as `normalise`, or `item` is no item, is distributed already, or is partitioned by hand.
    """
    if not isinstance(item, TrainingGraph):  # callers may be untyped code
        what = type(item).__name__  # type: ignore[unreachable]
        hint = "GraphItem.from_graph, from_function and from_keras make one; ar.distribute takes models and functions"
        raise GraphError(f"expected a GraphItem, not {what}", hint=hint)
    flat = normalise(item)
    require_original(flat, PASS)
    require_automatic(flat.graph)
    return flat


def roots(item: TrainingGraph, graph: Graph) -> Iterable[Node]:
    """Return the targets and producers of outputs of an item; every node if it declares none."""
    names = [*item.targets, *(info.tensor.partition(":")[0] for info in item.outputs.values())]
    return [graph.node(name) for name in dict.fromkeys(names)] if names else list(graph)


def _revealed(item: TrainingGraph, graph: Graph) -> dict[str, TensorInfo]:
    """Return the outputs of iterators from inlined bodies, with default batch axes unless the item has a batch."""
    has_batch = any(info.batch_axis is not None for info in item.inputs.values())
    known = {info.tensor for info in item.inputs.values()}
    found = {}
    for node in graph:
        for value in node.outputs if is_drawn(node) else ():
            info = describe(value.name, value)
            if info.tensor not in known:
                found[info.name] = info if has_batch else replace(info, batch_axis=default_axis(info))
    return found


# Leave open a size of MatrixDiag that its diagonals imply.
#
#     before   MatrixDiagV3(x[?, 6], k=0, num_rows=6, num_cols=6)
#     after    MatrixDiagV3(x[?, 6], k=0, num_rows=-1, num_cols=6)
#
# The result is the same. If TensorFlow cannot infer the 6 of x, it refuses to import the first form, because the shape
# function compares the stated sizes with an unknown one. In a distributed graph, more shapes are known only in the run.


_IMPLIED = -1


def leave_open(graph: Graph) -> None:
    """Replace a stated number of rows or columns by -1 if the other one is stated and the diagonals imply it."""
    for node in [node for node in graph if node.op in ("MatrixDiagV2", "MatrixDiagV3")]:
        index = _implied(node)
        if index is not None:
            old = node.inputs[index].node
            new = Builder.at(node).node(
                "Const", what="open", controls=old.controls, value=np.array(_IMPLIED, np.int32), dtype=dtypes.INT32
            )
            node.set_input(index, new.output())


def _implied(node: Node) -> int | None:
    """Return the operand, rows or columns, that the length of the longest diagonal implies; None if none does."""
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


# Set `parallel_iterations` to 1 for loops that read a random stream or an input pipeline.
#
#     while (parallel_iterations=32): mask = RandomUniform()      the executor may let a later iteration draw first
#     while (parallel_iterations=1):  mask = RandomUniform()      iteration i takes the i-th draw
#
# Otherwise iterations race for draws, with results that differ from run to run, above all if the loop runs on several
# devices. Enclosing loops become sequential, too, because their iterations start inner loops.


def draws(node: Node) -> bool:
    """Return whether each run of a node takes the next element of a stream."""
    op = find_op(node.op)
    return op is not None and op.is_stateful and has(node.op, "draws")


def run_in_turn(graph: Graph) -> None:
    """Make loops that draw run one iteration at a time, in place."""
    enters = [node for node in graph if node.op in ENTERS]
    drawing = [node for node in graph if draws(node)] if enters else []
    if not drawing:
        return
    frames = frames_of(topological_order(graph))
    held = {frames[node][: depth + 1] for node in drawing if node in frames for depth in range(len(frames[node]))}
    for enter in enters:
        if frames.get(enter) in held:
            enter.set_attr("parallel_iterations", 1)


# Split each IdentityN into one Identity per value, because TensorFlow does the same.
#
#     before   IdentityN(da, db) ──► apply(a, :0), apply(b, :1)         apply(a) seems to wait for db
#     after    Identity(da) ──► apply(a)      Identity(db) ──► apply(b)
#
# Keras' optimizers pass all gradients through one IdentityN. TensorFlow 2.21 first drops control edges that a path
# through the IdentityN implies, and then splits the IdentityN, which breaks the path: an update may overtake a read.


SHAPES = "_output_shapes"


def separate_identities(graph: Graph, declared: Collection[str]) -> None:
    """Replace every IdentityN of several values by an Identity of each; that of the first gets its name.

    Args:
        declared: names that are used outside; an IdentityN with one of them stays, and reads the Identities.
    """
    for node in [node for node in graph if node.op == "IdentityN" and len(node.inputs) > 1]:
        values = [_identity(graph, node, index) for index in range(len(node.inputs))]
        for old, new in zip(node.outputs, values, strict=True):
            old.replace_all_uses_with(new)
        for user in node.control_users:
            user.remove_control(node)
            for value in values:
                user.add_control(value.node)
        if node.name in declared:
            node.set_inputs(values)
        else:
            graph.erase(node)
            take_name(graph, values[0].node, node.name)


def _identity(graph: Graph, node: Node, index: int) -> Value:
    name = f"{node.name}/{index}"
    value = node.inputs[index]
    made = Builder(graph, name, node, device=node.device).node("Identity", value, controls=node.controls)
    shapes = node.attr(SHAPES) or ()
    if index < len(shapes):
        made.set_raw_attr(SHAPES, encode("list(shape)", [shapes[index]]))
    return made.output()


# Replace XLA's sharding ops by identities, their function on one device, with the annotation as an attribute.
#
#     before   x ──► XlaSharding(sharding: tiles [1, 2], unspecified_dims [0]) ──► y
#     after    x ──► Identity(_XlaSharding: tiles [1, 2], _autograph_open_dims [0]) ──► y
#
# `XlaSpmdFullToShardShape` and `XlaSpmdShardToFullShape` begin and end a region whose ops are written for one shard. A
# graph with them is no single-device graph, and TensorFlow has no kernel for them outside of XLA.


def forward_annotated(graph: Graph) -> None:
    """Turn every `XlaSharding` into an `Identity` with its annotation as an attribute."""
    for node in [node for node in graph if node.op == "XlaSharding"]:
        said, unspecified = node.attr("sharding", b""), tuple(node.attr("unspecified_dims", ()))
        node.set_raw_attr(XLA_SHARDING, encode("string", said))
        if unspecified:
            node.set_raw_attr(OPEN_DIMS, encode("list(int)", unspecified))
        become(node, "Identity", node.inputs, {})


def require_automatic(graph: Graph) -> None:
    """Refuse a graph that has parts written for one shard.

    Raises:
        GraphError: there is such a part, or an annotation is malformed.
    """
    for node in graph:
        if node.op in ("XlaSpmdFullToShardShape", "XlaSpmdShardToFullShape"):
            raise GraphError(
                f"{node.op} switches between whole tensors and the shards of a device (manual partitioning)",
                node=node,
                hint="leave auto_to_manual_spmd_partition and its inverse out: ops on whole tensors are cut for you",
            )
        if XLA_SHARDING not in node._attrs:
            continue
        said = node.attr(XLA_SHARDING)
        try:
            is_manual = read_op_sharding(said).is_manual
        except ValueError as error:
            raise GraphError(f"the attribute {XLA_SHARDING} is no OpSharding: {error}", node=node) from None
        if is_manual:
            hint = "annotate it with split, mesh_split or replicate, and let its ops work on whole tensors"
            raise GraphError("the sharding is manual: its ops see the shard of a device", node=node, hint=hint)


# Refuse a graph that is distributed already: the result of a rewrite cannot be rewritten again.
#
# Each replica would hold members of the first rewrite's collectives, which would wait forever for the others.


_COLLECTIVES = ("Collective", "Nccl", "XlaAllReduce")


def require_original(item: TrainingGraph, own_pass: str) -> None:
    """Refuse an item that is no single-device graph.

    Args:
        item: an item in normal form, so that functions are part of its graph.
        own_pass: the pass name of normalisation in the provenance of nodes.

    Raises:
        GraphError: a rewrite made the item, or it has collectives.
    """
    added = (node for node in item.graph if PASS_ATTR in node._attrs)
    made = next((node for node in added if _made_by(node) not in ("", own_pass)), None)
    if made is not None or item.report is not None or item.layout is not None:
        by = f": the pass '{_made_by(made)}' of an earlier rewrite made a node of it" if made is not None else ""
        raise GraphError(
            f"the graph is already distributed{by}",
            node=made,
            hint="rewrite the original graph; one rewrite takes everything (devices, strategy, microbatches, stages)",
        )
    for node in item.graph:
        if node.op.startswith(_COLLECTIVES):
            raise GraphError(
                "the graph is already distributed: it holds a collective, which waits for its other members",
                node=node,
                hint="build the graph for one device, outside of any tf.distribute strategy",
            )


def _made_by(node: Node) -> str:
    """Return the pass that made a node; empty for a node of an original graph."""
    if PASS_ATTR not in node.attrs:
        return ""
    name: bytes = node.attr(PASS_ATTR)
    return name.decode(errors="replace")


# Fold integer arithmetic on constants, so that shapes become Consts that rules can read.
#
# Only integers of up to 64 elements are folded, and only if the result is exact. A folded node keeps its name and
# control edges, and inherits the control edges of its constants, which tie them to a loop or a branch.

MAX_ELEMENTS = 64
Array = np.ndarray[Any, Any]


def fold(graph: Graph, batches: Sequence[Value]) -> None:
    """Replace integer ops with known results by constants, in place.

    Args:
        batches: the batch inputs; shapes of values that depend on them stay ops, because a replica's block has another
            shape, even if the shape of the whole batch is static.
    """
    pending = deque(node for node in graph if _kernel(node) is not None)
    pending.extend(_fold_shapes(graph, batches))
    while pending:
        node = pending.popleft()
        value = _evaluate(node)
        if value is not None:
            pending.extend(_to_constant(node, value))


def _kernel(node: Node) -> Callable[..., Any] | None:
    rule = TABLE.get(node.op)
    return rule.kernel if rule is not None else None


def _evaluate(node: Node) -> Array | None:
    """Return the result of a node; None if it is not known, or not exact."""
    for value in node._inputs:  # this check rejects most nodes; a loop is twice as fast as a generator
        if value.node.op != "Const":
            return None
    kernel = _kernel(node)
    if kernel is None or kind_of(node) == OF_EACH:
        return None
    if len(node.output_dtypes) != 1 or node.output_dtypes[0] not in dtypes.INTEGER:
        return None
    arguments = []
    for value in node.inputs:
        if value.dtype not in dtypes.INTEGER:
            return None
        constant = value.node.attr("value")
        if not isinstance(constant, np.ndarray) or constant.size > MAX_ELEMENTS:
            return None
        arguments.append(constant if constant.dtype == np.uint64 else constant.astype(np.int64))
    try:
        with np.errstate(all="raise"):
            result = kernel(node.attr, arguments)
            if isinstance(result, np.ndarray) and result.dtype.kind == "O":
                result = result.astype(np.int64)
    except (ArithmeticError, ValueError, IndexError, TypeError):
        return None  # TensorFlow reports the error when it runs the node
    if result is None:
        return None
    array = np.asarray(result)
    if array.size > MAX_ELEMENTS or array.dtype.kind not in "iu":
        return None
    typed = array.astype(dtypes.numpy_dtype(node.output_dtypes[0]))
    return typed if np.array_equal(typed, array) else None  # on overflow, the op stays


def _fold_shapes(graph: Graph, batches: Sequence[Value]) -> list[Node]:
    """Replace static shapes of values that depend on no batch and are in no loop or branch; return their readers."""
    known = [(node, value) for node in graph if has(node.op, "folds_to_size") and (value := _known(node)) is not None]
    if not known:
        return []
    moving = descendants((value.node for value in batches), controls=False)
    moving |= descendants(node for node in graph if node.op in OPENS)
    users: list[Node] = []
    for node, value in known:
        if node not in moving:
            users += _to_constant(node, value)
    return users


def _known(node: Node) -> Array | None:
    source = node.inputs[0]
    shape = source.node.attr("shape") if node.op == "VariableShape" else static_shape(source)
    if node.op == "VariableShape" and source.node.op != "VarHandleOp":
        return None
    if shape is None:
        return None
    dtype: Any = dtypes.numpy_dtype(node.output_dtypes[0])
    if node.op == "Rank":
        return np.asarray(len(shape), dtype)
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        return None
    return np.asarray(math.prod(sizes) if node.op == "Size" else sizes, dtype)


def _to_constant(node: Node, value: Array) -> list[Node]:
    """Turn a node into a Const; return its readers, which may be foldable now."""
    for source in node.inputs:
        for control in source.node.controls if source.node.op == "Const" else ():
            node.add_control(control)
    become(node, "Const", (), {"dtype": node.output_dtypes[0], "value": value})
    return [use.node for use in node.output().uses]
