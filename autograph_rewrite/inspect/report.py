"""Build the offline page of a report from an original graph, its rewrite, or both."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from autograph_rewrite.config.config import Config
from autograph_rewrite.cost.levers import levers
from autograph_rewrite.cost.simulate import SimulatedStep, simulate
from autograph_rewrite.cost.tasks.layers import NodeUse, Scope, rows, tree
from autograph_rewrite.cost.tasks.result import Simulation
from autograph_rewrite.errors import RewriteError
from autograph_rewrite.inspect.communication import meetings
from autograph_rewrite.inspect.explain import text_of
from autograph_rewrite.inspect.pass_states import GraphStates, Numbered
from autograph_rewrite.inspect.profile import Profile, lane_of, node_rows
from autograph_rewrite.inspect.report_view import Account, ShownEdge, account_of, edges_of, model_edges_of
from autograph_rewrite.inspect.summary import Summary, VariableLine, summarise
from autograph_rewrite.ir.graph import PASS_ATTR, Graph
from autograph_rewrite.ir.mesh import PROCESS
from autograph_rewrite.ir.types import device_specs
from autograph_rewrite.normalize.normalize import normalise_original
from autograph_rewrite.passes.base.pass_manager import Observer
from autograph_rewrite.plan.parts.messages import MODEL_AXIS, EdgePlan
from autograph_rewrite.plan.parts.notes import ranking
from autograph_rewrite.plan.parts.residence import Residence
from autograph_rewrite.plan.plan import Plan
from autograph_rewrite.training_graph import TrainingGraph

SCHEMA = 1
NO_SNAPSHOTS = "There are no snapshots of the passes: give the original graph and --config, and they run again."
NO_ORIGINAL = "There is no original to simulate: give the original graph and --config."
NO_PLAN = "A .pb keeps no plan: with --plan, owners, bytes and reasons are shown as well."


@dataclass(frozen=True)
class Reported:
    """The subject of a report.

    Attributes:
        states: of the graph after the passes; the last is the final graph.
        original: the graph before the rewrite, if available.
        config: the configuration of the rewrite, for the speed of the network, and for other plans.
        batch: examples of all devices together, where the graph leaves that open.
        measured: the profile of some steps.
        verified: the result of `verify`, as plain data; None: it was not run.
    """

    states: GraphStates
    original: TrainingGraph | None = None
    new: TrainingGraph | None = None
    plan: Plan | None = None
    config: Config | None = None
    batch: int | None = None
    measured: Profile | None = None
    verified: Mapping[str, Any] | None = None


def of_ranks(
    states: GraphStates,
    original: TrainingGraph,
    run: Callable[[TrainingGraph, list[Observer], int], TrainingGraph],
    task: int | None,
) -> TrainingGraph:
    """Record the graph after every pass, and the final graph of every process; return the first process's rewrite.

    Args:
        run: rewrites a graph, with observers, for one process.
        task: the only process to show; None: all of them.
    """
    states.keep("original", original.graph, original.placements)
    flat = normalise_original(original)
    states.keep("normalise", flat.graph)
    new = run(flat, [states], task or 0)
    plan = new.report.plan
    several = task is None and len(plan.processes) > 1 and not plan.is_driven
    states.keep("expand (rank 0)" if several else "expand", new.graph, new.placements)
    for rank in range(1, len(plan.processes) if several else 1):
        other = run(flat, [], rank)
        states.keep(f"expand (rank {rank})", other.graph, other.placements)
    return new


def is_rewritten(graph: Graph) -> bool:
    """Return whether a pass made any node of a graph."""
    return any(PASS_ATTR in node.attrs for node in graph)


def report_data(shown: Reported) -> dict[str, Any]:
    """Return the data of the page by view; docs/report.md has the schema."""
    item, new, plan = shown.original or shown.new, shown.new, shown.plan
    assert item is not None
    found = summarise(item)
    told = new is not None and new.report is not None
    notes = [NO_SNAPSHOTS] if new is not None and len(shown.states.steps) == 1 else []
    notes += [NO_PLAN] if new is not None and plan is None else []
    simulated, problem = _step(shown)
    step = of_step(simulated.found) if simulated is not None else None
    states = shown.states.data()  # the cost refers to names by their numbers in it
    return {
        "overview": {
            "schema": SCHEMA,
            "graph": of_graph(found),
            "rewrite": of_rewrite(account_of(new, shown.batch)) if told and new is not None else None,
            "batch": plan.batch if plan is not None else 0,
            "notes": [*notes, problem] if problem else notes,
            "no_step": problem,
        },
        "graph": states,
        **{f"step-{index}": one.data() for index, one in enumerate(shown.states.steps)},
        "variables": variables(found.variables, plan),
        "exchanges": exchanges(new, plan) if new is not None else [],
        "reshards": reshards(new, plan) if new is not None and plan is not None else [],
        "model_edges": model_edges(plan) if new is not None and plan is not None else [],
        "step": step,
        "cost": of_cost(shown, simulated) if simulated is not None else None,
        "verified": shown.verified,
        "measured": report_part(shown.measured, step) if shown.measured is not None else None,
    }


def _step(shown: Reported) -> tuple[SimulatedStep | None, str]:
    """Return the simulated step, or why there is none."""
    if shown.new is None:
        return None, ""
    if shown.original is None or shown.plan is None:
        return None, NO_ORIGINAL
    batch = shown.batch or (shown.measured.examples if shown.measured is not None else 0)
    try:
        found = simulate(shown.original, shown.plan, shown.config, batch=batch or None)
    except RewriteError as error:
        return None, f"The step cannot be simulated: {error}"
    return found, ""


def report_page(title: str, shown: Reported) -> str:
    """Return the page of a report."""
    return page(f"{title} - autograph-rewrite", report_data(shown))


# Where the time goes: the predicted cost of each name scope and node, next to the measured time.


def of_cost(shown: Reported, step: SimulatedStep) -> dict[str, Any]:
    """Return the costs of scopes, outer ones first, and of nodes, by the number of their name; both in columns."""
    found, numbers = step.found, shown.states.names
    scopes = list(rows(tree(found.nodes)))
    took = measured_by_scope(shown.measured) if shown.measured is not None else {}
    nodes = [(numbers[one.name], one) for one in found.nodes if one.name in numbers]
    keys = ("name", "depth", "nodes", "seconds", "exchange_seconds", "exchanged_bytes", "peak_bytes")
    return {
        "levers": list(levers(step, shown.config)),
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
    """Return the seconds of each scope in the typical step, averaged over the devices."""
    each = max(1, len(profile.devices))
    took = tree(NodeUse(row["node"], row["seconds"] / each, 0.0, 0, 0) for row in node_rows(profile))
    found: dict[str, float] = {}
    below: list[Scope] = [took]
    while below:
        scope = below.pop()
        found["/".join(scope.path)] = scope.seconds
        below += scope.children.values()
    return found


# The file of a report: one page with its data, style and scripts, which sends no requests.
#
#     report.html    <meta Content-Security-Policy ... default-src 'none'>
#     data           <script type="application/json" id="data-graph">      parsed when its view is opened
#     style, code    page/*.css, page/*.js, and dagre, which lays opened scopes out
#
# Names of nodes may be hostile: the page only sets them as text, and in JSON `<` is escaped.


SCRIPTS = (
    "dagre.min.js",
    "data.js",
    "scopes.js",
    "layout.js",
    "graph_view.js",
    "details.js",
    "tables.js",
    "cost.js",
    "timeline.js",
    "main.js",
)


def page(title: str, data: Mapping[str, Any]) -> str:
    """Return the text of the file.

    Args:
        data: of its views, by name; docs/report.md has the schema.
    """
    folder = files(__package__).joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    parts = {
        "<!--title-->": html.escape(title),
        "<!--style-->": f"<style>\n{read('report.css')}</style>",
        "<!--data-->": "\n".join(_data(name, value) for name, value in data.items()),
        "<!--scripts-->": "\n".join(f"<script>\n{read(name)}\n</script>" for name in SCRIPTS),
    }
    text = read("report.html")
    pieces = []
    for mark, part in parts.items():  # in the order of the template, so that a mark inside a part is never replaced
        before, _, text = text.partition(mark)
        pieces += [before, part]
    return "".join([*pieces, text])


def _data(name: str, value: Any) -> str:
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data-{html.escape(name)}">{text}</script>'


# The tables of a report: variables, and exchanges between replicas.


def variables(lines: Sequence[VariableLine], plan: Plan | None) -> list[dict[str, Any]]:
    """Return each variable's home, size and slots.

    Args:
        lines: of the summary of the original, if available.
        plan: of the rewrite; None for a graph that is not distributed.
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
    """Return the exchanges of a step, in the order of the collectives."""
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
    return any(PROCESS in hop.over for hop in edge.lowered.hops)


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


