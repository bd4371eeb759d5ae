"""List the communication of a graph: collectives, stores on servers, and nodes that merge values of replicas."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autograph_rewrite.diagnostics.amounts import few, several, size
from autograph_rewrite.errors import GraphError
from autograph_rewrite.inspect.graph_source import Source, as_item
from autograph_rewrite.inspect.report_view import ShownEdge, edges_of, plan_of
from autograph_rewrite.inspect.table import drawn, table
from autograph_rewrite.ir.format.printer import static_shape
from autograph_rewrite.ir.graph import ORIGIN_ATTR, PASS_ATTR, Graph, Node, Value
from autograph_rewrite.ir.traversal import grouped
from autograph_rewrite.ir.types import device_specs, dtypes
from autograph_rewrite.ir.verify.collective_groups import collect, contracted_order
from autograph_rewrite.ops.traits import has
from autograph_rewrite.plan.parts.messages import MODEL_AXIS
from autograph_rewrite.plan.parts.names import EDGE_ATTR, model_axis_name
from autograph_rewrite.plan.plan import Plan

EXCHANGE = "exchange"
INSTANCE = re.compile(r"replica_(\d+(?:/micro_\d+)?)/(.+)", re.DOTALL)


SHOWN = 4
"""The most names of a list; the others are only counted."""


@dataclass(frozen=True)
class Meeting:
    """One exchange: a collective with all its members, a store, or a node that merges values of replicas.

    Attributes:
        kind: the op type of the members, of the store, or of the merging node.
        value: the original value that is exchanged, or the first of a bucket.
        members: the nodes that take part; for a store, its node and the nodes of this process that use it.
        places: their devices.
        order: the position among all collectives, in an order that all devices can follow; None for others.
        keys: group key and instance key; None for others.
        bytes: per member and step; None if the shape is not known.
        owners: the variables whose updates read it, or `step`; empty without a plan.
        role: "exchange"; "hand over", of the result of another exchange; "token", a signal without a value; or
            "model axis", between the logical devices of a replica.
    """

    kind: str
    value: str
    dtype: str
    members: tuple[str, ...]
    places: tuple[str, ...]
    order: int | None
    keys: tuple[int, int | str] | None
    bytes: int | None
    owners: tuple[str, ...]
    role: str = "exchange"

    @property
    def owner(self) -> str:
        """The owners, in one text."""
        return ", ".join(self.owners)

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "kind": self.kind,
            "value": self.value,
            "dtype": self.dtype,
            "members": list(self.members),
            "devices": list(self.places),
            "order": self.order,
            "group_key": self.keys[0] if self.keys else None,
            "instance_key": self.keys[1] if self.keys else None,
            "bytes": self.bytes,
            "owner": self.owner,
            "role": self.role,
        }


def meetings(source: Source, plan: Plan | None = None) -> list[Meeting]:
    """Return the collectives of a graph in an order that all devices can follow, then the stores and merging nodes.

    Args:
        plan: the plan of the rewrite, for owners and sizes; default: that of a rewritten item.
    """
    item = as_item(source)
    plan = plan_of(item, plan)
    edges = [edge for edge in edges_of(item, plan) if edge.kind != "local"]
    groups, _ = collect(item.graph)
    order, _ = contracted_order(item.graph, groups)
    position = {node: index for index, node in enumerate(order)}
    groups.sort(key=lambda group: position.get(group.members[0], len(order)))
    sizes = {edge.node: edge.bytes or None for edge in plan.model_edges} if plan is not None else {}
    several_axes = plan is not None and plan.model is not None and len(plan.model.axes) > 1
    several_axes = several_axes or any(
        _is_along_model(node) and _role(node) != model_axis_name(0) for node in item.graph
    )

    def along(members: tuple[Node, ...], node: str, **more: Any) -> Meeting:
        """Return the exchange of a node's value between the devices of a replica."""
        owner = _role(members[0]) if several_axes else MODEL_AXIS
        return replace(_meeting(members, (), **more), owners=(owner,), bytes=sizes.get(node), role=MODEL_AXIS)

    found = []
    for index, group in enumerate(groups):
        keys = group.group_key, group.instance_key
        if _is_along_model(group.members[0]):
            found.append(along(group.members, _exchanged(group.members[0], sizes), order=index, keys=keys))
        else:
            found.append(_meeting(group.members, edges, order=index, keys=keys))
    found += _stores_of(item.graph, edges)
    made = {edge.node for edge in edges}
    merges = grouped(((_exchanged(node, made), _role(node)), node) for node in filter(_merges, item.graph))
    found += [_meeting(tuple(nodes), edges) for nodes in merges.values()]
    return found + [along((node,), bare(node.name)) for node in item.graph if _joins_blocks(node)]


def _joins_blocks(node: Node) -> bool:
    """Return whether a node joins the terms or blocks of a replica's logical devices."""
    if not has(node.op, "joins_shards") or not _is_along_model(node):
        return False
    return len({value.node.device for value in node.inputs if not has(value.node.op, "constant")}) > 1


def counted_batch(source: Source, plan: Plan | None = None) -> int | None:
    """Return the examples for which the bytes of exchanges are counted; None without a plan."""
    found = plan_of(as_item(source), plan)
    return (found.batch or None) if found is not None else None


