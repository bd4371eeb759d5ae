"""The first view of a report: what was made of the graph, what is divided, what a step costs, what to know."""

from __future__ import annotations

from typing import Any

from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.inspect.explain import text_of
from autograph_rewrite.inspect.report_view import Account
from autograph_rewrite.inspect.summary import Summary
from autograph_rewrite.plan.parts.ranking import ranking


def of_graph(found: Summary) -> dict[str, Any]:
    """Return what there is to say of a graph that is not distributed."""
    item = found.item
    names = {one.name for one in found.variables}
    slots = sum(one.slot_of in names for one in found.variables)
    return {
        "nodes": found.ops.total(),
        "ops": found.ops.most_common(12),
        "variables": len(found.variables) - slots,
        "slots": slots,
        "inputs": [f"{one.name}: {one.dtype}" for one in item.inputs.values()],
        "outputs": [f"{one.name}: {one.dtype}" for one in item.outputs.values()],
        "warnings": list(found.warnings),
    }


def of_rewrite(account: Account) -> dict[str, Any]:
    """Return what a rewrite did, with its coverage, its passes and its notes."""
    covered = account.covered
    return {
        "replicas": account.replicas,
        "devices": [list(own) for own in account.devices],
        "micro": account.micro,
        "mode": account.mode,
        "nodes_before": account.before,
        "nodes_after": account.after,
        "seconds": account.seconds,
        "batch": account.batch or covered.batch,
        "assumed": covered.assumed,
        "coverage": {
            "share": covered.share,
            "flops": covered.flops,
            "text": str(covered),
            "whole": [
                {"node": one.node, "op": one.op, "reason": one.reason, "flops": one.amount.flops}
                for one in covered.largest
            ],
        },
        "passes": [
            {"pass": name, "seconds": seconds, "added": added, "removed": removed}
            for name, seconds, added, removed in account.passes
        ],
        "inexact": [{"node": node, "op": op, "text": text} for node, op, text in account.inexact],
        "notes": [{"node": node, "op": op, "text": text} for node, op, text in account.notes],
        "plan_notes": list(account.plan_notes),
        "ranking": ranking(account.ranking),
        "exchanged_bytes": account.exchanged_bytes,
        "exchanges": sum(edge.kind != "local" for edge in account.edges),
        "text": text_of(account),
    }


def of_step(found: Simulation) -> dict[str, Any]:
    """Return the predicted step: times, devices, links, and what happens when, in columns."""
    names: dict[str, int] = {}
    lanes: dict[str, int] = {}
    kinds: dict[str, int] = {}
    events = found.events
    return {
        **found.data(),
        "memory": [[[round(at * 1e6, 3), nbytes] for at, nbytes in device.memory] for device in found.devices],
        "events": {
            "name": [names.setdefault(event.name, len(names)) for event in events],
            "lane": [lanes.setdefault(event.lane, len(lanes)) for event in events],
            "kind": [kinds.setdefault(event.kind, len(kinds)) for event in events],
            "start": [round(event.start * 1e6, 3) for event in events],
            "seconds": [round(event.seconds * 1e6, 3) for event in events],
            "names": list(names),
            "lanes": list(lanes),
            "kinds": list(kinds),
        },
    }
