"""Combining the replicas' values into one, in one process and with collectives.

    shared     AddN(all(%dw))                     runs once, on the first device
    mirrored   CollectiveReduceV2(%dw, keys)      runs on every device, same result on all

Half-precision sums travel as float32. Logical reductions travel as int32, which collectives know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autograph_rewrite.analysis.fact import Fact
from autograph_rewrite.errors import PassError
from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Span, Value
from autograph_rewrite.passes.blocks import Blocks
from autograph_rewrite.passes.context import Context
from autograph_rewrite.plan.devices import parse
from autograph_rewrite.plan.parts import EdgePlan

NARROW = frozenset((dtypes.HALF, dtypes.BFLOAT16))
COLLECTIVE_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64, dtypes.BFLOAT16))
GATHER_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF, dtypes.INT32, dtypes.INT64))
FOLDS = {"max": "Max", "min": "Min", "prod": "Prod", "all": "Min", "any": "Max"}
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


def reduce_once(context: Context, value: Value, fact: Fact) -> Value:
    """Combine partial values on the first device."""
    op, name = fact.placement.op, value.node.name
    ready = cast(context, value, wire_type(fact.dtype, op), f"{name}/widen")
    if op == "sum":
        total = context.add(
            "AddN",
            [ready],
            name=f"{name}/add_n",
            span=Span.ONCE,
            origin=value.node,
            gather=(0,),
            attrs={"N": context.replicas},
        ).output()
    else:
        stack = context.add(
            "Pack",
            [ready],
            name=f"{name}/pack",
            span=Span.ONCE,
            origin=value.node,
            gather=(0,),
            attrs={"N": context.replicas, "axis": 0},
        ).output()
        axis = context.const(0, np.int32, name=f"{name}/axis", near=stack)
        total = context.add(FOLDS[op], [stack, axis], name=f"{name}/fold", span=Span.ONCE, origin=value.node).output()
    return cast(context, total, fact.dtype, f"{name}/narrow")


def reduce_collective(context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys) -> Value:
    """Combine partial values on every device with one collective."""
    op, name = fact.placement.op, value.node.name
    wide = cast(context, value, wire_type(fact.dtype, op), f"{name}/widen")
    changing = may_change(fact)
    ready = _flat(context, wide) if changing else wide
    node = context.add(
        "CollectiveReduceV2",
        [ready, *keys(context, edge, ready, changing=changing)],
        name=f"{name}/all_reduce",
        span=Span.EACH,
        origin=value.node,
        attrs=collective_attrs(context, edge) | {"merge_op": MERGES[op], "final_op": "Id"},
    )
    total = node.output()
    if changing:
        shape = context.add("Shape", [wide], name=f"{name}/shape", span=Span.EACH, origin=value.node).output()
        total = context.add(
            "Reshape", [total, shape], name=f"{name}/unflat", span=Span.EACH, origin=value.node
        ).output()
    return cast(context, total, fact.dtype, f"{name}/narrow")


def _flat(context: Context, value: Value) -> Value:
    """Return a vector: its length then says everything about its shape (see `Keys`)."""
    line = context.const([-1], np.int32, name=f"{value.node.name}/line", near=value)
    node = context.add("Reshape", [value, line], name=f"{value.node.name}/flat", span=Span.EACH, origin=value.node)
    return node.output()


def collective_attrs(context: Context, edge: EdgePlan) -> dict[str, object]:
    """Return the attributes that all collectives share.

    `timeout_seconds` stays 0: TensorFlow starts one sleeping thread per execution for any other value, and thousands
    of them pile up within seconds. The runtime watches the step instead.
    """
    hint = context.plan.options_of(edge.owner).hint
    return {"communication_hint": hint, "timeout_seconds": 0.0}


def may_change_inside(fact: Fact) -> bool:
    """Return whether another dimension than the split one may differ between steps."""
    dims = fact.shape or (None,)
    return not all(isinstance(dim, int) for i, dim in enumerate(dims) if i != fact.placement.dim)


class Keys:
    """The key operands of collectives; constants are shared between the collectives of one loop.

    TensorFlow remembers the shape of each instance key, and refuses another one for ever. A collective whose shape may
    change from step to step therefore gets a key of its own per size: the upper half of all keys is divided into
    `2^bits` interleaved rows, one per such collective, so that no two ever meet.
    """

    def __init__(self, context: Context) -> None:
        edges = [edge for edge in context.edges.values() if edge.is_collective]
        ordered = sorted({edge.instance_key for edge in edges})
        self._row = {key: row for row, key in enumerate(ordered)}
        self._bits = max(1, (len(ordered) - 1).bit_length())
        self._cache: dict[tuple[str, int, tuple[str, ...]], Value] = {}

    def __call__(self, context: Context, edge: EdgePlan, near: Value, *, changing: bool) -> list[Value]:
        """Return group size, group key and instance key for a collective of `near`.

        Args:
            context: the rewrite.
            edge: the plan's edge.
            near: the tensor that is sent.
            changing: whether its shape may differ between steps.
        """
        size = self._number(context, "size", context.replicas, near)
        group = self._number(context, "group", edge.group_key, near)
        if not changing:
            return [size, group, self._number(context, "instance", edge.instance_key, near)]
        return [size, group, self._key_of_size(context, self._row[edge.instance_key], near)]

    def _number(self, context: Context, what: str, number: int, near: Value) -> Value:
        key = (what, number, context.frames.get(near.node, ()))
        if key not in self._cache:
            self._cache[key] = context.const(number, np.int32, name=f"autograph_keys/{what}_{number}", near=near)
        return self._cache[key]

    def _key_of_size(self, context: Context, row: int, near: Value) -> Value:
        def add(op: str, inputs: list[Value], what: str) -> Value:
            name = f"{near.node.name}/key/{what}"
            return context.add(op, inputs, name=name, span=Span.EACH, origin=near.node).output()

        size = add("Size", [near], "size")
        bounded = add("BitwiseAnd", [size, self._number(context, "mask", 2 ** (30 - self._bits) - 1, near)], "bounded")
        spread = add("Mul", [bounded, self._number(context, "rows", 2**self._bits, near)], "spread")
        return add("AddV2", [spread, self._number(context, "row", 2**30 + row, near)], "instance")


def may_change(fact: Fact) -> bool:
    """Return whether the shape of one instance may differ between steps."""
    return fact.shape is None or not all(isinstance(dim, int) for dim in fact.shape)


def gather_once(context: Context, value: Value, dim: int) -> Value:
    """Concatenate the blocks on the first device."""
    name = value.node.name
    axis = context.const(dim, np.int32, name=f"{name}/axis", near=value)
    node = context.add(
        "ConcatV2",
        [value, axis],
        name=f"{name}/concat",
        span=Span.ONCE,
        origin=value.node,
        gather=(0,),
        attrs={"N": context.replicas},
    )
    return node.output()


def can_gather_collectively(fact: Fact, per_example: int | None, devices: Sequence[str]) -> bool:
    """Return whether CollectiveGatherV2 can carry the value; it puts its members in the order of the devices."""
    parsed = [parse(device) for device in devices]
    ordered = [(d.job or "", d.task, d.kind, d.index) for d in parsed]
    if ordered != sorted(ordered):
        return False
    return fact.dtype in GATHER_TYPES and fact.placement.dim == 0 and per_example is not None and fact.rank is not None


def gather_collective(
    context: Context, value: Value, fact: Fact, edge: EdgePlan, keys: Keys, blocks: Blocks, per_example: int
) -> Value:
    """Gather blocks of rows with one collective; unequal blocks are padded to the longest and cut again.

    CollectiveGatherV2 needs the same shape on all devices.
    """
    name, rank = value.node.name, fact.rank or 0

    def add(op: str, inputs: list[Value], what: str, **attrs: object) -> Value:
        node = context.add(
            op, inputs, name=f"{name}/gather/{what}", span=Span.EACH, origin=value.node, attrs=attrs or None
        )
        return node.output()

    def const(content: object, what: str) -> Value:
        return context.const(content, np.int32, name=f"{name}/gather/{what}", near=value)

    even = blocks.static is not None and blocks.static % context.replicas == 0
    ready = value
    if not even:
        one = const(1, "one")
        count = const(context.replicas, "replicas")
        batch, begin, end = (context.bring(blocks.rows(w, 1), value) for w in ("batch", "begin", "end"))
        most = add("FloorDiv", [add("Sub", [add("AddV2", [batch, count], "more"), one], "less"), count], "longest")
        unit = const(per_example, "unit")
        missing = add("Mul", [add("Sub", [most, add("Sub", [end, begin], "mine")], "short"), unit], "missing")
        corner = np.zeros((rank, 2), np.int32)
        corner[0, 1] = 1
        ready = add("Pad", [value, add("Mul", [missing, const(corner, "after")], "padding")], "pad")
    changing = blocks.static is None or may_change_inside(fact)
    sent = _flat(context, ready) if changing and rank > 1 else ready
    gathered = add(
        "CollectiveGatherV2",
        [sent, *keys(context, edge, sent, changing=changing)],
        "all_gather",
        **collective_attrs(context, edge),
    )
    if sent is not ready:
        whole_shape = add("Mul", [add("Shape", [ready], "shape"), _times_replicas(context, value, rank)], "whole_shape")
        gathered = add("Reshape", [gathered, whole_shape], "unflat")
    if even:
        return gathered
    # Row i of block r lies at r * most * unit + i in the padded result; keep those with i < length of block r.
    quotient = add("FloorDiv", [batch, count], "quotient")
    extra = add("FloorMod", [batch, count], "extra")
    ranks = const(np.arange(context.replicas), "ranks")
    longer = add("Cast", [add("Less", [ranks, extra], "is_longer")], "longer", DstT=dtypes.INT32)
    lengths = add("Mul", [add("AddV2", [quotient, longer], "examples"), unit], "lengths")
    zero = const(0, "zero")
    places = add("Range", [zero, add("Mul", [most, unit], "stride"), one], "places")
    mask = add("Less", [places, add("ExpandDims", [lengths, const(1, "column")], "limits")], "mask")
    flat = add("Reshape", [mask, const([-1], "flat")], "flat_mask")
    kept = add("Reshape", [add("Where", [flat], "where"), const([-1], "line")], "kept")
    return add("GatherV2", [gathered, kept, zero], "rows", batch_dims=0)


def _times_replicas(context: Context, value: Value, rank: int) -> Value:
    factors = [context.replicas] + [1] * (rank - 1)
    return context.const(factors, np.int32, name=f"{value.node.name}/gather/times", near=value)


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
