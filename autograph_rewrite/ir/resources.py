"""Which variable a handle means, and which ops write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from autograph_rewrite.ir import dtypes
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.opdefs import find_op

VARIABLES = frozenset(("VarHandleOp", "VariableV2", "Variable"))
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
"""Ops that take the contents of a variable, or rows of it, and leave it as it is."""
ANONYMOUS = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # TensorFlow's shared_name for "do not share"

_WRITES = re.compile(
    r"Assign(Add|Sub|)VariableOp|Resource(Sparse)?Apply\w+|ResourceAccumulatorApplyGradient|ResourceCountUpTo"
    r"|ResourceScatter\w+|ResourceStridedSliceAssign"
    # legacy reference variables
    r"|Assign(Add|Sub|)|(Sparse)?Apply(Adam?|Ada\w+|AddSign|CenteredRMSProp|Ftrl\w*|GradientDescent|Momentum|PowerSign"
    r"|Proximal\w+|RMSProp)|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|CountUpTo|StridedSliceAssign"
)
# Ops that hand a handle on, by the input that it comes from.
_PASSES_ON = {
    "Identity": 0, "Switch": 0, "Enter": 0, "Exit": 0, "NextIteration": 0, "Merge": 0, "RefIdentity": 0,
    "RefSwitch": 0, "RefEnter": 0, "RefMerge": 0,
}  # fmt: skip


def writes(op: str) -> bool:
    """Tell whether an op changes a variable."""
    return _WRITES.fullmatch(op) is not None


def is_handle(value: Value) -> bool:
    """Tell whether a value is a variable's handle, or a legacy reference to one."""
    return value.dtype == dtypes.RESOURCE or value.dtype > dtypes.REF_OFFSET


def source(value: Value) -> Node:
    """Return the node that a handle comes from, through what only hands it on."""
    seen = set()
    node = value.node
    while node.op in _PASSES_ON and node not in seen:
        seen.add(node)
        node = node.inputs[_PASSES_ON[node.op]].node
    return node


def written(node: Node) -> Iterator[Node]:
    """Yield the sources of the handles that an updating node writes: variable and slots."""
    op = find_op(node.op)
    if op is None or not writes(node.op):
        return
    for value, dtype in zip(node.inputs, node.input_dtypes, strict=False):
        if dtype == dtypes.RESOURCE or dtype > dtypes.REF_OFFSET:
            yield source(value)


def updates(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes among `nodes` that write each variable, by the source of its handle."""
    found: dict[Node, list[Node]] = {}
    for node in nodes:
        for handle in written(node):
            found.setdefault(handle, []).append(node)
    return found


def storage_key(handle: Node) -> tuple[str, str, str]:
    """Return what decides which storage a handle means; on one device, equal keys are one variable."""
    shared = handle.attr("shared_name") or handle.name.encode()
    if shared == ANONYMOUS:
        return "anonymous", "", handle.name
    kind = "resource" if handle.op == "VarHandleOp" else "reference"
    return kind, handle.attr("container", b"").decode(), shared.decode()
