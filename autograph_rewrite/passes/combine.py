"""Combining the replicas' values into one, in one process and with collectives.

    shared               AddN(all(%dw))                              runs once, on the first device
    mirrored             CollectiveReduceV2(%dw, keys)               runs on every device, same result on all
    shared, processes    CollectiveReduceV2(AddN(all(%dw)), keys)    runs once in every process

Half-precision sums travel as float32. Logical reductions travel as int32, which collectives know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.context import Context
from autograph_rewrite.passes.keys import Keys, collective_attrs
from autograph_rewrite.passes.stores import FOLDS, reduce_at_server
from autograph_rewrite.plan.lowerings import CROSSING, PUSHED
from autograph_rewrite.plan.parts import EdgePlan

NARROW = frozenset((dtypes.HALF, dtypes.BFLOAT16))
COLLECTIVE_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64, dtypes.BFLOAT16))
GATHER_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64))
REAL_PARTS = {dtypes.COMPLEX64: dtypes.FLOAT, dtypes.COMPLEX128: dtypes.DOUBLE}
WIDER = {
    **dict.fromkeys((dtypes.BOOL, dtypes.INT8, dtypes.UINT8, dtypes.INT16, dtypes.UINT16), dtypes.INT32),
    **dict.fromkeys((dtypes.UINT32, dtypes.UINT64), dtypes.INT64),
}
"""A type that collectives know, of which each number stands for one of the type; 64 bits wrap around alike."""
MERGES = {"sum": "Add", "max": "Max", "min": "Min", "prod": "Mul", "all": "Min", "any": "Max"}


def cast(context: Context, value: Value, dtype: int, name: str) -> Value:
    """Return the value in another element type."""
    if value.dtype == dtype:
        return value
    node = context.add("Cast", [value], name=name, span=value.node.span, origin=value.node, attrs={"DstT": dtype})
    return node.output()


def wire_type(dtype: int, op: str) -> int:
    """Return the type in which a value is combined."""
    if op in ("all", "any"):
        return dtypes.INT32
    return dtypes.FLOAT if dtype in NARROW else dtype


def reduce_once(context: Context, value: Value, fact: Fact, edge: EdgePlan | None, keys: Keys) -> Value:
    """Combine partial values on the first device of each process, and then among the processes."""
    op, name = fact.placement.op, value.node.name
    ready = cast(context, value, wire_type(fact.dtype, op), f"{name}/widen")
    total = reduce_local(context, ready, op, name)
    if edge is not None and edge.lowering in CROSSING:
        total = reduce_members(context, total, op, edge, keys, changing=may_change(fact))
    return cast(context, total, fact.dtype, f"{name}/narrow")


def reduce_local(context: Context, ready: Value, op: str, name: str) -> Value:
    """Combine the values of this process's replicas on its first device."""
    if context.local == 1:
        return context.once(ready)

    def once(kind: str, inputs: Sequence[Value], what: str, **attrs: object) -> Value:
        gather = (0,) if attrs else ()
        return context.add(
            kind,
            inputs,
            name=f"{name}/{what}",
            span=Span.ONCE,
            origin=ready.node,
            gather=gather,
            attrs=attrs or None,
        ).output()

    if op == "sum":
        return once("AddN", [ready], "add_n", N=context.local)
    stack = once("Pack", [ready], "pack", N=context.local, axis=0)
    return once(FOLDS[op], [stack, context.const(0, np.int32, name=f"{name}/axis", near=stack)], "fold")


def reduce_collective(context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys) -> Value:
    """Combine partial values on every device with one collective."""
    op, name = fact.placement.op, value.node.name
    wide = cast(context, value, wire_type(fact.dtype, op), f"{name}/widen")
    total = reduce_members(context, wide, op, edge, keys, changing=may_change(fact))
    return cast(context, total, fact.dtype, f"{name}/narrow")


def reduce_members(context: Context, value: Value, op: str, edge: EdgePlan, keys: Keys, *, changing: bool) -> Value:
    """Combine what the members of a collective hold: one per replica, or one per process for a value made once.

    Raises:
        PassError: no collective can combine values of this type.
    """
    name, span = value.node.name, value.node.span
    if edge.lowering in PUSHED:
        return reduce_at_server(context, value, op, edge)
    coded = encode(context, value, op, name)
    ready = flat(context, coded) if changing else coded
    node = context.add(
        "CollectiveReduceV2",
        [ready, *keys(context, edge, ready, changing=changing)],
        name=f"{name}/all_reduce",
        span=span,
        origin=value.node,
        attrs=collective_attrs(context, edge) | {"merge_op": MERGES[op], "final_op": "Id"},
    )
    total = node.output()
    if changing:
        shape = context.add("Shape", [coded], name=f"{name}/shape", span=span, origin=value.node).output()
        total = context.add("Reshape", [total, shape], name=f"{name}/unflat", span=span, origin=value.node).output()
    return decode(context, total, value.dtype, name)


