"""Groups ops into collectives by their keys, and finds an order in which all ranks can run them.

Nodes may come from the graphs of several processes; names in keys are compared without their replica.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autograph_rewrite.errors import GraphError
from autograph_rewrite.ir.graph import Node, Value
from autograph_rewrite.ir.mesh import common_name
from autograph_rewrite.ir.traversal import dependencies, last_iteration, traced_back
from autograph_rewrite.ir.types.opdefs import find_op
from autograph_rewrite.ops.traits import BACK_EDGES, EXITS, MERGES, has

KEYS = ("group_size", "group_key", "instance_key")
GROUP_KEY = 2
"""Index of the operand with the group key, in the collectives that the package makes."""
Symbol = int | str | tuple[Any, ...]
"""A number, the name of a value without its replica, or an op with the symbols of its inputs."""

SENT = "what is sent"
"""In a key, the value that the member itself sends."""
# Keys may be computed from sizes: TensorFlow ties one instance key to one shape, and shapes change between steps.
_ARITHMETIC = frozenset(
    ("Add", "AddV2", "Sub", "Mul", "BitwiseAnd", "BitwiseOr", "FloorMod", "Mod", "LeftShift", "Size")
)


class KeyRange(NamedTuple):
    """The numbers that a key can be: `low`, `low + step`, ... up to `high`."""

    low: int
    step: int
    high: float

    def meets(self, other: KeyRange) -> bool:
        """Return whether both ranges can contain one number."""
        apart = self.high < other.low or other.high < self.low
        return not apart and (self.low - other.low) % (math.gcd(self.step, other.step) or math.inf) == 0


@dataclass(frozen=True)
class Collective:
    """The ops that meet: one per device."""

    group_key: int
    instance_key: int | str  # a text where it is computed from a size
    group_size: int  # as most of its members state it
    members: tuple[Node, ...]
    symbol: Symbol = 0  # the expression of the instance key

    @property
    def name(self) -> str:
        """Its label in messages."""
        return f"collective (group {self.group_key}, instance {self.instance_key})"


def is_collective(op: str) -> bool:
    """Tell whether an op waits for its peers on other devices."""
    if not op.startswith("Collective"):
        return False
    declared = find_op(op)
    return declared is not None and ("instance_key" in declared.attrs or "instance_key" in input_names(op))


def keys_of(node: Node) -> tuple[int, int, Symbol] | None:
    """Return group size, group key and instance key; None where they are not computed from constants."""
    names = input_names(node.op)
    declared = find_op(node.op)
    found: list[Symbol] = []
    for key in KEYS:
        if declared is not None and key in declared.attrs:
            found.append(node.attr(key))
        elif key in names:
            found.append(_symbol(node.inputs[names.index(key)], sent_by(node)))
    if len(found) != len(KEYS):
        return None
    size, group, instance = found
    if not isinstance(size, int) or not isinstance(group, int) or not _integers(instance):
        return None
    return size, group, instance


def input_names(op: str) -> list[str]:
    """Return the names of the inputs in an op's definition."""
    declared = find_op(op)
    return [arg.name for arg in declared.inputs] if declared is not None else []


def sent_by(node: Node) -> Value | None:
    """Return the value that a member sends, followed back through Identities; None where it only receives."""
    if "input" not in input_names(node.op)[:1] or not node.inputs:
        return None
    return traced_back(node.inputs[0], ("Identity",))


def _symbol(value: Value, sent: Value | None, depth: int = 8) -> Symbol:
    """Return the symbol of a key: a number, an expression, or the name of a value without its replica."""
    node = value.node
    if node.op == "Const":
        try:
            return int(node.attr("value"))
        except (GraphError, TypeError, ValueError):
            return node.name
    if has(node.op, "carries") and node.inputs:
        return _symbol(node.inputs[0], sent, depth)
    if node.op == "Size" and sent is not None and traced_back(node.inputs[0], ("Identity",)) is sent:
        return (node.op, SENT)
    if node.op in _ARITHMETIC and depth:
        return (node.op, *(_symbol(one, sent, depth - 1) for one in node.inputs))
    return common_name(value.name)


def _integers(symbol: Symbol) -> list[int]:
    """Return the numbers in an expression; nothing is known of a key that has none."""
    if isinstance(symbol, tuple):
        return [number for part in symbol for number in _integers(part)]
    return [symbol] if isinstance(symbol, int) else []


def _readable(symbol: Symbol) -> int | str:
    return symbol if isinstance(symbol, int) else f"{max(_integers(symbol))}+by size"