def _rows(edges: Iterable[ShownEdge]) -> list[dict[str, Any]]:
    return [
        {
            "value": edge.value,
            "from": edge.from_,
            "to": edge.to,
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


# The measured part of a report: the typical step of all ranks, in the same columns as the predicted step.


MOST = 400
"""The most rows of a table of nodes or exchanges, the slowest first."""


def report_part(profile: Profile, predicted: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures and events of the typical step; times are in microseconds since the first rank began it.

    Args:
        predicted: the simulated step, for a profile that has none.
    """
    events: list[tuple[str, str, str, float, float]] = []
    begin = min(trace.steps[profile.typical].start for trace in profile.ranks)
    for trace in profile.ranks:
        step = trace.steps[profile.typical]
        for one in trace.ran:
            if one.end <= step.start or one.start >= step.end:
                continue
            source = trace.sources[one.source]
            name = source.exchange or f"{source.origin or source.node} ({source.op}{_made(source.made_by)})"
            kind = "exchange" if source.exchange else "compute" if source.origin else "other"
            start = (max(one.start, step.start) - begin) / 1e3
            length = (min(one.end, step.end) - max(one.start, step.start)) / 1e3
            events.append((name, f"rank {trace.rank} {lane_of(source)}", kind, start, length))
    figures = replace(profile, predicted=profile.predicted or predicted).figures()
    return {
        **figures,
        "nodes": figures["nodes"][:MOST],
        "exchanges": figures["exchanges"][:MOST],
        "events": in_columns(events),
    }


def in_columns(events: Iterable[tuple[str, str, str, float, float]]) -> dict[str, Any]:
    """Return events by their start, in columns, with texts by number.

    Args:
        events: name, lane and kind of each, its start and its length in microseconds.
    """
    names, lanes, kinds = Numbered(), Numbered(), Numbered()
    rows = [
        (names.of(name), lanes.of(lane), kinds.of(kind), round(start, 3), round(length, 3))
        for name, lane, kind, start, length in events
    ]
    rows.sort(key=lambda row: row[3])
    columns = ("name", "lane", "kind", "start", "seconds")
    return {
        **{column: [row[index] for row in rows] for index, column in enumerate(columns)},
        "names": names.texts,
        "lanes": lanes.texts,
        "kinds": kinds.texts,
    }


def _made(by: str) -> str:
    return f", {by}" if by and by != "expand" else ""


# The first view of a report: the rewrite, its coverage, the cost of a step, and notes.


def of_graph(found: Summary) -> dict[str, Any]:
    """Return the overview of the original graph."""
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
    """Return the overview of a rewrite, with its coverage, passes and notes."""
    report, plan, covered = account.report, account.plan, account.covered
    return {
        "replicas": plan.replicas,
        "devices": [list(own) for own in account.devices],
        "micro": plan.microbatches,
        "mode": plan.mode,
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "seconds": report.seconds,
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
            {"pass": one.name, "seconds": one.seconds, "added": one.added, "removed": one.removed}
            for one in report.passes
        ],
        "inexact": [vars(note) for note in report.inexact],
        "notes": [vars(note) for note in report.notes],
        "plan_notes": list(account.plan_notes),
        "ranking": ranking(account.ranking),
        "exchanged_bytes": account.exchanged_bytes,
        "exchanges": sum(edge.kind != "local" for edge in account.edges),
        "text": text_of(account),
    }


def of_step(found: Simulation) -> dict[str, Any]:
    """Return the predicted step: times, devices, links, and events in columns."""
    events = ((one.name, one.lane, one.kind, one.start * 1e6, one.seconds * 1e6) for one in found.events)
    return {
        **found.data(),
        "memory": [[[round(at * 1e6, 3), nbytes] for at, nbytes in device.memory] for device in found.devices],
        "events": in_columns(events),
    }
