"""Rematerialised copies: each is the same op on the same operands, and its readers read the same value as before.

before   c = Tanh(b)                        dc = TanhGrad(c, dd)
after    c = Tanh(b);  c' = Tanh(b) ^dd     dc = TanhGrad(c', dd)        c' is c: same op, attributes and operands

What is offloaded goes through Snapshots, which are what they read.
"""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR, PASS_ATTR
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types.opdefs import get_op

PROVENANCE = frozenset((ORIGIN_ATTR, PASS_ATTR))


def check_recomputed(before: Graph, after: Graph) -> None:
    """Compare a graph with what it was before some of it was computed again.

    Raises:
        VerifyError: a node is gone, changed, or reads another value; a copy has an effect, or is of something else.
    """
    origins: dict[str, str] = {}
    moved: dict[str, tuple[str, int]] = {}
    for node in topological_order(after):
        original = before.nodes.get(node.name)
        if original is None and node.op == "Snapshot":
            moved[node.name] = _read(node.inputs[0], origins, moved)
            continue
        if original is None:
            original = _original(before, node)
            origins[node.name] = original.name
        if node.op != original.op or _attrs(node) != _attrs(original) or node.device != original.device:
            raise VerifyError(f"'{node.name}' is not what '{original.name}' is", node=node)
        reads = [_read(value, origins, moved) for value in node.inputs]
        if reads != [(value.node.name, value.index) for value in original.inputs]:
            raise VerifyError(f"'{node.name}' does not read what '{original.name}' read", node=node)
    gone = [name for name in before.nodes if name not in after.nodes]
    if gone:
        raise VerifyError(f"'{gone[0]}' is gone")
    for name, node in before.nodes.items():
        lost = {one.name for one in node.controls} - {one.name for one in after.nodes[name].controls}
        if lost:
            raise VerifyError(f"'{name}' no longer waits for '{min(lost)}'", node=after.nodes[name])


def _read(value: Value, origins: Mapping[str, str], moved: Mapping[str, tuple[str, int]]) -> tuple[str, int]:
    """Return which value of the graph before a value is: of a copy, the original's; of what is moved, what that is."""
    name = value.node.name
    return moved.get(name, (origins.get(name, name), value.index))


def _original(before: Graph, copy: Node) -> Node:
    """Return the node that a copy is of.

    Raises:
        VerifyError: there is none, or it has an effect.
    """
    name = copy.attr(ORIGIN_ATTR, b"").decode()
    original = before.nodes.get(name) or before.nodes.get(_copied_name(copy))
    if original is None:
        raise VerifyError(f"'{copy.name}' is a copy of nothing", node=copy)
    if get_op(copy.op).is_stateful:
        raise VerifyError(f"'{copy.name}' ({copy.op}) has a state or an effect, and runs a second time", node=copy)
    return original


def _copied_name(copy: Node) -> str:
    """Return the name of what a copy is of, which another pass may have made: `remat/<segment>/<name>`."""
    return copy.name.split("/", 2)[-1]


def _attrs(node: Node) -> dict[str, object]:
    return {key: raw for key, raw in node.attrs.items() if key not in PROVENANCE}