def collect(nodes: Iterable[Node]) -> tuple[list[Collective], list[Node]]:
    """Return the collectives in order of first appearance, and the collective ops whose keys are unknown."""
    groups: dict[tuple[int, Symbol], list[tuple[Node, int]]] = {}
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
            groups.setdefault(keys[1:], []).append((node, keys[0]))
    found = []
    for (key, instance), members in groups.items():
        size = Counter(size for _, size in members).most_common(1)[0][0]
        found.append(Collective(key, _readable(instance), size, tuple(node for node, _ in members), instance))
    return found, unknown


def names_in(symbol: Symbol) -> list[str]:
    """Return the names of the values that a key is computed from."""
    if isinstance(symbol, tuple):
        return [name for part in symbol[1:] for name in names_in(part)]
    return [symbol] if isinstance(symbol, str) else []


def key_range(symbol: Symbol) -> KeyRange:
    """Return the range of an instance key."""
    if isinstance(symbol, int):
        return KeyRange(symbol, 0, symbol)
    parts = [key_range(part) for part in symbol[1:]] if isinstance(symbol, tuple) else []
    fixed = [part for part in parts if not part.step]
    other = next((part for part in parts if part.step), None)
    if len(parts) == 2 and not other:
        other = fixed.pop()
    if other is not None and len(fixed) == 1 and isinstance(symbol, tuple):
        number = fixed[0].low
        if has(symbol[0], "adds"):
            return KeyRange(other.low + number, other.step, other.high + number)
        if symbol[0] == "Mul" and number > 0:
            return KeyRange(other.low * number, other.step * number, other.high * number)
        if symbol[0] == "BitwiseAnd" and number >= 0:
            return KeyRange(0, 1, number)
    return KeyRange(0, 1, math.inf)


def contracted_order(nodes: Iterable[Node], collectives: Iterable[Collective]) -> tuple[list[Node], list[Node]]:
    """Order the nodes as if the members of each collective were one node; back edges of loops do not count.

    Such an order exists exactly when no two devices can wait for each other in different collectives.

    Returns:
        The order, and the nodes that no order can contain: those on a cycle, and those that depend on one.
    """
    members = {node: group.members for group in collectives for node in group.members}
    waiting: dict[Node, int] = {}
    left: dict[Node, int] = {}  # by the first member: how many members still wait
    leaving: dict[Node, list[Node]] = {}  # by the back edge of a loop: the Exits that wait for its last iteration
    for node in nodes:
        count = len(node._inputs) + len(node._controls)
        if node.op in MERGES:
            count -= sum(value.node.op in BACK_EDGES for value in node._inputs)
        elif node.op in EXITS:
            last = last_iteration(node)
            count += len(last)
            for back in last:
                leaving.setdefault(back, []).append(node)
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
        if node.op in BACK_EDGES:
            readers = leaving.get(node, [])
        else:
            readers = [reader for value in node._outputs for reader, _ in value._uses]
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


def deadlock(collectives: Iterable[Collective], stuck: Iterable[Node]) -> list[tuple[Collective, tuple[Node, ...]]]:
    """Return collectives that wait for each other in a circle: the shortest one.

    Args:
        stuck: the nodes that `contracted_order` left out.

    Returns:
        Each collective, with the chain of nodes from its waiting member to the awaited member of the next.
    """
    group_of = {node: group for group in collectives for node in group.members}
    nodes = set(stuck)
    waits: dict[int, dict[int, tuple[Node, ...]]] = {}
    listed = {id(group): group for group in collectives}
    for node in stuck:
        if node in group_of:
            for chain in _behind(node, nodes, group_of):
                waits.setdefault(id(group_of[node]), {}).setdefault(id(group_of[chain[-1]]), chain)
    circles = (_circle(start, waits) for start in waits)
    shortest = min(filter(None, circles), key=len, default=[])
    return [(listed[one], waits[one][two]) for one, two in zip(shortest, [*shortest[1:], *shortest[:1]], strict=True)]


def _circle(start: int, waits: Mapping[int, Mapping[int, object]]) -> list[int]:
    """Return the shortest circle through `start`; empty where there is none."""
    came: dict[int, int] = {}
    queue = [start]
    for one in queue:  # the loop appends to it
        for two in waits.get(one, ()):
            if two == start:
                path = [one]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if two not in came:
                came[two] = one
                queue.append(two)
    return []


def _behind(node: Node, within: set[Node], stop: Mapping[Node, Collective]) -> Iterator[tuple[Node, ...]]:
    """Yield the chains of nodes from `node` to the nearest collectives that it depends on."""
    came = {node: node}
    stack = [node]
    while stack:
        reader = stack.pop()
        for producer in dependencies(reader):
            if producer in stop and producer in within:
                chain = [producer, reader]
                while chain[-1] is not node:
                    chain.append(came[chain[-1]])
                yield tuple(chain[::-1])
            elif producer not in came and producer in within:
                came[producer] = reader
                stack.append(producer)
