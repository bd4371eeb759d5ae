"""The tables of a report: variables, and what replicas exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autograph_rewrite.inspect.communication import meetings
from autograph_rewrite.inspect.report_view import Edge, edges_of, model_edges_of
from autograph_rewrite.inspect.summary import VariableLine
from autograph_rewrite.ir.replication import Axis
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.plan.parts.messages import MODEL_AXIS, EdgePlan
from autograph_rewrite.plan.parts.residence import Residence
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph


def variables(lines: Sequence[VariableLine], plan: Plan | None) -> list[dict[str, Any]]:
    """Return where each variable lives, what it takes there, and what the optimizer keeps beside it.

    Args:
        lines: of the original's summary, where that is at hand.
        plan: of its rewrite; None of a graph that is not distributed.
    """
    sizes = {line.name: line.bytes for line in lines}
    return [_variable(line, plan, sizes) for line in lines if line.slot_of is None or line.slot_of not in sizes]


def _variable(line: VariableLine, plan: Plan | None, sizes: dict[str, int | None]) -> dict[str, Any]:
    residence = plan.residences.get(line.name) if plan is not None else None
    shape = "?" if line.shape is None else "x".join("?" if dim is None else str(dim) for dim in line.shape) or "scalar"
    return {
        "name": line.name,
        "type": line.dtype,
        "shape": shape,
        "bytes": line.bytes,
        "trained": line.trainable,
        "updates": len(line.updates),
        "slots": [{"name": slot, "bytes": sizes.get(slot)} for slot in line.slots],
        "slot_bytes": sum(sizes.get(slot) or 0 for slot in line.slots),
        "residence": _residence(residence, plan),
        "devices": _devices(residence, plan),
        "shards": list(residence.sizes) if residence is not None else [],
    }


def _residence(residence: Residence | None, plan: Plan | None) -> str:
    if plan is None:
        return "here"
    if residence is not None and residence.is_on_server:
        return "on servers, in shards" if residence.sizes else "on a server"
    if residence is not None and residence.sizes:
        stages = {1: "optimizer state", 2: "state and gradients", 3: "variable, state and gradients"}
        return f"split over replicas ({stages.get(residence.stage, 'shards')})"
    return "a copy on each device" if plan.mode == "mirrored" else "one copy per process"


def _devices(residence: Residence | None, plan: Plan | None) -> list[str]:
    if plan is None:
        return []
    places = residence.servers if residence is not None and residence.servers else plan.devices
    if plan.mode == "shared" and places is plan.devices:
        places = plan.devices[:: max(1, plan.replicas_each)]
    return [device_specs.short(place) for place in dict.fromkeys(places)]


def exchanges(item: TrainingGraph, plan: Plan | None) -> list[dict[str, Any]]:
    """Return what replicas exchange in a step, in the order of the collectives.

    Args:
        item: rewritten.
        plan: of its rewrite, where that is known.
    """
    by_value = {edge.value: edge for edge in (plan.edges if plan is not None else ()) if edge.lowered.hops}
    found: list[dict[str, Any]] = []
    for one in meetings(item, plan):
        edge = by_value.get(one.value.partition(" and ")[0])
        places = tuple(dict.fromkeys(map(device_specs.short, one.places)))
        found.append(
            {
                "order": one.order,
                "op": one.kind,
                "value": one.value,
                "type": one.dtype,
                "bytes": one.bytes,
                "for": one.owner,
                "role": one.role,
                "members": len(one.members),
                "devices": list(places),
                "bucket": edge.bucket if edge is not None else 0,
                "compressor": edge.compressor if edge is not None else "none",
                "link": "between processes" if _crosses(edge, plan) else "within a process",
                "reason": edge.reason if edge is not None else "",
            }
        )
    return found


def _crosses(edge: EdgePlan | None, plan: Plan | None) -> bool:
    if plan is None or edge is None or len(plan.processes) == 1:
        return False
    return any(Axis.PROCESS in hop.over for hop in edge.lowered.hops)


def reshards(item: TrainingGraph, plan: Plan) -> list[dict[str, Any]]:
    """Return every edge of a plan, with its place in the plan's file."""
    return _rows(edges_of(item, plan))


def model_edges(plan: Plan) -> list[dict[str, Any]]:
    """Return every conversion on the model axis, with the axis of the mesh."""
    return [
        {**row, "for": f"{MODEL_AXIS} {edge.axis}", "axis": edge.axis}
        for edge in model_edges_of(plan)
        for row in _rows([edge])
    ]


def _rows(edges: Iterable[Edge]) -> list[dict[str, Any]]:
    return [
        {
            "value": edge.value,
            "from": edge.before,
            "to": edge.after,
            "by": edge.means,
            "for": edge.owner,
            "bytes": edge.bytes,
            "bucket": edge.bucket,
            "order": edge.order,
            "reason": edge.reason,
            "where": edge.where,
            "kind": edge.kind,
        }
        for edge in edges
    ]
