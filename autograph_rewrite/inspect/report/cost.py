"""Where the time goes: what each name scope and node of the predicted step costs, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograph_rewrite.cost.tasks.layers import NodeUse, Scope, rows, tree
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.inspect.profile.profile import Profile
from autograph_rewrite.inspect.profile.tables import node_rows
from autograph_rewrite.inspect.report.graph_states import Numbered


def of_cost(found: Simulation, names: Numbered, levers: Sequence[str], measured: Profile | None) -> dict[str, Any]:
    """Return scopes, each before those in it, and nodes; in columns, nodes by the number of their name.

    Args:
        found: a simulated step.
        names: the numbers of the names in the page.
        levers: sentences.
        measured: of the same step, if it was.
    """
    scopes = list(rows(tree(found.nodes)))
    took = measured_by_scope(measured) if measured is not None else {}
    nodes = [(names.numbers[one.name], one) for one in found.nodes if one.name in names.numbers]
    keys = ("name", "depth", "nodes", "seconds", "exchange_seconds", "exchanged_bytes", "peak_bytes")
    return {
        "levers": list(levers),
        "layers": [one.name for one in found.layers()],
        "scopes": {
            **{key: [getattr(one, key) for one in scopes] for key in keys},
            "measured": [took.get(one.name) for one in scopes],
        },
        "nodes": {
            "id": [number for number, _ in nodes],
            "seconds": [one.seconds for _, one in nodes],
            "bytes": [one.peak_bytes for _, one in nodes],
        },
    }


def measured_by_scope(profile: Profile) -> dict[str, float]:
    """Return what the nodes of each scope took in the typical step, in seconds of one device."""
    each = max(1, len(profile.devices))
    took = tree(NodeUse(row["node"], row["seconds"] / each, 0.0, 0, 0) for row in node_rows(profile))
    found: dict[str, float] = {}
    below: list[Scope] = [took]
    while below:
        scope = below.pop()
        found["/".join(scope.path)] = scope.seconds
        below += scope.children.values()
    return found