def report(found: list[Meeting], batch: int | None = None, *, every: bool = False) -> str:
    """Return the exchanges as a table, with a total.

    Args:
        found: by `meetings`.
        batch: examples for which the bytes are counted, if known.
        every: print all names.
    """
    most = None if every else SHOWN
    rows = [
        (
            "" if one.order is None else one.order,
            one.kind,
            one.value,
            one.dtype,
            len(one.members),
            few(list(dict.fromkeys(map(device_specs.short, one.places))), most),
            "" if one.keys is None else f"{one.keys[0]}/{one.keys[1]}",
            "?" if one.bytes is None else size(one.bytes),
            few(one.owners, most),
        )
        for one in found
    ]
    columns = ("#order", "op", "value", "type", "#members", "devices", "group/instance", "#bytes", "for")
    counted = f" of {batch:,} examples" if batch else ""
    roles = dict.fromkeys((EXCHANGE, *(one.role for one in found)))
    totals = [_total([one for one in found if one.role == role], role) for role in roles]
    totals[0] += f" per member and step{counted}"
    return (
        drawn(table("exchanges", columns, rows, spare=("group/instance", "type", "devices"))) + "; ".join(totals) + "\n"
    )


def _total(found: Sequence[Meeting], role: str) -> str:
    known = [one.bytes for one in found if one.bytes is not None]
    unknown = len(found) - len(known)
    count = f"{len(found):,} on the {role}" if role == MODEL_AXIS else several(len(found), role)
    return f"{count}, {size(sum(known))}" + (f" and {unknown} of unknown size" if unknown else "")


def _meeting(
    members: tuple[Node, ...],
    edges: Sequence[ShownEdge],
    *,
    order: int | None = None,
    keys: tuple[int, int | str] | None = None,
) -> Meeting:
    node = members[0]
    value = _exchanged(node, {edge.node for edge in edges})
    # Instance keys are unique in a plan. With several processes, its group keys differ from those of the graph.
    known = [edge for edge in edges if keys is not None and edge.instance_key == keys[1] != 0]
    known = known or [edge for edge in edges if edge.node == value and edge.role == _role(node)]
    if known:
        value = known[0].value + (f" and {len(known) - 1} more" if len(known) > 1 else "")
    return Meeting(
        kind=node.op,
        value=value,
        dtype=_dtype(node),
        members=tuple(member.name for member in members),
        places=tuple(member.device for member in members),
        order=order,
        keys=keys,
        bytes=sum(edge.bytes for edge in known) if known else _bytes(node.inputs[0]) if node.inputs else None,
        owners=tuple(dict.fromkeys(edge.owner for edge in known)),
    )


def _role(node: Node) -> str:
    role: str = node.attr(EDGE_ATTR, b"").decode()
    return role


def _is_along_model(node: Node) -> bool:
    """Return whether a node belongs to an exchange between the devices of a replica."""
    return _role(node).startswith(MODEL_AXIS)


def _exchanged(node: Node, made: Collection[str]) -> str:
    """Return the node whose value is exchanged: the original, or one that a pass made from it (`Mean/sum`)."""
    original, name = origin_of(node), bare(node.name)
    while original not in made and name.startswith(f"{original}/"):
        if name in made:
            return name
        name = name.rpartition("/")[0]
    return original


def _stores(node: Node) -> bool:
    """Return whether a pass made this node as a store between processes."""
    return has(node.op, "stores") and node.attr(PASS_ATTR, b"expand") != b"expand"


def _stores_of(graph: Graph, edges: Sequence[ShownEdge]) -> Iterator[Meeting]:
    """Yield one exchange for the stores of each value, with the nodes of this process that use them."""
    by_value = {edge.node: edge for edge in edges}
    groups = grouped((node.name.rpartition("/")[0], node) for node in graph if _stores(node))
    exchanged: set[str] = set()
    for name, stores in groups.items():
        users = [use.node for store in stores for value in store.outputs for use in value.uses]
        value = name
        while value and value not in by_value:
            value = value.rpartition("/")[0]
        edge = by_value.get(value)
        is_token = name.endswith("/token")
        role = "token" if is_token else "hand over" if edge is None or value in exchanged else EXCHANGE
        exchanged.add(value)
        yield Meeting(
            kind=stores[0].op,
            value=edge.value if edge is not None and not is_token else name,
            dtype=dtypes.dtype_name(stores[0].attr("dtype") or stores[0].attr("component_types")[0]),
            members=tuple(node.name for node in (*stores, *users)),
            places=tuple(dict.fromkeys(store.device for store in stores)),
            order=None,
            keys=None,
            bytes=1 if is_token else edge.bytes if edge is not None else None,
            owners=("step" if is_token or edge is None else edge.owner,),
            role=role,
        )


def _merges(node: Node) -> bool:
    """Return whether a pass made this node to merge values of two or more replicas."""
    if PASS_ATTR not in node.attrs:
        return False
    matches = [INSTANCE.fullmatch(value.node.name) for value in node.inputs]
    made = {match[1] for match in matches if match is not None}
    if INSTANCE.fullmatch(node.name):  # an instance that merges only the micro-batches of its replica does not count
        made = {replica.partition("/")[0] for replica in made}
    return len(made) > 1


def origin_of(node: Node) -> str:
    """Return the original of a copy, or the original node for which passes made a node."""
    graph, seen = node.graph, {node}
    while (origin := node.attr(ORIGIN_ATTR)) is not None:
        name: str = origin.decode()
        match = INSTANCE.fullmatch(node.name)
        prefix = f"replica_{match[1]}/" if match is not None else ""
        above = graph.nodes.get(prefix + name) or graph.nodes.get(name)
        if above is None or above in seen or above.attr(PASS_ATTR, b"expand") == b"expand":
            return name
        seen.add(above)
        node = above
    return bare(node.name)


def bare(name: str) -> str:
    """Return a name without the prefix of its replica."""
    match = INSTANCE.fullmatch(name)
    return match[2] if match is not None else name


def _dtype(node: Node) -> str:
    try:
        return dtypes.dtype_name(node.output_dtypes[0]) if node.output_dtypes else ""
    except GraphError:
        return ""


def _bytes(value: Value) -> int | None:
    return dtypes.nbytes(value.dtype, static_shape(value))
