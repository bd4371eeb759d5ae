"""Compute the integers by which the members of a collective find each other, the same in every process.

A group key follows from the ordered devices, an instance key from the reduced value and its role. Nothing
depends on call order, so processes that rewrite one graph agree without communication.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autograph_rewrite.ir.types.device_names import canonical
from autograph_rewrite.plan.parts.messages import EdgePlan

# Keys are int32 inputs of the collectives. Zero is reserved: in a plan it means "not a collective". The upper half of
# the numbers is for collectives whose key also depends on their shape (passes.collectives.key_operands.Keys).
KEYS = 2**30

Members = Callable[[bool, int], Sequence[str]]


def group_key(devices: Sequence[str]) -> int:
    """The key of the group of these devices, in this order.

    TensorFlow refuses one key for two device sets ("joining a group that is already full").
    """
    return _stable("group", *(canonical(device) for device in devices)) or 1


def instance_keys(collectives: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """One distinct key for each (value name, role), in whatever order these are given.

    Two values whose hashes collide take neighbouring keys, the lesser name first. With one key, TensorFlow would pair
    whichever tensors arrive together.
    """
    keys: dict[tuple[str, str], int] = {}
    taken = {0}
    for value, role in sorted(set(collectives)):
        key = _stable(value, role)
        while key in taken:
            key = (key + 1) % KEYS
        taken.add(key)
        keys[value, role] = key
    return keys


def with_keys(edges: Iterable[EdgePlan], members: Members) -> tuple[EdgePlan, ...]:
    """The edges, with the keys of collectives and their place in the total order.

    The order is that of the edges; the edges of a bucket have the place of its first edge.

    Args:
        edges: in the order in which they are made.
        members: gives the devices that a collective joins, by whether it crosses between processes and the logical
            device of its value.
    """
    groups = functools.cache(lambda crosses, logical: group_key(members(crosses, logical)))
    listed = tuple(edges)
    first: dict[object, EdgePlan] = {}  # of each collective: an edge alone, or a bucket
    for index, edge in enumerate(listed):
        if edge.is_collective:
            first.setdefault(edge.bucket or ("alone", index), edge)
    orders = {collective: order for order, collective in enumerate(first)}
    keys = instance_keys(_identity(edge) for edge in first.values())

    def keyed(index: int, edge: EdgePlan) -> EdgePlan:
        if not edge.is_collective:
            return edge
        collective = edge.bucket or ("alone", index)
        key = keys[_identity(first[collective])]
        return replace(
            edge, group_key=groups(edge.lowered.crosses, edge.logical), instance_key=key, order=orders[collective]
        )

    return tuple(keyed(index, edge) for index, edge in enumerate(listed))


def _identity(edge: EdgePlan) -> tuple[str, str]:
    """The parts of an instance key. One value may be converted twice, to different placements."""
    return edge.value, edge.role or f"{edge.from_} to {edge.to}"


def _stable(*parts: str) -> int:
    """A number below `KEYS` that is the same in every process (unlike `hash`, which is salted)."""
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % KEYS
