"""Update rows of a large table by ops that fetch many rows at a time, instead of one after another.

    before   ResourceSparseApplyAdagrad(w, a, rate, rows, ids)
    after    old = gather(a, ids)   new = old + rows^2                     scatter_update(a, ids, new)
             now = gather(w, ids)   next = now - rate * rows * rsqrt(new)   scatter_update(w, ids, next)

TensorFlow's kernel reads, computes and writes row by row, and waits for memory at each: a row of a table that no cache
holds takes it about a microsecond. A gather fetches rows ahead, and a scatter does not wait for what it writes. The
arithmetic is that of the kernel, in its order, so results have the same bits; a control edge keeps Grappler from
another order. The ids have to be distinct: those that a step looked up, or such of them as lie in one shard.
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
"""Bytes of a table from which on this is worth more ops."""
_TYPES = frozenset((dtypes.FLOAT, dtypes.DOUBLE))
"""Of others, a kernel may compute in a wider type."""
OPERANDS = {"ResourceSparseApplyAdagrad": (2, 3, 4), "ResourceSparseApplyAdagradV2": (2, 4, 5)}
"""Positions of the rate, the rows and their indices, by the ops that can be replaced."""


def _is_fit(node: Node, layout: ReplicaLayout, nbytes: Mapping[str, int]) -> bool:
    """Return whether an update can be made so; sizes of variables are by the name of the node that gives the handle."""
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
    large = nbytes.get(handle.name, _stated_bytes(handle)) >= LARGE
    return on_cpu and large and rows.dtype in _TYPES and _are_distinct(indices)


def _stated_bytes(handle: Node) -> int:
    """Return the bytes of a variable as its own node states them; a shard has no other name."""
    raw = handle.attrs.get("shape") if handle.op == "VarHandleOp" else None
    if isinstance(raw, PerInstance):  # of shards: the first is the largest, or as large as all
        raw = raw.raws[0]
    shape = decode(raw) if raw is not None else None
    sizes = getattr(shape, "dims", shape)
    if not isinstance(sizes, (list, tuple)) or any(size is None or size < 0 for size in sizes):
        return 0
    return math.prod(sizes) * dtypes.width(handle.attr("dtype"))


def _are_distinct(indices: Value) -> bool:
    """Return whether no index is there twice: what `Unique` gave, or those of it that lie in one shard."""
    node = indices.node
    while has(node.op, "rearranges") or _is_shift(node) or _selects(node):
        indices = node.inputs[0]
        node = indices.node
    return has(node.op, "finds_unique") and indices.index == 0


def _is_shift(node: Node) -> bool:
    """Return whether one number is taken from all, or added to all."""
    if node.op not in ("Sub", "AddV2") or node.inputs[1].node.op != "Const":
        return False
    return bool(np.size(node.inputs[1].node.attr("value")) == 1)


def _selects(node: Node) -> bool:
    """Return whether some of the first operand are taken, none of them twice."""
    return node.op == "GatherNd" and node.inputs[1].node.op == "Where"


def _update_by_rows(node: Node) -> None:
    """Replace an update; its node becomes the last of the new ones, so whoever waits for it waits for all."""
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
    kept = add("slot", "ResourceScatterUpdate", slot, indices, new)  # behind the fetches, by what they gave
    become(node, "ResourceScatterUpdate", inputs, {"dtype": rows.dtype, "Tindices": indices.dtype})
    node.selects = {i: select[one] for i, one in enumerate(inputs) if one in select}
    node.add_control(kept)


def _makers(node: Node) -> Iterator[Node]:
    """Yield what makes the operands: rows are fetched no earlier, as a write may come before only one of them."""
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
    """Return whether there are such updates, and no other worker makes its own between a fetch and what is written."""
    return not rewrite.plan.is_asynchronous and any(node.op in OPERANDS for node in rewrite.graph)


UPDATE_ROWS = Pass("update-rows", _update_rows, _updates_rows, needs=(ReplicaLayout,))
