"""Name nodes of rewritten graphs that the runtime relies on, and exchanges, for messages of processes that wait."""

from __future__ import annotations

from collections.abc import Iterable

from autograph_rewrite.plan.parts.messages import MODEL_AXIS, SIZES, STEP, EdgePlan

EDGE_ATTR = "_autograph_edge"
"""Attribute of nodes of one of several edges of a value: the role of the edge, or the model axis, with its number."""


def model_axis_name(number: int) -> str:
    """Return the name of a model axis, as the attribute of the nodes that exchange values along it."""
    return f"{MODEL_AXIS} {number}"


def proxy_of(handle: str) -> str:
    """Return the name of the node that gives the handle of a worker's copy, by that of the variable."""
    return f"{handle}/proxy"


# Names of the exchanges of a step, in their order, for the messages of a process that waits in one.
#
# the sizes of the parts (key 901), bucket 1: the gradients of 'w', 'b' (key 1234), 'loss' (key 77), and 2 more

_SHOWN = 3
"""How many exchanges, and how many variables of an exchange, are named."""


def named_exchanges(edges: Iterable[EdgePlan]) -> str:
    """Return the exchanges of a step between processes, the first ones by name; "" where there are none."""
    together: dict[tuple[int, int], list[EdgePlan]] = {}
    waiting = [edge for edge in edges if edge.is_collective or edge.lowered.is_stored]
    for edge in sorted(waiting, key=lambda edge: (edge.order is None, edge.order or 0)):
        together.setdefault((edge.group_key, edge.instance_key), []).append(edge)
    names = [_name(members) for members in together.values()]
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _name(members: list[EdgePlan]) -> str:
    """Return the content of one collective, and its key."""
    first = members[0]
    what = _listed(members)
    if not first.is_collective:
        return f"{what} (stores on a server)"
    if first.bucket:
        what = f"bucket {first.bucket}: {what}"
    return f"{what} (key {first.instance_key})"


def _listed(members: list[EdgePlan]) -> str:
    if members[0].to == SIZES and len(members) == 1:
        return "the sizes of the parts"
    owners = list(dict.fromkeys(e.owner for e in members if e.owner not in (STEP, MODEL_AXIS)))
    values = list(dict.fromkeys(e.value for e in members if e.owner in (STEP, MODEL_AXIS) and e.to != SIZES))
    found = [f"'{name}'" for name in (*owners, *values)]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


# How many bytes a step exchanges: the one count that plan, comm, simulate, explain and report show.


def exchanged_bytes(edges: Iterable[EdgePlan]) -> int:
    """Return the bytes that one member of each exchange sends in a step, for the batch size of the plan."""
    return sum(edge.bytes for edge in edges if edge.lowered.hops or edge.compressor != "none")
