"""Collective ops: who belongs together, and in which order everybody must meet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.opdefs import find_op
from autograph_rewrite.ir.walk import BACK_EDGES, dependencies

KEYS = ("group_size", "group_key", "instance_key")
Symbol = int | str | tuple[Any, ...]
"""A number, the name of a value without its replica, or an op with the symbols of its inputs."""

_INSTANCE = re.compile(r"^replica_\d+/")
_SAME = frozenset(("Identity", "Enter", "Switch"))
# A key may follow from a size: TensorFlow ties one instance key to one shape, and shapes change between steps.
_ARITHMETIC = frozenset(
    ("Add", "AddV2", "Sub", "Mul", "BitwiseAnd", "BitwiseOr", "FloorMod", "Mod", "LeftShift", "Size")
)


@dataclass(frozen=True)
class Collective:
    """The ops that meet: one per device."""

    group_key: int
    instance_key: int | str  # a text where it follows from a size
    group_size: int
    members: tuple[Node, ...]

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"collective (group {self.group_key}, instance {self.instance_key})"


def is_collective(op: str) -> bool:
    """Tell whether an op waits for its peers on other devices."""
    if not op.startswith("Collective"):
        return False
    declared = find_op(op)
    return declared is not None and ("instance_key" in declared.attrs or "instance_key" in _input_names(op))


def keys_of(node: Node) -> tuple[int, int, Symbol] | None:
    """Return group size, group key and instance key; None when nothing about them can be known."""
    names = _input_names(node.op)
    declared = find_op(node.op)
    found: list[Symbol] = []
    for key in KEYS:
        if declared is not None and key in declared.attrs:
            found.append(node.attr(key))
        elif key in names:
            found.append(_symbol(node.inputs[names.index(key)]))
    if len(found) != len(KEYS):
        return None
    size, group, instance = found
    if not isinstance(size, int) or not isinstance(group, int) or not _integers(instance):
        return None
    return size, group, instance


def _input_names(op: str) -> list[str]:
    declared = find_op(op)
    return [arg.name for arg in declared.inputs] if declared is not None else []


def _symbol(value: Value, depth: int = 8) -> Symbol:
    """Return what a key is computed from: a number, an expression, or the name of a value of this replica."""
    node = value.node
    if node.op == "Const":
        try:
            return int(node.attr("value"))
        except (GraphError, TypeError, ValueError):
            return node.name
    if node.op in _SAME and node.inputs:
        return _symbol(node.inputs[0], depth)
    if node.op in _ARITHMETIC and depth:
        return (node.op, *(_symbol(one, depth - 1) for one in node.inputs))
    return _INSTANCE.sub("", value.name)


def _integers(symbol: Symbol) -> list[int]:
    """Return the numbers in an expression; one without any could be anything."""
    if isinstance(symbol, tuple):
        return [number for part in symbol for number in _integers(part)]
    return [symbol] if isinstance(symbol, int) else []


def _readable(symbol: Symbol) -> int | str:
    return symbol if isinstance(symbol, int) else f"{max(_integers(symbol))}+by size"


def collect(nodes: Iterable[Node]) -> tuple[list[Collective], list[Node]]:
    """Return the collectives in order of first appearance, and the nodes whose keys tell nothing."""
    groups: dict[tuple[int, int, Symbol], list[Node]] = {}
    unknown = []
    known: dict[str, bool] = {}
    for node in nodes:
        op = node.op
        if op not in known:
            known[op] = is_collective(op)
        if not known[op]:
            continue
        keys = keys_of(node)
        if keys is None:
            unknown.append(node)
        else:
            groups.setdefault(keys, []).append(node)
    found = [Collective(key, _readable(instance), size, tuple(ns)) for (size, key, instance), ns in groups.items()]
    return found, unknown


def contracted_order(nodes: Iterable[Node], collectives: Iterable[Collective]) -> tuple[list[Node], list[Node]]:
    """Order the nodes as if the members of each collective were one node; back edges of loops do not count.

    Such an order exists exactly when no two devices can wait for each other in different collectives.

    Returns:
        The order, and the nodes that no order can contain: those on a cycle, and behind one.
    """
    members = {node: group.members for group in collectives for node in group.members}
    waiting: dict[Node, int] = {}
    left: dict[Node, int] = {}  # by the first member: how many members still wait
    for node in nodes:
        count = len(node._inputs) + len(node._controls)
        if node.op in ("Merge", "RefMerge"):
            count -= sum(value.node.op in BACK_EDGES for value in node._inputs)
        waiting[node] = count
        if node in members:
            first = members[node][0]
            left[first] = left.get(first, 0) + (count > 0)
    ready = [node for node, count in waiting.items() if not count and node not in members]
    ready += [node for first, count in left.items() if not count for node in members[first]]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        readers = [reader for value in node._outputs for reader, _ in value._uses] if node.op not in BACK_EDGES else []
        for reader in (*readers, *node._control_users):
            count = waiting[reader] - 1
            waiting[reader] = count
            if count:
                continue
            peers = members.get(reader)
            if peers is None:
                ready.append(reader)
                continue
            left[peers[0]] -= 1
            if not left[peers[0]]:
                ready += peers
    done = set(order)
    return order, [node for node in waiting if node not in done]


def deadlock(collectives: Iterable[Collective], stuck: Iterable[Node]) -> list[tuple[Collective, Node, Node]]:
    """Return collectives that wait for each other in a circle.

    Args:
        collectives: all of them.
        stuck: the nodes that `contracted_order` left out.

    Returns:
        For each on the circle: itself, its member that waits, and the member of the next one that it waits for.
    """
    group_of = {node: group for group in collectives for node in group.members}
    nodes = set(stuck)
    waits: dict[Collective, dict[Collective, tuple[Node, Node]]] = {}
    for node in nodes & group_of.keys():
        for other in _behind(node, nodes, group_of):
            waits.setdefault(group_of[node], {}).setdefault(group_of[other], (node, other))
    path: dict[Collective, None] = {}
    group = min(waits, key=lambda g: (g.group_key, str(g.instance_key)), default=None)
    while group is not None and group not in path:
        path[group] = None
        group = next(iter(sorted(waits.get(group, ()), key=lambda g: (g.group_key, str(g.instance_key)))), None)
    if group is None:
        return []
    circle = list(path)[list(path).index(group) :]
    pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
    return [(one, *waits[one][two]) for one, two in pairs]


def _behind(node: Node, within: set[Node], stop: Mapping[Node, Collective]) -> Iterator[Node]:
    """Yield the nearest collectives that `node` depends on."""
    seen = {node}
    stack = [node]
    while stack:
        for producer in dependencies(stack.pop()):
            if producer in seen or producer not in within:
                continue
            seen.add(producer)
            if producer in stop:
                yield producer
            else:
                stack.append(producer)
