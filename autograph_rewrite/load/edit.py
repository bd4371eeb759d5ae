"""Turn a node into another op under its own name, so that whoever names it still finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.opdefs import get_op


def become(node: Node, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any]) -> None:
    """Change op, inputs and attributes of a node; control edges, device and `_x` attributes stay.

    Raw bytes in `attrs` are taken as they are; what the new op does not declare is dropped.
    """
    declared = get_op(op).attrs
    node.op = op
    node.set_inputs(inputs)
    for key in list(node.attrs):
        if key not in declared and not key.startswith("_"):
            node.drop_attr(key)
    for key, value in attrs.items():
        if isinstance(value, bytes) and declared[key].kind != "string":
            node.set_raw_attr(key, value)
        else:
            node.set_attr(key, value)
