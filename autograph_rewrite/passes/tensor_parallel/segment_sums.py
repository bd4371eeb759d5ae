"""Sums of segments, each device of its rows: the dense gradient of a table that is cut by rows.

before   UnsortedSegmentSum(rows, ids, V)
after    UnsortedSegmentSum(rows, ids - begin where they lie in the part, else -1, size of the part)     -1: dropped
"""

from __future__ import annotations

from functools import partial

from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.types import dtypes
from autograph_rewrite.ops.facts.symbolic_dims import unit
from autograph_rewrite.passes.variable_sharding.emitter import Emitter

SEGMENT_SUM = "UnsortedSegmentSum"


def sums_by_rows(emit: Emitter, node: Node) -> list[Node]:
    """Return a sum for each device, of the segments that are its rows.

    The ends are open: a number that is out of range is so on the first or the last device, too.

    Args:
        emit: adds nodes, and knows the size of each part.
    """
    data, ids, count = (emit.whole(value) for value in node.inputs)
    rows, end = unit(emit.shares.facts[node.output()].split_size) or 1, 0
    number = partial(emit.const, dtype=dtypes.numpy_dtype(ids.dtype), near=node)
    copies = []
    for k, size in enumerate(emit.sizes):
        part, local, inside = f"part_{k}", ids, []
        begin, end = end, end + size * rows
        if begin:
            local = emit.add("Sub", [ids, number(begin, what=f"{part}/begin")], node, f"{part}/from")
            inside.append(emit.add("GreaterEqual", [local, number(0, what=f"{part}/zero")], node, f"{part}/behind"))
        if k + 1 < len(emit.sizes):
            limit = number(end - begin, what=f"{part}/end")
            inside.append(emit.add("Less", [local, limit], node, f"{part}/below"))
        mine = inside[0] if len(inside) == 1 else emit.add("LogicalAnd", inside, node, f"{part}/inside")
        local = emit.add("SelectV2", [mine, local, number(-1, what=f"{part}/none")], node, f"{part}/ids")
        many = emit.const(end - begin, dtypes.numpy_dtype(count.dtype), node, f"{part}/rows")
        copies.append(emit.copy(node, k, [data, local, many]))
    return copies