def encode(context: Context, value: Value, op: str, name: str) -> Value:
    """Return a value in a type that collectives know: it can be gathered, and combined by `op`, as what it is.

    Raises:
        PassError: there is no such type.
    """
    if value.dtype in COLLECTIVE_TYPES:
        return value
    if value.dtype in REAL_PARTS and op in ("sum", "gather"):
        attrs = {"type": REAL_PARTS[value.dtype]}
        span, origin = value.node.span, value.node
        return context.add(
            "Bitcast", [value], name=f"{name}/real_parts", span=span, origin=origin, attrs=attrs
        ).output()
    if value.dtype not in WIDER:
        raise PassError(
            f"'{value.name}' is {dtypes.dtype_name(value.dtype)}, which cannot travel between processes ({op})",
            node=value.node,
            hint="convert it to numbers before it has to be whole, or leave it to each process: batch_inputs",
        )
    return cast(context, value, WIDER[value.dtype], f"{name}/wide")


def decode(context: Context, value: Value, dtype: int, name: str) -> Value:
    """Undo `encode`."""
    if dtype in REAL_PARTS:
        return context.add(
            "Bitcast", [value], name=f"{name}/whole", span=value.node.span, origin=value.node, attrs={"type": dtype}
        ).output()
    return cast(context, value, dtype, f"{name}/code")


def rows_at(context: Context, value: Value, which: Value, dim: int, what: str, span: Span) -> Value:
    """Return the rows of a value that a vector of numbers says, along dimension `dim`."""
    name = value.node.name
    axis = context.const(dim, np.int32, name=f"{name}/{what}_axis", near=value)
    inputs = [value, context.bring(which, value), axis]
    return context.add("GatherV2", inputs, name=f"{name}/{what}", span=span, origin=value.node).output()


def rows_between(context: Context, source: Value, name: str, dim: int, limits: tuple[Value, Value]) -> Value:
    """Return the rows of a value between two limits of each block (scalars), along dimension `dim`."""

    def vector(scalar: Value, what: str) -> Value:
        position = np.zeros(dim + 1, np.int32)
        position[dim] = 1
        at = context.const(position, np.int32, name=f"{name}/{what}_at", near=source)
        node = context.add(
            "Mul", [context.bring(scalar, source), at], name=f"{name}/{what}", span=Span.EACH, origin=source.node
        )
        return node.output()

    begin, end = vector(limits[0], "begin"), vector(limits[1], "end")
    step = context.const(np.ones(dim + 1, np.int32), np.int32, name=f"{name}/step", near=source)
    before = (1 << dim) - 1
    node = context.add(
        "StridedSlice",
        [source, begin, end, step],
        name=f"{name}/block",
        span=Span.EACH,
        origin=source.node,
        attrs={"begin_mask": before, "end_mask": before},
    )
    return node.output()


def flat(context: Context, value: Value) -> Value:
    """Return a vector: its length then says everything about its shape (see `Keys`)."""
    line = context.const([-1], np.int32, name=f"{value.node.name}/line", near=value)
    node = context.add(
        "Reshape", [value, line], name=f"{value.node.name}/flat", span=value.node.span, origin=value.node
    )
    return node.output()


def may_change_inside(fact: Fact) -> bool:
    """Return whether another dimension than the split one may differ between steps."""
    dims = fact.shape or (None,)
    return not all(isinstance(dim, int) for i, dim in enumerate(dims) if i != fact.placement.dim)


def may_change(fact: Fact) -> bool:
    """Return whether the shape of one instance may differ between steps."""
    return fact.shape is None or not all(isinstance(dim, int) for dim in fact.shape)


def refuse_container(value: Value, fact: Fact, node: Node) -> None:
    """Refuse to combine what has no elements of its own.

    Raises:
        PassError: the value is a list, a handle or another container.
    """
    if fact.dtype in (dtypes.VARIANT, dtypes.RESOURCE):
        raise PassError(
            f"'{node.name}' needs the whole of '{value.name}', a container whose elements live on different replicas",
            node=node,
            hint="stack the list into a tensor before this op, or name the input that feeds it in batch_inputs as None",
        )
