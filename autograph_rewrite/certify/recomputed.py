"""Rematerialised copies: each is the same op on the same operands, and its readers read the same value as before.

before   c = Tanh(b)                        dc = TanhGrad(c, dd)
after    c = Tanh(b);  c' = Tanh(b) ^dd     dc = TanhGrad(c', dd)        c' is c: same op, attributes and operands

What is offloaded goes through Snapshots, which are what they read. What a loop's gradient takes from a list is what the
loop has put there, of the same iteration, whatever list that is; lists that nobody needs any more may be gone.
"""

from __future__ import annotations

from collections.abc import Mapping

from autograph_rewrite.errors import VerifyError
from autograph_rewrite.ir.attr_inference import ORIGIN_ATTR, PASS_ATTR
from autograph_rewrite.ir.control_flow import frames_of, guards_of
from autograph_rewrite.ir.graph import Graph, Node, Value
from autograph_rewrite.ir.traversal import topological_order
from autograph_rewrite.ir.types.opdefs import get_op

PROVENANCE = frozenset((ORIGIN_ATTR, PASS_ATTR))
PUTS, TAKES = "TensorListPushBack", "TensorListPopBack"
_DOORS = frozenset(("Switch", "Merge", "Enter", "Exit"))
_OF_LISTS = _DOORS | {PUTS, TAKES, "NextIteration", "EmptyTensorList", "Const"}
_FREE = {PUTS: 1, "EmptyTensorList": 0}
"""Operands that may change: what is put into a list, which whoever takes it is asked for, and the shape it may have."""


def check_recomputed(before: Graph, after: Graph) -> None:
    """Compare a graph with what it was before some of it was computed again.

    Raises:
        VerifyError: a node is gone, changed, or reads another value; a copy has an effect, or is of something else.
    """
    origins: dict[str, str] = {}
    moved: dict[str, tuple[str, int]] = {}
    given, taken = put_and_taken(before), put_and_taken(after)
    for node in topological_order(after):
        original = before.nodes.get(node.name)
        if original is None and node.op == "Snapshot":
            moved[node.name] = _read(node.inputs[0], taken, origins, moved)
            continue
        if original is None:
            original = _original(before, node)
            if node.op == "Const" and original.op == "EmptyTensorList":
                continue  # the shape that a list checks its elements for
            origins[node.name] = original.name
        if node.op != original.op or _attrs(node) != _attrs(original) or node.device != original.device:
            raise VerifyError(f"'{node.name}' is not what '{original.name}' is", node=node)
        free = _FREE.get(node.op)
        reads = [_read(value, taken, origins, moved) for i, value in enumerate(node.inputs) if i != free]
        if reads != [_read(value, given, {}, {}) for i, value in enumerate(original.inputs) if i != free]:
            raise VerifyError(f"'{node.name}' does not read what '{original.name}' read", node=node)
    for name, node in before.nodes.items():
        if name not in after.nodes:
            if node.op not in _OF_LISTS:
                raise VerifyError(f"'{name}' is gone")
            continue
        lost = {one.name for one in node.controls} - {one.name for one in after.nodes[name].controls}
        if lost:
            raise VerifyError(f"'{name}' no longer waits for '{min(lost)}'", node=after.nodes[name])


def put_and_taken(graph: Graph) -> dict[Value, Value]:
    """Return, by value that the loop of a gradient takes from a list, the value that was put there in that iteration.

    Once in an iteration one node puts something in, and in the other loop one takes something out, behind the loop's
    condition alone; so all lists of two loops are filled and emptied together.
    """
    order = list(topological_order(graph))
    frames = frames_of(order)
    guards = guards_of(order, frames)
    users: dict[Node, list[Node]] = {}
    for node in order:
        if node.op.startswith("TensorList") and node.inputs and node.inputs[0].node.op in _DOORS:
            users.setdefault(_maker(node.inputs[0]), []).append(node)
    found: dict[Value, Value] = {}
    for maker, both in users.items():
        if maker.op == "EmptyTensorList" and sorted(node.op for node in both) == [TAKES, PUTS]:
            pop, push = sorted(both, key=lambda node: node.op)
            once = all(len(guards.get(node, ())) == 1 and _comes_back(node) for node in both)
            if once and len(frames[push]) == len(frames[pop]) == 1 and frames[push] != frames[pop]:
                found[pop.output(1)] = push.inputs[1]
    return found


def _maker(value: Value) -> Node:
    """Return the node that makes the list which a loop has in its first iteration."""
    while value.node.op in _DOORS:
        value = value.node.inputs[0]
    return value.node


def _comes_back(node: Node) -> bool:
    """Return whether a node changes a list that it has of the iteration before, and hands it to the next one alone."""
    switch = node.inputs[0].node
    merge = switch.inputs[0].node if switch.op == "Switch" else None
    readers = [use.node for use in node.output().uses]
    back = [value.node for value in merge.inputs[1:]] if merge is not None and merge.op == "Merge" else []
    return len(readers) == 1 and readers == back and readers[0].op == "NextIteration"


def _read(
    value: Value, taken: Mapping[Value, Value], origins: Mapping[str, str], moved: Mapping[str, tuple[str, int]]
) -> tuple[str, int]:
    """Return which value of the graph before a value is: of a copy, the original's; of what is moved, what that is."""
    value = taken.get(value, value)
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
    """Return what a node is; what enters a loop as a constant of it is that in any loop, and a list holds any shape."""
    other = {"_output_shapes"} if node.op == TAKES else set()
    other |= {"frame_name"} if node.op == "Enter" and node.attr("is_constant", False) else set()
    return {key: raw for key, raw in node.attrs.items() if key not in PROVENANCE and key not in other}
