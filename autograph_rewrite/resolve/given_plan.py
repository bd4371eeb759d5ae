"""Accept the edges of a user-edited plan, or reject them with file:line.

    edges of another graph                          refused
    collective_reduce ──edited──► add_n             honoured
    bucket of sums that are ready together          honoured
    concat of columns ──edited──► collective_gather refused: it joins rows only

All faults are reported together, before the graph is edited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autograph_rewrite.analysis.propagate import Propagation
from autograph_rewrite.diagnostics.faults import either, raise_if_any
from autograph_rewrite.diagnostics.located_yaml import Finding
from autograph_rewrite.errors import PlanError
from autograph_rewrite.ir.graph import Node
from autograph_rewrite.ir.traversal import marks_before
from autograph_rewrite.ops.facts.placement import PARTIAL
from autograph_rewrite.plan import verify
from autograph_rewrite.plan.parts import collective_keys
from autograph_rewrite.plan.parts.lowerings import LOWERINGS
from autograph_rewrite.plan.parts.messages import EdgePlan
from autograph_rewrite.plan.plan import VERSION, Plan
from autograph_rewrite.resolve.buckets import when_run
from autograph_rewrite.resolve.wire_types import may_change
from autograph_rewrite.training_graph import TrainingGraph

FOUND_ANEW = "an earlier version wrote the plan: its edges were found anew, and lowerings that still fit are kept"


def accept_user_edges(given: Plan, resolved: Plan, state: Propagation, item: TrainingGraph) -> Plan:
    """Return the given plan if it has edges, and they can be carried out on this graph; else the resolved plan.

    Args:
        given: by the caller, perhaps edited.
        resolved: the same request, with the edges of this graph.
        item: the graph, for `plan.verify`.

    Raises:
        PlanError: the plan was resolved on another graph or under other choices, or an edge is impossible.
    """
    if not given.edges:
        return resolved
    if given.version != VERSION:
        given = _in_todays_form(given, resolved)
    _require_the_same_edges(given, resolved)
    verify.require_edges(replace(given, graph_digest=""), item)
    faults = [given.source.fault(*finding) for finding in (*_lowerings(given, resolved), *_buckets(given, state))]
    raise_if_any(faults, error=PlanError, title=given.source.name)
    return given if given.batch in (0, resolved.batch) else _counted(given, resolved)


def _in_todays_form(given: Plan, resolved: Plan) -> Plan:
    """Return a plan of an earlier version with today's edges: those that it has, and others for those of cut variables.

    version 1   dw/shards:0 of w/part_0, dw/shards:1 of w/part_1      today   dw/block of w, and w/read/whole
    """
    named = {_identity(edge): edge for edge in given.edges}
    if named.keys() == set(map(_identity, resolved.edges)):  # it is this graph's: what the user has edited is checked
        return replace(given, version=VERSION)

    def edge_of(today: EdgePlan) -> EdgePlan:
        said = named.get(_identity(today), today)
        return said if said.lowering in _choices(today, given) and not (said.bucket or today.bucket) else today

    keyed = collective_keys.with_keys(map(edge_of, resolved.edges), given.members)
    plan = replace(given, version=VERSION, model_edges=resolved.model_edges, batch_inputs=resolved.batch_inputs)
    return plan.with_edges(keyed, notes=[FOUND_ANEW])


def _identity(edge: EdgePlan) -> tuple[str, str, str, str]:
    return edge.value, edge.from_, edge.to, edge.role


def _counted(given: Plan, resolved: Plan) -> Plan:
    """Return the given plan with bytes for the batch size of the resolved plan."""
    sent = {(edge.value, edge.to, edge.role): edge.bytes for edge in resolved.edges}
    edges = tuple(replace(edge, bytes=sent[edge.value, edge.to, edge.role]) for edge in given.edges)
    return replace(given, edges=edges, batch=resolved.batch)


def _require_the_same_edges(given: Plan, resolved: Plan) -> None:
    wanted, found = set(map(_identity, resolved.edges)), set(map(_identity, given.edges))
    if wanted != found:
        odd = sorted(wanted ^ found)[0]
        missing = "lacks" if odd in wanted else "has"
        raise PlanError(
            f"the plan {missing} the edge '{odd[0]}' from {odd[1]} to {odd[2]}: its edges are not those of this graph",
            where=given.source.name,
            hint="build it anew with build_plan, or remove its edges",
        )


def _lowerings(given: Plan, resolved: Plan) -> Iterator[Finding]:
    """Yield the edges whose lowering is neither the resolved one nor one that may replace it."""
    planned = {(edge.value, edge.to, edge.role): edge for edge in resolved.edges}
    for i, edge in enumerate(given.edges):
        choices = _choices(planned[edge.value, edge.to, edge.role], given)
        if edge.lowering not in choices:
            message = f"'{edge.value}' from {edge.from_} to {edge.to} cannot be lowered as {edge.lowering}"
            yield Finding(("edges", i, "lowering"), message, f"write {either(choices)}")


def _choices(edge: EdgePlan, plan: Plan) -> tuple[str, ...]:
    """Return the ways to lower an edge; where one process has all replicas, one device can do it for all of them."""
    if edge.compressor != "none" or len(plan.processes) > 1:
        return (edge.lowering,)
    adds = edge.from_ == repr(PARTIAL)
    others = [row.name for row in LOWERINGS.values() if edge.lowering in row.instead_of and row.sums in (adds, None)]
    return (edge.lowering, *others)


def _buckets(given: Plan, state: Propagation) -> Iterator[Finding]:
    """Yield the members of buckets that are no sums of fixed shape that are ready together."""
    members = [(i, edge) for i, edge in enumerate(given.edges) if edge.bucket and edge.to == "replicated"]
    sizes = [edge.bucket for _, edge in members]
    bits = {bucket: 1 << bit for bit, bucket in enumerate(dict.fromkeys(sizes))}
    readers: dict[Node, int] = {}
    for _, edge in members:
        for reader, _ in state.graph.value(edge.value).uses:
            readers[reader] = readers.get(reader, 0) | bits[edge.bucket]
    before = marks_before(state.order, readers) if members else {}
    when = when_run(given, state) if members else {}
    together = {edge.bucket: when.get(state.graph.value(edge.value).node) for _, edge in reversed(members)}
    for i, edge in members:
        value = state.graph.value(edge.value)
        fact = state.source(value)
        if fact.placement != PARTIAL:
            reason = "only sums can"
        elif may_change(fact):
            reason = "its shape may change from step to step"
        elif value.node not in when:
            reason = "it is in a loop or a branch"
        elif when[value.node] != together[edge.bucket]:
            reason = "it does not run whenever the others do"
        elif (before[value.node] | readers.get(value.node, 0)) & bits[edge.bucket]:
            reason = "it waits for the sum of another member"
        elif sizes.count(edge.bucket) == 1:
            reason = "it would be alone"
        else:
            continue
        message = f"'{edge.value}' cannot be in bucket {edge.bucket}: {reason}"
        yield Finding(("edges", i, "bucket"), message, "leave bucket out")
