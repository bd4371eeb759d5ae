"""Update rows of a large table by ops that fetch many rows at a time, instead of one after another.

    before   ResourceSparseApplyAdagrad(w, a, rate, rows, ids)
    after    old = gather(a, ids)   new = old + rows^2                     scatter_update(a, ids, new)
             now = gather(w, ids)   next = now - rate * rows * rsqrt(new)   scatter_update(w, ids, next)

TensorFlow's kernel reads, computes and writes row by row, and waits for memory at each: about a microsecond for a row
that no cache holds. A gather fetches rows ahead, and a scatter does not wait for its writes. The arithmetic and its
order are those of the kernel, so results have the same bits; a control edge keeps Grappler from another order. The ids
must be distinct: the unique ids of a step, or those of them in one shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from autograph_rewrite.ir.builder import Builder
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import PerInstance
from autograph_rewrite.ir.replace_op import become
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ir.types.attrs import decode
from autograph_rewrite.ir.types.device_names import parse
from autograph_rewrite.ir.variable_ops import handle_node
from autograph_rewrite.ops.traits import has
from autograph_rewrite.passes.base.pass_manager import Pass
from autograph_rewrite.passes.base.rewriting import Rewrite
from autograph_rewrite.passes.emit.replica_layout import ReplicaLayout

LARGE = 1 << 20
"""The bytes of a table from which on this is faster in spite of more ops."""
_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE))
"""For other types, a kernel may compute in a wider type."""
OPERANDS = {"ResourceSparseApplyAdagrad": (2, 3, 4), "ResourceSparseApplyAdagradV2": (2, 4, 5)}
"""Positions of the rate, the rows and their indices, by the ops that can be replaced."""


def _is_fit(node: Node, layout: ReplicaLayout, nbytes: Mapping[str, int]) -> bool:
    """Return whether an update can be replaced; `nbytes` has the sizes of variables by the names of their handles."""
    if node.attr("use_locking", False) or not node.attr("update_slots", True):
        return False
    if node in layout.order.roots or node in layout.order.sums:
        return False  # it waits for another instance by name
    _, rows, indices = (node.inputs[i] for i in OPERANDS[node.op])
    handle, slot = (handle_node(value) for value in node.inputs[:2])
    if not all(one.op == "VarHandleOp" or one.name in nbytes for one in (handle, slot)):
        return False  # a resource that is no variable of the item has no copy for each replica: the kernel refuses it
    device = node.device or layout.device(node, 0)
    on_cpu = bool(device) and parse(device).kind == "CPU"
    large = (_stated_bytes(handle) or nbytes.get(handle.name, 0)) >= LARGE
    return on_cpu and large and rows.dtype in _TYPES and _are_distinct(indices)


def _stated_bytes(handle: Node) -> int:
    """Return the bytes of a variable, or of one of its shards, as its handle states them; 0 where it does not."""
    raw = handle.attrs.get("shape") if handle.op == "VarHandleOp" else None
    if isinstance(raw, PerInstance):  # of shards: the first is the largest, or as large as all
        raw = raw.raws[0]
    shape = decode(raw) if raw is not None else None
    sizes = getattr(shape, "dims", shape)
    if not isinstance(sizes, (list, tuple)) or any(size is None or size < 0 for size in sizes):
        return 0
    return math.prod(sizes) * dtypes.width(handle.attr("dtype"))


def _are_distinct(indices: Value) -> bool:
    """Return whether indices are distinct: the result of `Unique`, or those of it that are in one shard."""
    node = indices.node
    while has(node.op, "rearranges") or _is_shift(node) or _selects(node) or _widens(node):
        indices = node.inputs[0]
        node = indices.node
    return has(node.op, "finds_unique") and indices.index == 0


def _is_shift(node: Node) -> bool:
    """Return whether a node adds one number to all elements, or subtracts it; replicas may have numbers of theirs."""
    if node.op not in ("Sub", "AddV2") or node.inputs[1].node.op != "Const":
        return False
    number = node.inputs[1].node.attr("value")
    return all(np.size(one) == 1 for one in (number if isinstance(number, tuple) else (number,)))


def _widens(node: Node) -> bool:
    """Return whether a node makes int64 of integers."""
    return node.op == "Cast" and node.attr("DstT") == dtypes.INT64 and node.attr("SrcT") == dtypes.INT32


def _selects(node: Node) -> bool:
    """Return whether a node takes elements of its first operand, none of them twice."""
    if node.op not in ("GatherNd", "GatherV2"):
        return False
    places = node.inputs[1].node
    return (places.inputs[0].node if places.op == "Squeeze" else places).op == "Where"


def _update_by_rows(node: Node) -> None:
    """Replace an update; its node becomes the last of the new ones, so nodes that wait for it wait for all."""
    rate, rows, indices = (node.inputs[i] for i in OPERANDS[node.op])
    table, slot = node.inputs[:2]
    waits = list(dict.fromkeys((*node.controls, *_makers(node))))
    select = {node.inputs[at]: which for at, which in node.selects.items()}

    build = Builder(node.graph, node.name, node, node.span, node.device, place=node.place)

    def add(what: str, op: str, *inputs: Value, controls: Iterable[Node] = (), **attrs: Any) -> Node:
        selects = {i: select[one] for i, one in enumerate(inputs) if one in select}
        made = {one.node for one in inputs}
        controls = [control for control in controls if control not in made]
        return build.node(op, *inputs, what=what, controls=controls, selects=selects, **attrs)

    def value(what: str, op: str, *inputs: Value, **how: Any) -> Value:
        return add(what, op, *inputs, **how).output()

    old = value("old", "ResourceGather", slot, indices, controls=waits, dtype=rows.dtype)
    now = value("now", "ResourceGather", table, indices, controls=waits, dtype=rows.dtype)
    new = value("new", "AddV2", old, value("square", "Square", rows))
    scaled = value("scaled", "Mul", rate, rows, controls=[old.node])  # else Grappler multiplies in another order
    if node.op == "ResourceSparseApplyAdagrad":
        change = value("change", "Mul", scaled, value("rsqrt", "Rsqrt", new))
    else:
        divisor = value("divisor", "AddV2", value("sqrt", "Sqrt", new), node.inputs[3])
        change = value("change", "RealDiv", scaled, divisor)
    inputs = (table, indices, value("next", "Sub", now, change))
    kept = add("slot", "ResourceScatterUpdate", slot, indices, new)  # `new` makes it wait for the fetch
    become(node, "ResourceScatterUpdate", inputs, {"dtype": rows.dtype, "Tindices": indices.dtype})
    node.selects = {i: select[one] for i, one in enumerate(inputs) if one in select}
    node.add_control(kept)


def _makers(node: Node) -> Iterator[Node]:
    """Yield the producers of the operands: rows are fetched after all of them, as a write may precede only one."""
    for value in node.inputs:
        if value.dtype != dtypes.RESOURCE and value.node.op != "Const":
            yield value.node


def _update_rows(rewrite: Rewrite) -> None:
    """Update rows of large tables on CPUs by ops that fetch many rows at a time."""
    nbytes = {variable.handle: variable.nbytes for variable in rewrite.item.variables.values()}
    layout = rewrite.get(ReplicaLayout)
    for node in [one for one in rewrite.graph if one.op in OPERANDS and _is_fit(one, layout, nbytes)]:
        _update_by_rows(node)


def _updates_rows(rewrite: Rewrite) -> bool:
    """Return whether there are these updates, and no other worker can update between a fetch and its write."""
    return not rewrite.plan.is_asynchronous and any(node.op in OPERANDS for node in rewrite.graph)


UPDATE_ROWS = Pass("update-rows", _update_rows, _updates_rows, needs=(ReplicaLayout,))
