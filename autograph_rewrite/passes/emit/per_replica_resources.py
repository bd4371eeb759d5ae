"""Replicate resources: every device gets its own copy of each variable.

    before   w = VarHandleOp(shared_name=w)
    after    w @ device 0 (shared_name=w)    replica_1/w @ device 1 (shared_name=replica_1/w)

All copies are assigned the one initial value, since whatever draws it runs once.
"""

from __future__ import annotations

from autograph_rewrite.ir.graph import PerInstance, Span
from autograph_rewrite.ir.replication import prefix
from autograph_rewrite.ir.types.attrs import encode
from autograph_rewrite.passes.base.rewriting import Rewrite

NAMED_RESOURCES = {"VarHandleOp": "shared_name", "StackV2": "stack_name", "TensorArrayV3": "tensor_array_name"}


def name_resources(rewrite: Rewrite) -> None:
    """Make the resource names of instances differ.

    Two handles of one name and container are one variable to TensorFlow, on whichever device they stand.
    """
    for node in rewrite.graph:
        attr = NAMED_RESOURCES.get(node.op)
        if attr is None or node.span is Span.ONCE:
            continue
        own = (node.attr(attr, b"") or b"").decode() or node.name
        micro = rewrite.micro if node.span is Span.EACH else 1
        count = rewrite.mesh.count(node.span)
        names = [own if r == 0 else prefix(r, micro) + own for r in range(count)]
        node.set_raw_attr(attr, PerInstance(tuple(encode("string", name) for name in names)))
